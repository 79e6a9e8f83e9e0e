"""Shards of the data: who takes which, what a crash costs, and that every window stands in one shard."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.coverage import read_coverage
from p2p_dilocox.data.leases import AHEAD, Claim, Leases
from p2p_dilocox.data.shards import Batches
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.data_share import DataShare, open_data_share
from p2p_dilocox.errors import StateError
from p2p_dilocox.events import InnerStep, ShardTrained
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.sinks import JsonlSink

SPEC = parse_run(
    """
[run]
id = "tiny"
outer_steps = 3
[model]
path = "not here, so that no config class has to be imported"
[data]
seq_len = 32
order = "shards"
[inner]
H = 5
batch_size = 4
lr = 1e-3
"""
)


def corpus(num_tokens: int) -> Corpus:
    return Corpus(np.arange(num_tokens, dtype=np.uint32), np.arange(100, dtype=np.uint32), 1 << 20)


def new(name: str = "me", saved: str = "") -> tuple[Leases, list[str]]:
    kept: list[str] = []
    return Leases(name, kept.append, saved), kept


# Windows


def shard(batches: Batches, number: int) -> torch.Tensor:
    """First tokens of its windows; the text counts up."""
    batches.lease(7, number)
    return torch.cat([batches.batch(7, h)[:, 0] for h in range(SPEC.inner.H)])


def test_in_a_pass_each_window_is_in_one_shard_and_no_target_token_in_two_windows() -> None:
    batches = Batches(corpus(32 * 20 * 13 + 64), SPEC, "a")  # 13 shards of H x B = 20 windows
    assert batches.num_shards == 13
    for over in (0, 1):
        starts = torch.cat([shard(batches, 13 * over + n) for n in range(13)]).sort().values
        assert len(starts) == 260
        assert (starts.diff() >= 32).all()
    assert not torch.equal(shard(batches, 0).sort().values, shard(batches, 13).sort().values)


def test_a_shard_is_the_same_for_every_cluster_and_comes_from_everywhere() -> None:
    ours, theirs = (Batches(corpus(100_000), SPEC, name) for name in ("a", "b"))
    assert torch.equal(shard(ours, 5), shard(theirs, 5))
    spread = [float(shard(ours, n).double().std()) / 100_000 for n in range(20)]
    assert 0.2 < sum(spread) / 20 < 0.35  # 0.289 for uniform ones


def test_without_a_lease_windows_are_random_and_of_this_cluster() -> None:
    batches = Batches(corpus(100_000), SPEC, "a")
    batches.lease(7, 0)
    assert torch.equal(batches.batch(8, 0), Batches(corpus(100_000), SPEC, "a").batch(8, 0))
    assert not torch.equal(batches.batch(8, 0), Batches(corpus(100_000), SPEC, "b").batch(8, 0))


@pytest.mark.parametrize("num_tokens", [34, 66, 200, 32 * 19])
def test_data_for_less_than_an_outer_step_goes_round(num_tokens: int) -> None:
    """Field report F4."""
    batches = Batches(corpus(num_tokens), SPEC, "a")
    assert batches.num_shards == 1
    for number in range(5):
        starts = shard(batches, number)
        assert len(starts) == 20
        assert int(starts.min()) >= 0 and int(starts.max()) <= num_tokens - 33
        times = Counter(starts.tolist()).values()
        assert max(times) - min(times) <= 1


def test_padded_documents_are_shared_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.concatenate([np.append(np.arange(1, 9), 0) for _ in range(60)]).astype(np.uint16)
    spec = replace(SPEC, data=replace(SPEC.data, packing="padded"))
    batches = Batches(Corpus(text, text, 2048), spec, "a")
    assert batches.num_shards == 60 // 20


# Leases


def test_a_cluster_alone_takes_one_shard_after_the_other() -> None:
    leases, _ = new()
    for t in range(1, 50):
        assert leases.take(t, {}) == t - 1
        leases.finish(t)
    assert leases.claim() == Claim(49)


def test_clusters_that_start_at_once_take_different_shards() -> None:
    names = ["a", "b", "c"]
    empty = {name: Claim() for name in names}
    taken = [new(name)[0].take(1, {n: c for n, c in empty.items() if n != name}) for name in names]
    assert taken == [0, 1, 2]


def test_in_step_no_two_take_the_same_however_old_the_heartbeats_are() -> None:
    names = ["a", "b", "c"]
    clusters = {name: new(name)[0] for name in names}
    old = {name: Claim() for name in names}
    taken = []
    for t in range(1, 100):
        taken += [clusters[n].take(t, {m: c for m, c in old.items() if m != n}) for n in names]
        for name in names:
            clusters[name].finish(t)
        if t % 10 == 0:
            old = {name: clusters[name].claim() for name in names}
    assert sorted(taken) == list(range(3 * 99))


def test_what_others_hold_or_have_trained_is_not_taken() -> None:
    leases, _ = new("z")
    others = {"a": Claim(3, bytes([0b101]), (4,)), "b": Claim(2, b"", (6,))}
    # 0 to 3 and 5 are trained, 4 and 6 are held, 7 is for b
    assert leases.take(1, others) == 8
    assert leases.claim() == Claim(4, bytes([0b10]), (8,))


def test_the_round_under_way_keeps_its_shard_until_it_has_landed() -> None:
    leases, _ = new()
    assert [leases.take(1, {}), leases.take(2, {})] == [0, 1]
    assert leases.claim().held == (0, 1)
    assert leases.finish(1) == 0
    assert leases.claim() == Claim(1, b"", (1,))
    assert leases.finish(1) is None


def test_a_dead_cluster_s_shard_is_taken_over() -> None:
    dead, (ours, _) = new("a")[0], new("b")
    dead.take(1, {})
    assert ours.take(1, {"a": dead.claim()}) == 1
    ours.finish(1)
    assert ours.take(2, {}) == 0  # its heartbeat has expired
    ours.finish(2)
    assert ours.claim() == Claim(2)


class OneRank:
    """As much of a pipeline as a DataShare needs."""

    rank = 0

    def broadcast(self, data: bytes) -> bytes:
        return data


def test_samples_go_on_strictly_after_two_resumes_with_none_twice(tmp_path: Path) -> None:
    """Field report F1: numbered samples, STATE/shards.json, and killed in the middle of an outer step."""
    text, t, delivered = corpus(32 * 20 * 30), 1, []
    for _ in range(3):
        share = open_data_share(SPEC, tmp_path, "me", Progress())
        assert share is not None
        batches, begun = Batches(text, SPEC, "me"), list[int]()
        for step in range(t, t + 8):
            share.lease(step, batches, cast(Any, OneRank()))
            begun = torch.cat([batches.batch(step, h)[:, 0] for h in range(SPEC.inner.H)]).tolist()
            if step < t + 7:  # else it is killed: the weights never had these
                delivered.append(begun)
                assert share.finish(step) == step - 1
        t += 7
    assert begun not in delivered
    uninterrupted = Batches(text, SPEC, "other")
    assert delivered == [shard(uninterrupted, number).tolist() for number in range(21)]
    assert len({start for starts in delivered for start in starts}) == 21 * 20


def test_going_round_is_said_once() -> None:
    """Field report F4."""
    share = DataShare(new()[0], Progress())
    said = [share.news(number + 1, number, 3) for number in range(12)]
    assert [bool(news) for news in said] == [False] * 3 + [True] + [False] * 8
    assert said[3].startswith("outer step 4 was trained on shard 0 of 3 in pass 2 over the data")


@pytest.mark.parametrize("starts", [2, 3])
def test_after_every_restart_an_outer_step_has_its_shard_again_and_none_comes_twice(starts: int) -> None:
    """Field reports F1, F3: resumed twice in a row, each time some outer steps back."""
    saved, numbers, t = "", dict[int, int](), 1
    for _ in range(starts):
        leases, kept = new(saved=saved)
        for step in range(t, t + 5):
            number = leases.take(step, {})
            assert numbers.setdefault(step, number) == number
            leases.finish(step)
        saved, t = kept[-1], t + 3
    assert list(numbers.values()) == list(range(len(numbers)))


def test_a_round_that_lands_after_a_restart_only_keeps_its_shard_from_coming_again() -> None:
    """Field report F1: committed and on disk, and killed before the training loop heard of it."""
    leases, kept = new()
    assert [leases.take(1, {}), leases.take(2, {})] == [0, 1]
    again, _ = new(saved=kept[-1])
    assert again.finish(1) == 0
    assert [again.take(2, {}), again.finish(2), again.take(3, {})] == [1, 1, 2]
    lost, _ = new(saved=kept[-1])  # of the round of outer step 1 nothing is left
    assert [lost.take(2, {}), lost.finish(2), lost.take(3, {})] == [1, 1, 0]


@pytest.mark.parametrize("name", ["a", "anew"])
def test_a_cluster_whose_disk_was_wiped_learns_from_the_others_what_is_trained(name: str) -> None:
    """Field report F3: under the same name and under a new one."""
    survivor, _ = new("b")
    before, _ = new("a")
    for t in range(1, 40):
        number = survivor.take(t, {"a": before.claim()})
        theirs = before.take(t, {"b": survivor.claim()})
        assert {number, theirs} == {2 * t - 2, 2 * t - 1}
        survivor.finish(t)
        before.finish(t)
    assert survivor.take(40, {"a": before.claim()}) == 79  # its last heartbeat has not expired
    back, _ = new(name)
    assert back.take(41, {"b": survivor.claim()}) == 78


def test_one_that_claims_too_much_moves_nobody_unless_most_do() -> None:
    honest = {name: Claim(10) for name in ("b", "c")}
    for liar in (Claim(2**53), Claim(0, b"\xff" * 128), Claim(10, b"", tuple(range(10, 18)))):
        leases, _ = new("a")
        number = leases.take(1, honest | {"x": liar})
        assert 10 <= number < 10 + AHEAD + 8
    assert new("a")[0].take(1, {n: Claim(10**6) for n in ("b", "c", "d")}) == 10**6


def test_claims_stay_as_small_as_a_heartbeat_allows() -> None:
    leases, _ = new("a")
    others = {"b": Claim(0, b"", (0,))}  # frozen: it holds the first shard and sends heartbeats
    for t in range(1, 3 * AHEAD):
        leases.take(t, others)
        leases.finish(t)
    assert leases.claim().done == 0
    assert len(leases.claim().ahead) <= AHEAD // 8


def test_a_damaged_memory_is_refused() -> None:
    with pytest.raises((ValueError, KeyError)):
        new(saved='{"done": 3')


@pytest.mark.parametrize("seed", range(6))
def test_under_churn_all_data_is_seen_and_little_of_it_twice(seed: int) -> None:
    """Clusters that see heartbeats late, die in the middle of outer steps, come back with or without disk."""
    dice, size = random.Random(seed), 60
    alive: dict[str, Leases] = {}
    disks: dict[str, list[str]] = {name: [] for name in "abcd"}
    clock = dict.fromkeys("abcd", 0)
    seen_by = {name: dict[str, Claim]() for name in "abcd"}  # each one's last look at the heartbeats
    times: Counter[int] = Counter()
    while sum(min(1, times[n]) for n in range(size)) < size:
        name = dice.choice("abcd")
        if name not in alive:
            disk = disks[name] if dice.random() < 0.7 else []
            alive[name] = Leases(name, disks[name].append, disk[-1] if disk else "")
        elif dice.random() < 0.1:
            del alive[name]
            continue
        if dice.random() < 0.7:
            seen_by[name] = {other: leases.claim() for other, leases in alive.items() if other != name}
        clock[name] += 1
        number = alive[name].take(clock[name], seen_by[name])
        if dice.random() < 0.9:  # else it is killed before the round
            times[number] += 1
            alive[name].finish(clock[name])
        else:
            del alive[name]
        assert sum(times.values()) < 3 * size, times
    assert max(times.values()) <= 4


# What was seen


def write_events(state: Path, numbers: dict[int, int], num_shards: int = 4) -> None:
    state.mkdir()
    sink = JsonlSink(state / "events.jsonl")
    sink.write(InnerStep(t=1, h=1, H=5, loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, seconds=1.0))
    for t, number in numbers.items():
        for _ in range(2):  # a crash, and the same again
            sink.write(ShardTrained(t=t, shard=number, num_shards=num_shards))
    sink.close()


def test_coverage_says_which_share_was_seen_how_often(tmp_path: Path) -> None:
    write_events(tmp_path / "a", {1: 0, 2: 2, 3: 4, 4: 8})
    write_events(tmp_path / "b", {1: 1, 2: 2})
    found = read_coverage([tmp_path / "a", tmp_path / "b"])
    assert found.fractions() == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    assert (found.seen, found.twice) == (0.75, {2: 2})
    assert sorted(found.by_cluster.values()) == [2, 4]
    write_events(tmp_path / "c", {1: 0}, num_shards=5)
    with pytest.raises(StateError, match="several runs"):
        read_coverage([tmp_path / "a", tmp_path / "c"])
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "events.jsonl").write_text("")
    with pytest.raises(StateError, match="data.order"):
        read_coverage([tmp_path / "d"])


def test_what_is_kept_is_json(tmp_path: Path) -> None:
    leases, kept = new()
    leases.take(1, {})
    assert json.loads(kept[-1]) == {"done": 0, "ahead": [], "taken": {"1": 0}}
