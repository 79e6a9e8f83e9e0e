"""Checkpoints: what is written while training goes on, and what is believed when a cluster comes back."""

import errno
import random
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from p2p_dilocox.adapting import Adapting
from p2p_dilocox.averaging.catchup import read_result
from p2p_dilocox.averaging.joining import Plan
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.snapshot import read_snapshot
from p2p_dilocox.averaging.states import StateShelf, check_offer
from p2p_dilocox.checkpoint import store
from p2p_dilocox.checkpoint.resume import Saved, load_rank, newest, tidy
from p2p_dilocox.errors import NotTrustedError, StateError
from p2p_dilocox.events import Checkpointed, CheckpointFailed
from p2p_dilocox.history import History
from p2p_dilocox.peers.entering import _fall_in
from p2p_dilocox.peers.recovery import recover
from p2p_dilocox.pieces import FileDigest, digest_file
from p2p_dilocox.swarm.messages import Standing, StateOffer, unpack
from p2p_dilocox.tensor_file import write_tensors
from p2p_dilocox.trainer import inner_steps_of

from .proofs import CAP, RUN, averages, committed, gate_of
from .saved import SPEC, SPEC_DIGEST, Saver

Files = list[Path]


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path)


def found(saver: Saver) -> Saved:
    saved = newest(saver.checkpoints, SPEC_DIGEST)
    assert saved is not None
    return saved


def test_a_tensor_file_is_what_safetensors_reads_and_its_digest_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(300, 1000), "a": torch.randn(7, 3).bfloat16(), "scalar": torch.tensor(3.5),
        "c": torch.randn(5, dtype=torch.float64), "turned": torch.randn(4, 6).T, "empty": torch.zeros(0, 3),
    }  # fmt: skip
    digest = write_tensors(tmp_path / "x", tensors, {"place": "here"})
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys() and all(torch.equal(read[n], t) for n, t in tensors.items())
    assert digest == digest_file(tmp_path / "x")
    again = write_tensors(tmp_path / "y", dict(reversed(tensors.items())), {"place": "here"})
    assert again == digest


def test_everything_comes_back_bit_for_bit(saver: Saver, tmp_path: Path) -> None:
    saver.at(3)
    saver.at(4, h=5)
    saver.save()
    before = saver.everything()
    again = Saver(tmp_path)
    saved = found(again)
    assert saved.path.name == "step-4+5"
    assert load_rank(saved, again.rank)
    after = again.everything()
    assert after.keys() == before.keys() and all(torch.equal(after[n], t) for n, t in before.items())
    ours, theirs = saver.rank, again.rank
    for name in ("t", "h", "unsent_tokens"):
        assert getattr(theirs, name) == getattr(ours, name)
    for name in ("t", "lineage", "members"):
        assert getattr(theirs.outer, name) == getattr(ours.outer, name)


