"""Recipes on a real swarm: the clusters end equal, and with the very bytes of the simulator."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dilocox.events import Adapted, RoundCommitted, Warned
from p2p_dilocox.invariants import check_history, read_history

from .conftest import Swarm
from .expected import simulated_training
from .peer import Peer, run_text

MakeSwarm = Callable[[str], Swarm]
Join = Callable[[Swarm, str], Peer]


@pytest.fixture
def join(rank_module: Any, tmp_path: Path) -> Join:
    return lambda net, name: Peer(rank_module.run_rank, rank_module.Wish, net, tmp_path, name)


def breaches(*peers: Peer) -> list[str]:
    return check_history(read_history(p.state / "history" / "rank0.jsonl" for p in peers))


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("allreduce", ""),
        ("fedavg", "[local]\nevery = 2\n"),
        ("opendiloco", ""),
        ("cocktailsgd", ""),
        ("streaming", "[schedule]\nfragments = 2\n"),
        ("eager", ""),
        ("sparseloco", ""),
        ("sparta", ""),
        ("overlap-sparta", ""),
        ("dilocox-paper", "[compression]\nlowrank = 8\n[adapt]\nwindow = 1\n"),
    ],
)
def test_two_clusters_end_with_the_parameters_of_the_simulator(
    swarm: MakeSwarm, join: Join, recipe: str, more: str
) -> None:
    """No part of these depends on when a round arrives. `arrival` does: test_training.py."""
    text = run_text(recipe, min_clusters=2, more=more)
    net = swarm(text)
    peers = [join(net, "a"), join(net, "b")]
    first, second = (p.finish() for p in peers)
    assert first.parameter_digests == second.parameter_digests
    for peer in peers:
        committed = [e for e in peer.events if isinstance(e, RoundCommitted)]
        assert [(e.t, len(e.members), e.included) for e in committed] == [(t, 2, True) for t in (1, 2, 3, 4)]
        if recipe in ("cocktailsgd", "streaming", "sparta", "overlap-sparta"):  # the last averages everything
            assert max(e.sent_bytes for e in committed[:-1]) < committed[-1].sent_bytes
        assert (0 < committed[-1].lowrank < 8) == (recipe == "dilocox-paper")
        assert recipe == "dilocox-paper" or not any(isinstance(e, Warned) for e in peer.events)
    assert breaches(*peers) == []
    history = (peers[0].state / "history" / "rank0.jsonl").read_text().splitlines()
    ids = json.loads(history[0])["members"]
    assert simulated_training(text, peers[0].state, ids) == first.parameter_digests


def test_a_late_cluster_has_the_rank_and_the_h_that_the_others_have_come_to(
    swarm: MakeSwarm, join: Join
) -> None:
    """The rank is cut before it joins; H follows what rounds take here, with both."""
    more = '[compression]\nlowrank = 16\n[adapt]\nrule = "band"\nwindow = 2\nenergy = 0.5\n'
    net = swarm(run_text(outer_steps=5000, more=more))
    early = join(net, "early")
    early.until(lambda e: isinstance(e, Adapted) and "lowrank 16 -> " in e.message)
    late = join(net, "late")
    late.until(lambda e: isinstance(e, RoundCommitted) and len(e.members) == 2 and e.included)
    first = next(e for e in late.events if isinstance(e, RoundCommitted) and e.included)
    for peer in (early, late):
        peer.until(lambda e: isinstance(e, RoundCommitted) and e.t == first.t + 3)
    for peer in (early, late):
        peer.wish.value = peer.wish.LEAVE_NOW
        assert peer.finish().reason == "left"
    assert breaches(early, late) == []
    rounds = [{e.t: e for e in p.events if isinstance(e, RoundCommitted)} for p in (early, late)]
    shared = [t for t in rounds[1] if t in rounds[0] and rounds[1][t].included]
    assert len(shared) >= 4
    for t in shared:
        ours, theirs = rounds[0][t], rounds[1][t]
        assert ours.parameter_digests == theirs.parameter_digests
        assert ours.lowrank == theirs.lowrank < 16
    assert [rounds[0][t].H for t in shared[1:]] == [rounds[1][t].H for t in shared[1:]]
