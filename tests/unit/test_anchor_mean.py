"""The mean of the last anchors: which ones, how exact, and that a run validates it beside the anchor."""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2p_dilocox.anchor_mean import AnchorMean, mean_of
from p2p_dilocox.checkpoint import store as saved
from p2p_dilocox.data import load_tokens
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.errors import StateError
from p2p_dilocox.events import Evaluated, Event
from p2p_dilocox.pieces import digest_file
from p2p_dilocox.settings import Eval
from p2p_dilocox.simulation import Place, Simulation
from p2p_dilocox.swarm.signed import spec_digest
from p2p_dilocox.traffic import model_tensors
from tests.unit.test_simulation import TEXT, spec_of

Report = Callable[[Event], None]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_tokens(spec_of(), tmp_path_factory.mktemp("tokens"))


def test_it_is_of_the_last_k_anchors_one_every_T_outer_steps() -> None:
    anchors = AnchorMean(3, 2)
    for t in range(1, 12):
        anchors.take(t, {"a": torch.full((2,), float(t))})
        kept = list(range(2, t + 1, 2))[-3:]
        mean = anchors.mean()
        assert (mean is None) == (len(kept) < 2)
        if mean is not None:
            assert mean["a"].tolist() == pytest.approx([sum(kept) / len(kept)] * 2)


def test_the_anchors_it_keeps_do_not_move() -> None:
    anchors, anchor = AnchorMean(2, 1), {"a": torch.zeros(1)}
    for value in (1.0, 3.0):
        anchor["a"].fill_(value)
        anchors.take(1, anchor)
    anchor["a"].fill_(100.0)
    mean = anchors.mean()
    assert mean is not None and float(mean["a"]) == 2.0


def test_sums_are_as_exact_as_one_rounding() -> None:
    models = [{"a": torch.randn(1000, generator=torch.Generator().manual_seed(n))} for n in range(7)]
    exact = torch.stack([m["a"].double() for m in models]).mean(0)
    assert torch.equal(mean_of(models)["a"], exact.float())


def test_a_run_validates_the_mean_of_its_anchors_and_trains_as_without(corpus: Corpus) -> None:
    """The mean's loss is that of a model with the mean's parameters; digests are those of a run without."""
    digests, found = [], []
    for average in (1, 2):
        spec = replace(spec_of("diloco", 4), eval=Eval(every=1, batches=1, average=average))
        simulation = Simulation(spec, [Place(cluster_id=c) for c in "ab"], corpus)
        rank, events = simulation.clusters[0].rank, list[Event]()

        def report(event: Event, events: list[Event] = events, tell: Report = rank.report) -> None:
            events.append(event)
            tell(event)

        rank.report = report
        simulation.run()
        digests.append(simulation.parameter_digests())
        found.append([e for e in events if isinstance(e, Evaluated)])
    assert digests[0] == digests[1]
    assert all(e.mean_val_loss is None for e in found[0])
    assert [e.mean_val_loss is not None for e in found[1]] == [e.t >= 2 for e in found[1]]
    assert [e.val_loss for e in found[0]] == [e.val_loss for e in found[1]]
    assert rank.anchors is not None
    mean = rank.anchors.mean()
    assert mean is not None
    with torch.no_grad():
        for name, parameter in rank.pipeline.parameters.items():
            parameter.copy_(mean[name])
    rank.pipeline.sync_tied_()
    loss = rank.pipeline.evaluate(rank.batches.valid_batches(1))
    assert found[1][-1].mean_val_loss == pytest.approx(loss, abs=1e-6)
    assert abs(loss - found[1][-1].val_loss) > 1e-4


def test_an_export_may_be_the_mean_of_the_last_checkpoints(tmp_path: Path) -> None:
    text = TEXT.format(recipe="diloco", outer_steps=4, more="")
    (tmp_path / "run.toml").write_text(text)
    shapes = {n: s for stage in model_tensors(spec_of("diloco")).stages.values() for n, s in stage.items()}
    anchors = []
    for t in (2, 4, 6):
        step, generator = tmp_path / "checkpoints" / f"step-{t}", torch.Generator().manual_seed(t)
        step.mkdir(parents=True)
        anchors.append({n: torch.randn(shape, generator=generator) for n, shape in shapes.items()})
        save_file({f"anchor/{n}": tensor for n, tensor in anchors[-1].items()}, step / "stage0.safetensors")
        files = {"stage0.safetensors": digest_file(step / "stage0.safetensors")}
        place = saved.Place(t=t + 1, h=0, unsent_tokens=0, outer_t=t, lineage="", members=[], num_ranks=1)
        manifest = saved.Manifest(spec=spec_digest(text), files=files, place=place)
        (step / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        digest = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
        (step / saved.SUMS).write_text(f"{digest}  manifest.json\n")
    export = importlib.import_module("p2p_dilocox.peers.export").export_newest
    assert export(tmp_path, tmp_path / "mean", 2) == [6, 4]
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "mean").glob("*.safetensors"):
        written |= load_file(file)
    assert written.keys() == shapes.keys()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, (anchors[1][name] + anchors[2][name]) / 2)
    with pytest.raises(StateError, match="has 3 complete checkpoints, 4 are to be averaged"):
        export(tmp_path, tmp_path / "more", 4)