def test_what_is_saved_is_the_moment_of_the_call_though_training_goes_on(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: a disk that stands still holds up nobody; a checkpoint that comes due meanwhile is left out."""
    go_on = threading.Event()

    def slow(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> FileDigest:
        assert go_on.wait(30)
        return write_tensors(path, tensors, metadata)

    monkeypatch.setattr(store, "write_tensors", slow)
    saver.at(1)
    before = saver.everything()
    saver.store.save(saver.rank)  # returns while the disk stands still
    saver.at(2)
    saver.store.save(saver.rank)
    (failed,) = [e for e in saver.events if isinstance(e, CheckpointFailed)]
    assert (failed.t, failed.failed) == (2, 1) and "still being written" in failed.message
    go_on.set()
    saver.store.wait()
    again = Saver(tmp_path)
    assert load_rank(found(again), again.rank) and again.outer.t == 1
    assert all(torch.equal(t, before[n]) for n, t in again.everything().items())


def test_a_rank_may_be_a_save_ahead_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saver: Saver
) -> None:
    """Twice the same step, as when a pause comes right after a checkpoint: the second's files are its own.
    Rank 0 waits for the other before there is a checkpoint (field report E10)."""
    go_on, ahead = threading.Event(), Saver(tmp_path)

    def slow(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> FileDigest:
        assert path.name != "rank0.safetensors" or go_on.wait(30)
        return write_tensors(path, tensors, metadata)

    monkeypatch.setattr(store, "write_tensors", slow)
    monkeypatch.setattr(store, "_OTHERS_S", 5.0)
    for one, stage_of in ((saver, {"a.weight": 0, "a.bias": 0}), (ahead, {"b.weight": 1})):
        vars(one.rank.pipeline).update(num_ranks=2, stage_of=stage_of)
        one.at(1)
    ahead.rank.index = 1
    saver.store.save(saver.rank)
    ahead.save()
    ahead.save()
    assert newest(saver.checkpoints, SPEC_DIGEST) is None
    go_on.set()
    saver.store.wait()
    saver.save()
    assert [type(e) for e in saver.events] == [Checkpointed, Checkpointed]
    assert [p.name for p in saver.checkpoints.iterdir()] == ["step-1"]


def test_rank_0_never_reads_half_of_what_another_rank_says(
    two: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for the file every 50 ms; it may look while that is being written."""
    said: list[bool] = []

    def synced(path: Path, content: bytes) -> None:
        path.write_bytes(content[:1])
        said.extend(file.suffix == ".json" for file in path.parent.glob(".rank*"))
        path.write_bytes(content)

    monkeypatch.setattr(store, "_write_synced", synced)
    two.at(3)
    two.save()
    assert said and not any(said) and found(two).path.name == "step-3"


def test_the_newest_ones_are_kept_and_the_rounds_since_the_oldest_of_them(saver: Saver) -> None:
    for t in (1, 2, 3, 70, 80):
        saver.at(t)
        saver.save()
    assert [e.t for e in saver.events if isinstance(e, Checkpointed)] == [1, 2, 3, 70, 80]
    assert sorted(p.name for p in saver.checkpoints.iterdir()) == ["step-70", "step-80"]
    assert saver.kept.result_after(70).call.t == 71
    with pytest.raises(NotTrustedError):
        saver.kept.average_of(1, 0)
    saver.save()  # nothing has changed
    assert sorted(p.name for p in saver.checkpoints.iterdir()) == ["step-70", "step-80"]


def test_rank_and_h_in_force_come_back_with_a_checkpoint(saver: Saver, tmp_path: Path) -> None:
    """From the record of the round before it. The cluster takes its place in an outer step of that length."""
    proof = committed([saver.key], 4, saver.outer.lineage, averages(4), lowrank=[2, 1], H=7)
    saver.kept.remember(4, proof, averages(4))
    saver.at(4, proven=False)
    saver.outer.lineage = read_result(proof, RUN, gate_of(saver.key), CAP).lineage
    saver.outer.members = [saver.key.cluster_id]
    saver.save()
    spec = replace(SPEC, adapt=replace(SPEC.adapt, rule="band"))
    again = Saver(tmp_path).rank
    again.adapting = Adapting(spec, {"a.weight": 0, "b.weight": 1})
    pipeline, rounds = cast(Any, again.pipeline), SimpleNamespace(kept=KeptRounds(tmp_path / "rounds"))
    pipeline.broadcast, pipeline.sum, pipeline.gather = bytes, list, lambda data: [data]
    again.history = History(tmp_path / "history.jsonl", RUN, saver.key.cluster_id, [0, 1], 9.0)
    rounds.service = SimpleNamespace(gate=gate_of(saver.key))
    again.rounds = cast(Any, rounds)
    recover(spec, again, tmp_path, SPEC_DIGEST)
    assert (again.outer.t, again.adapting.wishes()) == (4, [2.0, 1.0])
    again.history.close()
    assert inner_steps_of(spec, again) == 7
    other = Standing(
        cluster_id=saver.key.cluster_id, t=4, committed_t=4, h=9, lineage=again.outer.lineage,
        members=again.outer.members, in_flight=0,
    )  # fmt: skip
    _fall_in(spec, again, Plan(action="start", standing=other))
    assert (again.t, again.h) == (5, 6)  # all of that outer step but one inner step, not 10 - 1


def test_a_joiner_can_check_what_a_checkpoint_offers(saver: Saver) -> None:
    saver.at(2)
    saver.save()
    shelf = StateShelf(saver.checkpoints)
    offer = shelf.offer()
    assert check_offer(offer, RUN, gate_of(saver.key), CAP) == {saver.key.cluster_id}
    for stage in (0, 1):
        digest = offer.files[str(stage)]
        assert all(digest.fits(n, shelf.piece(2, stage, n)) for n in range(len(digest.pieces)))
    for name in ("-1", "00", "x", "9" * 5000):
        misnamed = msgspec.structs.replace(offer, files={name: offer.files["0"], "1": offer.files["1"]})
        with pytest.raises(NotTrustedError):
            unpack(misnamed.pack(), StateOffer)
    names = ["a.weight", "a.bias"]
    snapshot = read_snapshot(saver.checkpoints / "step-2" / "stage0.safetensors", saver.outer, names)
    assert (snapshot.t, snapshot.lineage) == (2, saver.outer.lineage)
    with pytest.raises(NotTrustedError, match="too many"):
        read_snapshot(saver.checkpoints / "step-2" / "stage0.safetensors", saver.outer, names[:1])
    other = Saver(saver.checkpoints.parent / "other", side=16)
    with pytest.raises(NotTrustedError, match=r"float32 \[24, 24\], expected \[16, 16\]"):
        read_snapshot(saver.checkpoints / "step-2" / "stage0.safetensors", other.outer, names)


@pytest.fixture
def two(tmp_path: Path) -> Saver:
    saver = Saver(tmp_path)
    for t in (1, 2):
        saver.at(t)
        saver.save()
    return saver


def test_200_of_200_flipped_bytes_are_found(two: Saver) -> None:
    """R17."""
    dice = random.Random(5)
    step = two.checkpoints / "step-2"
    files = sorted(p for p in step.iterdir())
    sizes = [f.stat().st_size for f in files]
    for number in range(200):
        # Small files as often as large ones, else nearly all would hit tensors.
        file = files[number % len(files)] if number < 100 else dice.choices(files, sizes)[0]
        good = file.read_bytes()
        at, bit = dice.randrange(len(good)), 1 << dice.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        assert found(two).path.name == "step-1", (file.name, at, bit)
        file.write_bytes(good)
    assert found(two).path.name == "step-2"


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "zeroed", "a directory", "missing", "no manifest", "wrong run", "half"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(two: Saver, damage: str) -> None:
    """R17, field report E3."""
    step = two.checkpoints / "step-2"
    file = step / "stage1.safetensors"
    content = file.read_bytes()
    spec, named = SPEC_DIGEST, "stage1.safetensors"
    match damage:
        case "cut":
            file.write_bytes(content[:-100])
        case "empty":
            file.write_bytes(b"")
        case "zeroed":
            file.write_bytes(content[:1000] + bytes(4096) + content[5096:])
        case "a directory":
            file.unlink()
            file.mkdir()
        case "missing":
            file.unlink()
        case "no manifest":
            (step / "manifest.json").unlink()
            named = "manifest.json"
        case "wrong run":
            spec, named = "0" * 64, "another run"
        case "half":
            step.rename(two.checkpoints / ".partial-step-2")
    complaints: list[tuple[Path, str]] = []
    saved = newest(two.checkpoints, spec, lambda s, why: complaints.append((s, why)))
    if damage == "wrong run":
        assert saved is None and len(complaints) == 2
    else:
        assert saved is not None and saved.path.name == "step-1"
    assert damage == "half" or named in complaints[0][1]
    tidy(two.checkpoints, [s for s, _ in complaints])
    left = sorted(p.name for p in two.checkpoints.iterdir())
    aside = {"wrong run": ["damaged-step-1", "damaged-step-2"], "half": ["step-1"]}
    assert left == aside.get(damage, ["damaged-step-2", "step-1"])


def test_unknown_files_do_no_harm_and_the_sums_are_those_of_sha256sum(two: Saver) -> None:
    """Field report E3."""
    step = two.checkpoints / "step-2"
    (step / "notes.txt").write_text("mine")
    (two.checkpoints / "step-x").mkdir()
    assert found(two).path.name == "step-2"
    check = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=step, capture_output=True, text=True)
    assert check.stdout.splitlines() == ["offer: OK", "manifest.json: OK"], check


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(two: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report E2: at every write that there is, the ones before stay and nothing half-written does."""
    real, left = store._write_synced, [0]
    sync = store._sync_directory

    def spend() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> FileDigest:
        spend()
        return write_tensors(path, tensors, metadata)

    def full(path: Path, content: bytes) -> None:
        spend()
        real(path, content)

    def full_sync(path: Path) -> None:
        spend()
        sync(path)

    monkeypatch.setattr(store, "write_tensors", full_tensors)
    monkeypatch.setattr(store, "_write_synced", full)
    monkeypatch.setattr(store, "_sync_directory", full_sync)
    two.at(3)
    writes = 0
    while not any(isinstance(e, Checkpointed) and e.t == 3 for e in two.events):
        left[0] = writes
        two.save()
        writes += 1
        if found(two).place.outer_t == 2:
            assert sorted(p.name for p in two.checkpoints.iterdir()) == ["step-1", "step-2"]
    failed = [e for e in two.events if isinstance(e, CheckpointFailed)]
    assert [e.failed for e in failed] == list(range(1, writes)) and writes > 8
    assert all("No space left on device" in e.message for e in failed)
    assert found(two).path.name == "step-3"


def test_another_number_of_processes_takes_what_clusters_share(two: Saver, tmp_path: Path) -> None:
    again = Saver(tmp_path)
    again.rank.pipeline.num_ranks = 2
    assert not load_rank(found(again), again.rank)
    for name, anchor in again.outer.anchor.items():
        assert torch.equal(anchor, two.outer.anchor[name])
        assert torch.equal(again.parameters[name], anchor)
    assert (again.rank.t, again.rank.h, again.outer.lineage) == (3, 0, two.outer.lineage)


def test_a_checkpoint_of_another_model_is_refused_whole(two: Saver, tmp_path: Path) -> None:
    other = Saver(tmp_path / "other", side=16)
    before = other.everything()
    with pytest.raises(StateError, match="does not fit the run's model"):
        load_rank(found(two), other.rank)
    assert all(torch.equal(t, before[n]) for n, t in other.everything().items())


def test_drifted_checkpoints_are_set_aside_with_their_rounds(two: Saver) -> None:
    for number in (1, 2):
        aside = two.store.set_aside()
        assert aside.name == f"checkpoints-aside-{number}" and not two.checkpoints.exists()
        if number == 1:
            assert newest(aside, SPEC_DIGEST) is not None
            shutil.copytree(aside, two.checkpoints)
    with pytest.raises(NotTrustedError):
        two.kept.result_after(0)
