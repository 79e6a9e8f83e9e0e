"""An AllReduce at every step, computed once for all clusters: the same as when each of them is simulated."""

from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dilocox.data import load_tokens
from p2p_dilocox.recipe import recipes
from p2p_dilocox.simulation import Link, Place, Simulation, Together, never_differ
from tests.unit.test_comparison import SETUP

LINK = Link(uplink_mbps=1.0, downlink_mbps=1.0, latency_s=0.02)
PLACES = [Place(cluster_id=f"cluster{number}", link=LINK) for number in range(3)]


def test_it_is_what_the_simulation_of_every_cluster_comes_to(tmp_path: Path) -> None:
    spec = replace(SETUP, inner_steps=30).spec("allreduce", 3)
    # A small learning rate: where gradients vanish, AdamW divides roundings by their own size.
    spec = replace(spec, inner=replace(spec.inner, lr=1e-4), eval=replace(spec.eval, every=10, average=2))
    corpus = load_tokens(spec, tmp_path)
    both = Simulation(spec, PLACES, corpus), Together(spec, PLACES, corpus)
    for simulation in both:
        simulation.run()
    each, together = both
    assert [p.t for p in together.points] == [p.t for p in each.points] == [0, 10, 20, 30]
    for one, other in zip(together.points, each.points, strict=True):
        assert one.val_loss == pytest.approx(other.val_loss, abs=1e-5)
        assert one.mean_val_loss == (other.mean_val_loss and pytest.approx(other.mean_val_loss, abs=1e-5))
        assert one.tokens == other.tokens
        assert one.sent_bytes == pytest.approx(other.sent_bytes, rel=1e-3)
        assert one.seconds == pytest.approx(other.seconds, rel=1e-2)
    assert together.points[-1].val_loss < together.points[0].val_loss - 0.01
    assert together.utilisation == pytest.approx(each.utilisation, rel=1e-2)


def test_only_an_exact_average_of_gradients_at_every_step_is_computed_once() -> None:
    spec = SETUP.spec("allreduce", 0)
    assert [name for name in recipes() if never_differ(SETUP.spec(name, 0))] == ["allreduce"]
    assert not never_differ(replace(spec, compression=replace(spec.compression, bits=16)))
    assert not never_differ(replace(spec, inner=replace(spec.inner, H=2)))
    assert not never_differ(replace(spec, local=replace(spec.local, every=4)))
