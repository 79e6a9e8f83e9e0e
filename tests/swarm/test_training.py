"""Whole clusters through the code that a rank runs, in this process: exact algebra, late joiners, resume."""

import errno
import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from p2p_dilocox import trainer
from p2p_dilocox.checkpoint.resume import newest
from p2p_dilocox.errors import DriftedError, LostError, NotTrustedError
from p2p_dilocox.events import (
    Checkpointed,
    CheckpointFailed,
    Event,
    Finished,
    InnerStep,
    Phase,
    RoundCommitted,
    RoundDropped,
    ShardTrained,
    StepSkipped,
    Warned,
)
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.pipeline import Pipeline
from p2p_dilocox.swarm.clock import Clock
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.signed import spec_digest

from .conftest import Swarm
from .expected import plain_training, simulated_training
from .peer import Peer, run_text

LOSSLESS = "[compression]\nbits = 64\nreturn_bits = 64\nlowrank = 0\nfeedback = 'none'\n"
MakeSwarm = Callable[[str], Swarm]


@pytest.fixture
def join(rank_module: Any, tmp_path: Path) -> Callable[[Swarm, str], Peer]:
    return lambda net, name: Peer(rank_module.run_rank, rank_module.Wish, net, tmp_path, name)


def test_one_cluster_with_a_lossless_codec_and_outer_lr_1_is_plain_training_bit_for_bit(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], tmp_path: Path
) -> None:
    """Field report C6."""
    text = run_text("fedavg", more=LOSSLESS)
    peer = join(swarm(text), "alone")
    finished = peer.finish()
    assert finished.reason == "complete"
    cluster_id = SigningKey.load_or_create(peer.state / "cluster.key").cluster_id
    assert finished.parameter_digests == plain_training(text, peer.state, cluster_id)


@pytest.mark.parametrize("overlap", ["arrival", "boundary", "paper", "none"])
def test_two_clusters_end_with_equal_parameters_in_every_overlap(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], overlap: str
) -> None:
    text = run_text(min_clusters=2, more=f"[compression]\nlowrank = 8\n[overlap]\nmode = '{overlap}'\n")
    net = swarm(text)
    peers = [join(net, "a"), join(net, "b")]
    first, second = (p.finish() for p in peers)
    assert first.parameter_digests == second.parameter_digests
    for peer in peers:
        committed = [e for e in peer.events if isinstance(e, RoundCommitted)]
        assert [e.t for e in committed] == [1, 2, 3, 4]
        assert all(len(e.members) == 2 and e.included for e in committed)
    assert check_history(read_history(p.state / "history" / "rank0.jsonl" for p in peers)) == []
    histories = [
        [json.loads(line) for line in (p.state / "history" / "rank0.jsonl").read_text().splitlines()]
        for p in peers
    ]
    assert [(r["t"], r["stage"], r["digest"]) for r in histories[0]] == [
        (r["t"], r["stage"], r["digest"]) for r in histories[1]
    ]
    if overlap != "arrival":  # which depends on when each round arrived
        ids = [h[0]["cluster"] for h in histories]
        assert simulated_training(text, peers[0].state, ids) == first.parameter_digests


