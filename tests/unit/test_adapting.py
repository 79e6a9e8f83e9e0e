"""The controller in force: through the roll call, the rounds and the trainer, in simulated clusters."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2p_dilocox.adapting import Adapting
from p2p_dilocox.averaging.outcome import OuterStep
from p2p_dilocox.averaging.rollcall import Roster
from p2p_dilocox.data import Batches, load_tokens
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.events import Adapted, Event, InnerStep, RoundCommitted
from p2p_dilocox.inner import learning_rate
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.outer import Average
from p2p_dilocox.settings import RunSpec, total_inner_steps
from p2p_dilocox.simulation import Absence, Link, Place, Simulation
from p2p_dilocox.swarm.messages import RankAddress, Ready
from tests.unit.test_simulation import spec_of

# Directions that hold half of the energy: few, so the rank is cut. H is pinned: H_min = H_max.
CUT = '[compression]\nlowrank = 12\n[adapt]\nrule = "band"\nwindow = 2\nenergy = 0.5\nH_min = 3\nH_max = 3\n'


Report = Callable[[Event], None]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_tokens(spec_of(), tmp_path_factory.mktemp("tokens"))


def run(
    spec: RunSpec, places: list[Place], corpus: Corpus, histories: Path
) -> tuple[Simulation, list[list[Event]]]:
    simulation = Simulation(spec, places, corpus, histories=histories)
    heard: list[list[Event]] = []
    for cluster in simulation.clusters:
        heard.append([])
        cluster.rank.report = _both(heard[-1].append, cluster.rank.report)
    simulation.run()
    return simulation, heard


def _both(first: Report, second: Report) -> Report:
    def report(event: Event) -> None:
        first(event)
        second(event)

    return report


def test_all_clusters_cut_the_same_stages_at_the_same_time_and_end_equal(
    corpus: Corpus, tmp_path: Path
) -> None:
    """One is away for two outer steps, and decodes what it missed with the rank of the record."""
    places = [Place(cluster_id=c) for c in "ab"] + [Place(cluster_id="c", absences=(Absence(7.5, 13.0),))]
    simulation, heard = run(spec_of("dilocox", 10, CUT), places, corpus, tmp_path)
    digests = simulation.parameter_digests()
    assert digests[0] == digests[1] == digests[2]
    changes = [[(e.t, e.message) for e in events if isinstance(e, Adapted)] for events in heard[:2]]
    assert changes[0] == changes[1] and changes[0][0][0] == 3
    rounds = [e for e in heard[0] if isinstance(e, RoundCommitted)]
    why = r"50% of the energy fits into \d\.\d directions of the last 2 averages"
    sent = f"{rounds[2].sent_bytes / 1e6:.3g} MB sent by this rank"
    assert re.fullmatch(rf"(stage \d: lowrank 12 -> \d: {why}; )+{sent}", changes[0][0][1])
    ranks = [e.lowrank for e in rounds]
    assert ranks[:2] == [12, 12] and ranks[-1] < 12 and ranks == sorted(ranks, reverse=True)
    assert rounds[-1].sent_bytes < rounds[0].sent_bytes
    assert check_history(read_history(tmp_path / f"{c}.jsonl" for c in "abc")) == []


def test_the_start_up_phase_has_its_own_h_and_no_jump_in_the_learning_rate(
    corpus: Corpus, tmp_path: Path
) -> None:
    spec = spec_of("diloco", 5, "[adapt]\nstartup_steps = 2\nstartup_H = 1\n")
    simulation, heard = run(spec, [Place(cluster_id=c) for c in "ab"], corpus, tmp_path)
    steps = [e for e in heard[0] if isinstance(e, InnerStep)]
    assert [(e.t, e.h, e.H) for e in steps] == [
        (1, 1, 1), (2, 1, 1), *((t, h, 3) for t in (3, 4, 5) for h in (1, 2, 3)),
    ]  # fmt: skip
    assert total_inner_steps(spec) == 11
    assert [e.lr for e in steps] == [learning_rate(spec.inner, n, 11) for n in range(11)]
    digests = simulation.parameter_digests()
    assert digests[0] == digests[1]


def equal_directions(k: int, r: int) -> Tensor:
    """Q [20, r] of an average whose energy is in k directions, the same in each: its effective rank is k."""
    return torch.eye(20)[:, :r] * (torch.arange(r) < k)


def test_algorithm_3_to_the_letter_as_computed_by_hand() -> None:
    """c = 3, r_1 = 12, H_1 = 24; the last column is alpha H_1 with alpha = r_t / r_1, rounded up."""
    more = '[compression]\nlowrank = 12\n[adapt]\nrule = "literal"\nwindow = 3\n'
    spec = spec_of("dilocox-paper", 20, more)
    adapting = Adapting(replace(spec, inner=replace(spec.inner, H=24)), {"w": 1})
    adapting.trained(1.0)
    by_hand = [  # effective rank r'_t, r_{t+1}, H
        (12, 12, 24),  # t < c
        (9, 12, 24),
        (9, 10, 20),  # (12 + 9 + 9) / 3
        (6, 8, 16),  # (9 + 9 + 6) / 3
        (8, 8, 16),  # 23 / 3
        (2, 5, 10),  # 16 / 3
        (5, 5, 10),
        (1, 3, 6),  # 8 / 3
        (3, 3, 6),
        (1, 2, 4),  # 5 / 3
    ]
    r, H = 12, 24
    for t, (k, r_after, h_after) in enumerate(by_hand, 1):
        adapting.learn(outer_step(t, equal_directions(k, r), [12, r], H), 500.0)  # no round's time matters
        (_, wish) = adapting.wishes()
        assert (t, wish, adapting.wish_for_h([0.0, wish])) == (t, r_after, h_after)
        r, H = r_after, h_after
        assert adapting.H(t + 1) <= 24


def test_the_recipe_of_the_paper_follows_the_averages_of_its_own_run(corpus: Corpus, tmp_path: Path) -> None:
    """Ranks and H of two clusters, against singular values of P Q^T and the rule in two lines."""
    spec = spec_of("dilocox-paper", 12, "[compression]\nlowrank = 12\n[adapt]\nwindow = 3\n")
    spec = replace(spec, inner=replace(spec.inner, H=6))
    simulation = Simulation(spec, [Place(cluster_id=c) for c in "ab"], corpus, histories=tmp_path)
    rank, found = simulation.clusters[0].rank, list[OuterStep]()
    assert rank.adapting is not None
    learn, h_of = rank.adapting.learn, list[int]()

    def kept(step: OuterStep, seconds: float, sent_bytes: int = 0) -> str:
        found.append(step)
        return learn(step, seconds, sent_bytes)

    rank.adapting.learn = kept  # type: ignore[method-assign]
    rank.report = _both(rank.report, lambda e: h_of.append(e.H) if isinstance(e, InnerStep) else None)
    simulation.run()
    used: dict[int, list[float]] = {0: [], 1: []}
    expected = [12, 12]
    for step in found:
        assert [r or 12 for r in step.lowrank] == expected, step.t
        for stage, ks in used.items():
            costs = []
            for name, (p, q) in step.average.factors.items():
                if rank.pipeline.stage_of[name] == stage and "layers" in name:  # embeddings follow these
                    squares = torch.linalg.svdvals((p @ q.T).double()).square().cumsum(0)
                    k = 1 + int((squares < 0.95 * squares[-1]).sum())
                    costs.append((k, len(p) + len(q)))
            ks.append(sum(k * cost for k, cost in costs) / sum(cost for _, cost in costs))
            if len(ks) >= 3:
                expected[stage] = min(12, math.floor(sum(ks[-3:]) / 3 + 0.5))
        assert math.ceil(max(step.lowrank) / 12 * 6 - 1e-9) == step.H  # 0 while nobody knows
    assert max(expected) < 12 and h_of[0] == 6 and h_of[-1] == math.ceil(max(found[-2].lowrank) / 2)
    assert simulation.parameter_digests()[0] == simulation.parameter_digests()[1]
    assert check_history(read_history(tmp_path / f"{c}.jsonl" for c in "ab")) == []


def ready(cluster: str, lowrank: list[int], H: int) -> Ready:
    address = RankAddress(peer="simulated", maddrs=["simulated"], stages=[0, 1])
    return Ready(
        spec="", cluster_id=cluster, name=cluster, t=1, attempt=0, lineage="", weight=1.0, ranks=[address],
        lowrank=lowrank, H=H,
    )  # fmt: skip


def test_a_round_has_one_rank_per_stage_and_one_h_from_what_its_members_want() -> None:
    members = [ready("a", [16, 40], 80), ready("b", [], 0), ready("c", [17, 40], 90), ready("d", [16, 0], 85)]
    roster = Roster(1, 0, "a", tuple(members), "", 0.0)
    assert roster.lowrank == [16, 40] and roster.H == 85
    nobody = Roster(1, 0, "a", tuple(ready(c, [], 0) for c in "ab"), "", 0.0)
    assert nobody.lowrank == [] and nobody.H == 0


def outer_step(t: int, q: Tensor, lowrank: list[int], H: int) -> OuterStep:
    average = Average(factors={"w": (torch.zeros(30, q.shape[1]), q)})
    return OuterStep(t, ["a"], [1.0], "", "", {0: ""}, average, average, [1.0], 1.0, lowrank, H)


def test_one_that_comes_with_a_state_goes_on_with_the_rank_and_h_of_its_last_round() -> None:
    """What it did not measure it leaves as it is; no number that a liar names goes beyond the limits."""
    more = '[compression]\nlowrank = 12\n[adapt]\nrule = "band"\nwindow = 2\nH_min = 2\nH_max = 9\n'
    adapting = Adapting(spec_of("dilocox", 10, more), {"v": 0, "w": 1})
    adapting.recall([12, 7], 8)
    assert adapting.wishes() == [12.0, 7.0] and adapting.H(5) == 8
    adapting.trained(0.1)
    assert adapting.wish_for_h([12.0, 7.0]) == 8  # inner.H is 3, and no round says yet why it is not
    followed = replace(outer_step(6, torch.eye(20)[:, :7], [12, 7], 8), own=None)
    assert adapting.learn(followed, 70.0) == ""  # how long it took to follow is no round's time
    assert adapting.wish_for_h([12.0, 7.0]) == 8
    adapting.learn(outer_step(7, torch.eye(20)[:, :7], [12, 7], 8), 0.1)
    assert adapting.wish_for_h([12.0, 7.0]) == 3
    adapting.recall([10**6], 10**6)
    assert adapting.wishes() == [12.0, 12.0] and adapting.H(8) == 9
    adapting.recall([], 1)
    assert adapting.wishes() == [12.0, 12.0] and adapting.H(8) == 2


def test_a_newcomer_wishes_nothing_and_then_what_the_others_have() -> None:
    spec = spec_of("dilocox", 10, '[compression]\nlowrank = 12\n[adapt]\nrule = "band"\n')
    adapting = Adapting(spec, {"w": 1})
    assert adapting.wishes() == [0.0, 0.0] and adapting.wish_for_h([0.0, 0.0]) == 0
    assert adapting.H(5) == 3
    said = adapting.learn(outer_step(7, torch.eye(20)[:, :9], [12, 9], 5), 2.0)
    assert adapting.wishes() == [0.0, 9.0]  # stage 0 is another rank's
    assert adapting.H(8) == 5 and "H 3 -> 5" in said and "lowrank" not in said


def test_simulated_clusters_choose_h_by_simulated_seconds(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that computes more slowly changes nothing."""
    more = '[compression]\nlowrank = 12\n[adapt]\nrule = "band"\noverlap = 0.5\nH_min = 1\nH_max = 50\n'
    places = [Place(cluster_id=c, link=Link(uplink_mbps=1e3, downlink_mbps=1e3, latency_s=2.0)) for c in "ab"]
    batch, found = Batches.batch, []

    def slow(batches: Batches, t: int, h: int) -> Tensor:
        time.sleep(0.05)
        return batch(batches, t, h)

    for kind in (batch, slow):
        monkeypatch.setattr(Batches, "batch", kind)
        _, heard = run(spec_of("dilocox", 4, more), places, corpus, tmp_path / kind.__name__)
        found.append([event.H for event in heard[0] if isinstance(event, InnerStep)])
    assert found[0] == found[1] and len({*found[0]}) > 1


def test_h_follows_the_largest_rank_of_a_cluster_and_what_a_round_takes() -> None:
    more = '[compression]\nlowrank = 12\n[adapt]\nrule = "band"\noverlap = 0.5\nH_min = 1\nH_max = 50\n'
    spec = replace(spec_of("dilocox", 10, more))
    spec = replace(spec, inner=replace(spec.inner, H=20))
    adapting = Adapting(spec, {"w": 0})
    adapting.trained(0.5)
    adapting.learn(outer_step(1, torch.eye(20)[:, :12], [12, 12], 20), 1.0)
    assert adapting.wish_for_h([6.0, 3.0]) == 10  # alpha = 1/2, and a round needs 4
    adapting = Adapting(spec, {"w": 0})
    adapting.trained(0.5)
    adapting.learn(outer_step(1, torch.eye(20)[:, :12], [12, 12], 20), 8.0)
    assert adapting.wish_for_h([6.0, 3.0]) == 32  # 8 s are half of 32 steps of 0.5 s