@pytest.mark.parametrize("kept", [64, 0])
def test_a_late_cluster_comes_to_where_the_others_are_and_is_in_step_from_then_on(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Field report D6. By the rounds since theta_0; by a state, if rounds before it are not kept."""
    monkeypatch.setattr("p2p_dilocox.averaging.kept._MOST_ROUNDS", kept)
    text = run_text(outer_steps=5000, more="[compression]\nlowrank = 8\n")
    every = 2 if kept else 20  # a state must be fetched and on disk sooner than it is out of date
    net = swarm(text.replace("[checkpoint]\nevery = 2", f"[checkpoint]\nevery = {every}"))
    early = join(net, "early")
    early.until(lambda e: isinstance(e, Checkpointed) and e.t >= 6)
    late = join(net, "late")
    late.until(lambda e: isinstance(e, RoundCommitted) and len(e.members) == 2 and e.included)
    first = next(e for e in late.events if isinstance(e, RoundCommitted) and e.included)
    late.until(lambda e: isinstance(e, RoundCommitted) and e.t == first.t + 2)
    early.until(lambda e: isinstance(e, RoundCommitted) and e.t == first.t + 2)
    for peer in (early, late):
        peer.wish.value = peer.wish.LEAVE_NOW
        assert peer.finish().reason == "left"
    phases = [e.name for e in late.events if isinstance(e, Phase)]
    by_state, by_rounds = {"downloading", "verifying"} & set(phases), "catching up" in phases
    assert by_rounds and not by_state if kept else len(by_state) == 2
    assert phases.index("warming up") < phases.index("training")
    if not kept:  # who is killed now comes back to this state, and takes no outer step twice (rule V3)
        fetched = next(i for i, e in enumerate(late.events) if isinstance(e, Phase) and e.name == "verifying")
        saved = next(i for i, e in enumerate(late.events) if isinstance(e, Checkpointed))
        assert not any(isinstance(e, Phase | RoundCommitted) for e in late.events[fetched + 1 : saved])
    assert check_history(read_history(p.state / "history" / "rank0.jsonl" for p in (early, late))) == []
    digests = {e.t: e.parameter_digests for e in early.events if isinstance(e, RoundCommitted)}
    shared = [e for e in late.events if isinstance(e, RoundCommitted) and e.t in digests]
    assert len(shared) >= 3
    for event in shared:
        assert event.parameter_digests == digests[event.t]


def test_a_cluster_that_joins_half_way_has_the_learning_rates_of_the_others(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer]
) -> None:
    """Field report C9: outer step 10 of 20, on a cosine schedule with a warm-up."""
    text = run_text(outer_steps=20, more="[compression]\nlowrank = 8\n")
    net = swarm(text)
    early = join(net, "early")
    half_way, there = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.t == 10:
            half_way.set()
            there.wait(60)

    early.on_event = hold
    assert half_way.wait(60)
    late = join(net, "late")
    late.until(lambda e: isinstance(e, Phase) and e.name == "warming up")
    there.set()
    early.finish()
    late.finish()
    total, peak, warm_up = 20 * 3, 1e-2, 4
    for peer, first in ((early, 1), (late, 10)):
        steps = [e for e in peer.events if isinstance(e, InnerStep)]
        assert steps[0].t >= first and steps[-1].t == 20
        for e in steps:
            n = (e.t - 1) * 3 + e.h - 1
            cosine = 0.5 * (1 + math.cos(math.pi * (n - warm_up) / (total - warm_up)))
            expected = peak * ((n + 1) / warm_up if n < warm_up else 0.1 + 0.9 * cosine)
            assert e.lr == pytest.approx(expected, rel=1e-12)


def test_another_start_is_found_at_the_roll_call(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], rank_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report C8: one of three clusters has drawn its initial parameters from another seed."""
    build = rank_module.build_chunks

    def drawn(*args: Any, seed: int, **kwargs: Any) -> Any:
        return build(*args, seed=seed + (threading.current_thread().name == "other"), **kwargs)

    monkeypatch.setattr(rank_module, "build_chunks", drawn)
    net = swarm(run_text(outer_steps=6, min_clusters=3, more="[compression]\nlowrank = 8\n"))
    peers = [join(net, name) for name in ("a", "b", "other")]
    with pytest.raises(DriftedError):
        peers[2].finish()
    assert peers[0].finish().parameter_digests == peers[1].finish().parameter_digests
    for peer in peers[:2]:
        committed = [e for e in peer.events if isinstance(e, RoundCommitted)]
        assert [(e.t, len(e.members)) for e in committed] == [(t, 2) for t in range(1, 7)]
    # One coordinator's word only makes it follow; the second's ends it.
    assert not any(e.included for e in peers[2].events if isinstance(e, RoundCommitted))


@pytest.mark.parametrize("h", [1, 3])  # the last one: nothing to offer, weight 0
def test_a_gradient_that_is_not_finite_costs_one_cluster_one_step_and_the_others_nothing(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], monkeypatch: pytest.MonkeyPatch, h: int
) -> None:
    """Field report C1."""
    net = swarm(run_text(outer_steps=6, min_clusters=2, more="[compression]\nlowrank = 8\n"))
    forward_backward, calls = Pipeline.forward_backward, {"good": 0, "bad": 0}

    def with_a_fault(self: Pipeline, tokens: torch.Tensor, stream: str) -> None:
        forward_backward(self, tokens, stream)
        name = threading.current_thread().name
        calls[name] += 1
        if name == "bad" and calls[name] == 3 + h:  # in outer step 2
            grad = next(iter(self.parameters.values())).grad
            assert grad is not None
            grad[0, 0] = math.nan

    monkeypatch.setattr(Pipeline, "forward_backward", with_a_fault)
    good, bad = join(net, "good"), join(net, "bad")
    assert good.finish().parameter_digests == bad.finish().parameter_digests
    (skipped,) = [e for e in bad.events if isinstance(e, StepSkipped)]
    assert (skipped.t, skipped.h, skipped.skipped) == (2, h, 1) and "nan" in skipped.message
    assert not any(isinstance(e, StepSkipped) for e in good.events)
    for peer, steps in ((good, 18), (bad, 17)):
        losses = peer.losses()
        assert len(losses) == steps and all(map(math.isfinite, losses.values()))
        assert "NaN" not in json.dumps([e.to_dict() for e in peer.events])
        committed = [e for e in peer.events if isinstance(e, RoundCommitted)]
        assert [(e.t, len(e.members)) for e in committed] == [(t, 2) for t in range(1, 7)]
    assert check_history(read_history(p.state / "history" / "rank0.jsonl" for p in (good, bad))) == []
    saved = newest(bad.state / "checkpoints", spec_digest(net.text))
    assert saved is not None
    with safe_open(saved.path / "rank0.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            assert torch.isfinite(file.get_tensor(name)).all(), name


def test_a_clock_that_jumps_ends_its_cluster_and_the_other_misses_no_outer_step(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S10: it is a second ahead, which is fine, and an hour in the middle of the run."""
    ahead = {"bad": 1.0}

    def clock() -> Clock:
        name = threading.current_thread().name
        return Clock(lambda: time.time() + ahead.get(name, 0.0))

    monkeypatch.setattr("p2p_dilocox.averaging.company.Clock", clock)
    monkeypatch.setattr("p2p_dilocox.averaging.company._LOOK_AROUND_S", 0.2)
    net = swarm(run_text(outer_steps=5000, min_clusters=2, more="[compression]\nlowrank = 8\n"))
    good, bad = join(net, "good"), join(net, "bad")
    bad.until(lambda e: isinstance(e, RoundCommitted) and e.t == 4)
    ahead["bad"] = 3600.0
    with pytest.raises(NotTrustedError, match=r"clock is (3600\.0|3599\.\d) s ahead"):
        bad.finish()
    good.until(lambda e: isinstance(e, RoundCommitted) and len(e.members) == 1)
    good.wish.value = good.wish.LEAVE_NOW
    good.finish()
    committed = [e.t for e in good.events if isinstance(e, RoundCommitted)]
    assert committed == list(range(1, len(committed) + 1))
    assert not any(isinstance(e, RoundDropped) for e in good.events)


@pytest.mark.parametrize(
    "overlap", ["none", "boundary"]
)  # in `arrival` the network decides when a round lands
def test_a_resumed_cluster_repeats_the_losses_it_would_have_had(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], overlap: str
) -> None:
    """Field report E6. The first swarm runs through; the second one stops after outer step 2 and comes
    back."""
    text = run_text(
        "dilocox", outer_steps=6, more=f"[compression]\nlowrank = 8\n[overlap]\nmode = '{overlap}'\n"
    )
    peer = join(swarm(text), "alone")
    whole = peer.finish()
    kept = {"step-4", "step-4+3", *"1234"}
    for step in (*(peer.state / "checkpoints").iterdir(), *(peer.state / "rounds").iterdir()):
        if step.name not in kept:
            shutil.rmtree(step)
    again = join(swarm(text), "alone")
    assert again.finish().parameter_digests == whole.parameter_digests
    losses = peer.losses()
    repeated = {place: loss for place, loss in again.losses().items() if losses[place] != loss}
    assert again.losses() and not repeated


def test_a_damaged_newest_checkpoint_is_passed_over_and_a_full_disk_does_not_end_the_training(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field reports E2, E3."""
    text = run_text("dilocox", outer_steps=6, more="[compression]\nlowrank = 8\n")
    peer = join(swarm(text), "alone")
    whole = peer.finish()
    assert whole.reason == "complete"
    spec = spec_digest(text)
    steps = peer.state / "checkpoints"
    kept = sorted(step.name for step in steps.iterdir())
    assert [name.split("+")[0] for name in kept] == ["step-4", "step-6"]  # the newest, nothing half-written
    damaged = steps / "step-6" / "rank0.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    found = newest(steps, spec)
    assert found is not None and found.path.name == kept[0]
    assert newest(steps, "0" * 64) is None  # of another run

    def full(path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("p2p_dilocox.checkpoint.store._write_synced", full)
    again = join(swarm(text), "alone")
    assert again.finish().reason == "complete"
    failed = [e.message for e in again.events if isinstance(e, CheckpointFailed)]
    assert failed and all("No space left on device" in message for message in failed)
    assert any("rank0.safetensors is damaged" in e.message for e in again.events if isinstance(e, Warned))
    # The rounds on its disk brought it as far as it was.
    phases = [e.detail for e in again.events if isinstance(e, Phase)]
    assert any(f"from {kept[0]} and 2 outer steps after it" in detail for detail in phases)
    assert sorted(step.name for step in steps.iterdir()) == ["damaged-step-6", kept[0]]
    (digests,) = (e.parameter_digests for e in again.events if isinstance(e, Finished))
    assert digests == whole.parameter_digests


def test_a_cluster_that_left_at_once_goes_on_where_it_was(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer]
) -> None:
    """Rule V3: no outer step is done twice, also when no checkpoint was due."""
    text = run_text("dilocox", outer_steps=5000, more="[compression]\nlowrank = 8\n").replace(
        "[checkpoint]\nevery = 2", "[checkpoint]\nevery = 1000"
    )
    peer = join(swarm(text), "alone")
    peer.until(lambda e: isinstance(e, RoundCommitted) and e.t == 3)
    peer.wish.value = peer.wish.LEAVE_NOW
    left = peer.finish()
    assert left.reason == "left"
    again = join(swarm(text), "alone")
    again.until(lambda e: isinstance(e, RoundCommitted) and e.t == left.t + 2)
    again.wish.value = again.wish.LEAVE_NOW
    assert again.finish().reason == "left"
    assert check_history(read_history([peer.state / "history" / "rank0.jsonl"])) == []
    # The round that was on the wire may have been committed after we had stopped waiting for it.
    (detail,) = (e.detail for e in again.events if isinstance(e, Phase) and e.name == "resumed")
    resumed = int(detail.split("outer step ")[1].split(",")[0])
    assert left.t <= resumed <= left.t + 1
    first = next(e for e in again.events if isinstance(e, RoundCommitted))
    assert first.t == resumed + 1


def test_files_of_10_100_and_1000_lines_are_gone_round_until_the_run_is_complete(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], tmp_path: Path
) -> None:
    """Field report F4, and an empty file among them."""
    (tmp_path / "text").mkdir()
    for lines in (0, 10, 100, 1000):
        text = "".join(f"line {n}\n" for n in range(lines))
        (tmp_path / "text" / f"{lines}.txt").write_text(text)
    data = f'[data]\nsource = "text"\npaths = ["{tmp_path / "text"}"]\norder = "shards"'
    net = swarm(run_text(outer_steps=24, min_clusters=2).replace("[data]", data))
    peers = [join(net, name) for name in ("ada", "bee")]
    ends = [peer.finish() for peer in peers]
    assert [end.reason for end in ends] == ["complete"] * 2
    assert ends[0].parameter_digests == ends[1].parameter_digests
    for peer in peers:
        taken = [(e.shard, e.num_shards) for e in peer.events if isinstance(e, ShardTrained)]
        assert len(taken) == 24 and taken == sorted(set(taken))
        assert taken[-1][0] >= taken[-1][1], "this is to go round"
        said = [e.message for e in peer.events if isinstance(e, Warned) and "it goes round" in e.message]
        assert len(said) == 1 and "in pass 2 over the data" in said[0]


def test_numbers_of_dropped_outer_steps_are_not_used_again(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer]
) -> None:
    """Rule V3. Found by benchmarks/chaos.py: a cluster was killed after it had dropped some alone."""
    text = run_text("dilocox", outer_steps=9, more="[compression]\nlowrank = 8\n")
    peer = join(swarm(text), "alone")
    peer.until(lambda e: isinstance(e, RoundCommitted) and e.t == 3)
    peer.wish.value = peer.wish.LEAVE_NOW
    peer.finish()
    history = peer.state / "history" / "rank0.jsonl"
    last = json.loads(history.read_text().splitlines()[-1])
    with history.open("a") as file:
        for t in (last["t"] + 1, last["t"] + 2):
            file.write(json.dumps(last | {"t": t, "decision": "dropped"}) + "\n")
    again = join(swarm(text), "alone")
    assert again.finish().reason == "complete"
    assert min(e.t for e in again.events if isinstance(e, RoundCommitted)) == last["t"] + 3
    assert check_history(read_history([history])) == []


def test_a_cluster_that_has_lost_the_others_looks_where_they_are_without_a_restart(
    swarm: MakeSwarm, join: Callable[[Swarm, str], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    agree, lost = trainer.agree_in_cluster, list[str]()

    def lose(rank: Any, outcome: Any) -> None:
        if outcome.t >= 3 and not lost:
            lost.append(rank.cluster_id)
            raise LostError("outer step 3: its members are gone")
        agree(rank, outcome)

    monkeypatch.setattr(trainer, "agree_in_cluster", lose)
    net = swarm(run_text("dilocox", outer_steps=8, min_clusters=2, more="[compression]\nlowrank = 8\n"))
    peers = [join(net, "a"), join(net, "b")]
    first, second = (peer.finish() for peer in peers)
    assert first.reason == second.reason == "complete"
    assert first.parameter_digests == second.parameter_digests
    warned = [e.message for peer in peers for e in peer.events if isinstance(e, Warned)]
    assert lost and "outer step 3: its members are gone" in warned
    assert check_history(read_history(p.state / "history" / "rank0.jsonl" for p in peers)) == []
