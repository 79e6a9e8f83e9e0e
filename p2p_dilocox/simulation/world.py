"""Clusters that train by turns on simulated time, each with the trainer's own loop.

Every cluster has a thread, of which one runs at a time: the one that is furthest behind. An inner step takes
its cluster's `step_s`; a round takes what its bytes need on the members' links, after the last of them came.
Nothing else takes time, so a result follows from run spec and places alone, not from this machine's speed.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from p2p_dilocox.adapting import build_adapting
from p2p_dilocox.anchor_mean import build_anchor_mean
from p2p_dilocox.averaging.coded import StageLayouts, codec_thread
from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.averaging.snapshot import snapshot_bytes, take_snapshot
from p2p_dilocox.data import Batches
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.events import Evaluated, Event, InnerStep, StepSkipped
from p2p_dilocox.gradient_sum import build_inner
from p2p_dilocox.history import History
from p2p_dilocox.lineage import genesis
from p2p_dilocox.local_outer import build_local_outer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.runspec import RunSpec, tokens_per_outer_step
from p2p_dilocox.simulation.links import round_s
from p2p_dilocox.simulation.places import Place, Point
from p2p_dilocox.simulation.rounds import Member, average
from p2p_dilocox.simulation.start import load_start, whole_model
from p2p_dilocox.trainer import Rank, evaluate, parameter_digests, train
from p2p_dilocox.wish import Wish

__all__ = ["Simulation"]

_NEVER = 10**9


class _Gone(Exception):
    """Raised in the training loop of a cluster whose absence begins."""


@dataclass
class _Round:
    """The round of outer step t as it is collected: `arrived` maps clusters to when their offer came."""

    t: int
    offers: dict["_Cluster", Offer] = field(default_factory=dict)
    arrived: dict["_Cluster", float] = field(default_factory=dict)
    over_s: float | None = None
    outcomes: dict["_Cluster", Outcome] = field(default_factory=dict)


class _Pending:
    """What the training loop sees of a round; see averaging/round.py."""

    def __init__(self, cluster: "_Cluster", round_: _Round) -> None:
        self.t, self._cluster, self._round = round_.t, cluster, round_

    def ready(self) -> bool:
        return self._round.over_s is not None and self._cluster.now_s >= self._round.over_s

    def wait(self, _give_up: Callable[[], bool]) -> Outcome:
        if not self.ready():
            self._cluster.wait_for(self._round)
        outcome = self._round.outcomes.pop(self._cluster, None)
        return outcome or self._cluster.world.missed(self._cluster, self.t)


class _Cluster:
    """One cluster, with a thread that runs only while `Simulation` has handed it the turn."""

    def __init__(self, world: "Simulation", place: Place, corpus: Corpus, *, evaluates: bool) -> None:
        self.world, self.place = world, place
        self.now_s, self.busy_s = 0.0, 0.0
        self.waiting: _Round | None = None
        self.done, self.error = False, cast(BaseException | None, None)
        self.gone = False
        self.sent_bytes = 0
        self.tokens = 0
        self.spec = (
            world.spec if evaluates else replace(world.spec, eval=replace(world.spec.eval, every=_NEVER))
        )
        self._absences = list(place.absences)
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.rank = self._build(corpus)
        self.thread = threading.Thread(target=self._live, name=place.cluster_id, daemon=True)

    def _build(self, corpus: Corpus) -> Rank:
        spec = self.spec
        pipeline, span, layers = whole_model(spec)
        if self.world.start is not None:
            load_start(self.world.start, pipeline)
        dense = spec.compression.never_factored(span.embedding_names)
        outer = OuterState(spec, pipeline.parameters, dense, genesis(self.world.digest))
        stage_of = pipeline.stage_of
        self.names = {s: [n for n in stage_of if stage_of[n] == s] for s in range(spec.model.stages)}
        self.layouts = {s: StageLayouts(outer, n, dense, layers) for s, n in self.names.items()}
        return Rank(
            index=0, cluster_id=self.place.cluster_id, pipeline=pipeline, outer=outer,
            inner=build_inner(spec, pipeline, outer),
            local=build_local_outer(spec.local, pipeline.parameters),
            anchors=build_anchor_mean(spec),
            adapting=build_adapting(spec, pipeline.stage_of, outer.basis, span.embedding_names),
            rounds=cast(Any, SimpleNamespace(start=self._start)),
            batches=Batches(corpus, spec, self.place.cluster_id), progress=Progress(),
            history=self.world.history(self.place.cluster_id, list(self.layouts)),
            checkpoints=cast(Any, SimpleNamespace(save=lambda _rank: None)),
            wish=Wish(), report=self._report, step_s=self.place.step_s,
        )  # fmt: skip

    def take_turn(self) -> None:
        """Run until the cluster has to wait, has used up simulated time, or is done."""
        self._turn.release()
        self._back.acquire()

    def wait_for(self, round_: _Round) -> None:
        self.waiting = round_
        self._hand_back()

    def _hand_back(self) -> None:
        self._back.release()
        self._turn.acquire()

    def _live(self) -> None:
        self._turn.acquire()
        torch.set_num_threads(1)  # of this thread: with more, sums round differently
        try:
            if self.spec is self.world.spec:
                evaluate(self.spec, self.rank)
            while True:
                try:
                    train(self.spec, self.rank)
                    break
                except _Gone:
                    self._come_back()
            if self.spec is self.world.spec and self.rank.outer.t == self.spec.run.outer_steps:
                evaluate(self.spec, self.rank)
        except BaseException as error:  # noqa: BLE001 (`run` raises it)
            self.error = error
        self.done = True
        self._back.release()

    def _start(self, t: int, offer: Offer) -> _Pending:
        round_ = self.world.enter(self, t, offer)
        return _Pending(self, round_)

    def _report(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.world.note(self, event)
        elif isinstance(event, InnerStep | StepSkipped):
            self.tokens += event.tokens if isinstance(event, InnerStep) else 0
            self.now_s += self.place.step_s
            self.busy_s += self.place.step_s
            self.world.stepped()
            self._hand_back()
            if self._absences and self.now_s >= self._absences[0].start_s:
                raise _Gone

    def _come_back(self) -> None:
        absence = self._absences.pop(0)
        self.world.withdraw(self)
        rank, link = self.rank, self.place.link
        fetch_s = sum(link.transfer_s(0, snapshot_bytes(rank.outer, n)) for n in self.names.values())
        self.gone, self.now_s = True, max(self.now_s, absence.stop_s) + fetch_s
        self._hand_back()  # the others go on while it downloads; then it follows to where they are
        self.gone = False
        donor = self.world.donor(self)
        rank.pending, rank.unsent_tokens = None, 0
        if donor is None:
            return
        for names in self.names.values():
            take_snapshot(donor.rank.outer, names).load_into(rank.outer)
        rank.outer.reset_(rank.pipeline.parameters)
        rank.progress.move_to(rank.outer.t, rank.outer)
        rank.t, rank.h = donor.rank.t, min(donor.rank.h, donor.rank.H - 1)
        if donor.rank.pending is not None:
            rank.pending = cast(Any, _Pending(self, self.world.rounds[donor.rank.pending.t]))


class Simulation:
    """A run of `spec` by clusters at `places`, from its seed.

    `points`: what the first cluster, which is never absent, found at each validation.
    """

    def __init__(
        self,
        spec: RunSpec,
        places: Sequence[Place],
        corpus: Corpus,
        *,
        digest: str = "",
        histories: Path | None = None,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        """corpus: as load_tokens returns it. digest: of the run spec, where lineages begin. histories: a
        directory for the clusters' histories. start: the parameters of all clusters, as `warm_start`
        returns them. ValueError: no place, an id twice, or an absence of the first.
        """
        ids = [place.cluster_id for place in places]
        if not ids or len(set(ids)) < len(ids) or places[0].absences:
            raise ValueError(f"clusters {ids}: at least one, each once, and the first is never absent")
        self.spec, self.digest, self._histories = spec, digest, histories
        self.start = start
        self.on_step: Callable[[int], None] = lambda _inner_steps: None  # told how many all have done
        self._inner_steps = 0
        self.points: list[Point] = []
        self.rounds: dict[int, _Round] = {}
        self._timeouts = Timeouts(spec.deadlines.round_s)
        self._committed: list[tuple[OuterStep, float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._codec: ThreadPoolExecutor | None = None
        self.clusters = [
            _Cluster(self, place, corpus, evaluates=index == 0) for index, place in enumerate(places)
        ]

    def run(self) -> None:
        """To the last outer step. What a cluster raises is raised here."""
        for cluster in self.clusters:
            cluster.thread.start()
        self._loop, self._codec = asyncio.new_event_loop(), codec_thread()
        try:
            while busy := [c for c in self.clusters if not c.done]:
                self._close_rounds()
                free = [c for c in busy if self._ready_s(c) < math.inf]
                if not free:  # all wait: the deadline of the oldest roll call passes
                    self._close(min((c.waiting for c in busy if c.waiting), key=lambda r: r.t))
                    continue
                cluster = min(free, key=self._ready_s)
                cluster.now_s, cluster.waiting = self._ready_s(cluster), None
                cluster.take_turn()
                if cluster.error is not None:
                    raise cluster.error
        finally:
            self._codec.shutdown()
            self._loop.close()
            for cluster in self.clusters:
                cluster.rank.history.close()

    @property
    def seconds(self) -> float:
        """Simulated, until the last cluster was done."""
        return max(cluster.now_s for cluster in self.clusters)

    @property
    def tokens(self) -> int:
        """Trained by all clusters."""
        return sum(cluster.tokens for cluster in self.clusters)

    @property
    def sent_bytes(self) -> float:
        """Payload that a cluster has sent in all, mean over clusters."""
        return sum(cluster.sent_bytes for cluster in self.clusters) / len(self.clusters)

    @property
    def utilisation(self) -> float:
        """The part of its time that a cluster computes, mean over clusters."""
        return sum(c.busy_s / c.now_s for c in self.clusters if c.now_s) / len(self.clusters)

    def parameter_digests(self) -> list[dict[int, str]]:
        """sha256 of each stage's anchor, per cluster."""
        return [parameter_digests(cluster.rank) for cluster in self.clusters]

    # --- what the clusters' threads call, one at a time

    def history(self, cluster_id: str, stages: list[int]) -> History:
        if self._histories is None:
            return cast(History, SimpleNamespace(write=lambda _outcome, _lineage: None, close=lambda: None))
        path = self._histories / f"{cluster_id}.jsonl"
        return History(path, self.spec.run.id, cluster_id, stages, self.spec.deadlines.round_s)

    def stepped(self) -> None:
        self._inner_steps += 1
        self.on_step(self._inner_steps)

    def note(self, cluster: _Cluster, event: Evaluated) -> None:
        losses = event.val_loss, event.mean_val_loss
        self.points.append(Point(event.t, cluster.now_s, self.tokens, self.sent_bytes, *losses))

    def enter(self, cluster: _Cluster, t: int, offer: Offer) -> _Round:
        round_ = self.rounds.setdefault(t, _Round(t))
        if round_.over_s is None:
            round_.offers[cluster], round_.arrived[cluster] = offer, cluster.now_s
        return round_

    def withdraw(self, cluster: _Cluster) -> None:
        """It is gone: the rounds that are still open go on without its offer."""
        for round_ in [r for r in self.rounds.values() if r.over_s is None]:
            round_.offers.pop(cluster, None)
            round_.arrived.pop(cluster, None)

    def missed(self, cluster: _Cluster, t: int) -> Outcome:
        """Of a round that a cluster was not in: the committed steps that it lacks, as it would fetch them."""
        steps = [replace(s, own=None) for s, over in self._committed
                 if s.t > cluster.rank.outer.t and over <= cluster.now_s]  # fmt: skip
        return Outcome(t, steps, "" if steps else "dropped by the clusters that were in it")

    def donor(self, to: _Cluster) -> _Cluster | None:
        """The cluster whose state one that comes back takes: the one that is furthest."""
        there = [c for c in self.clusters if c is not to and not c.gone]
        furthest = max(there, key=lambda c: c.rank.outer.t, default=None)
        return furthest if furthest is not None and furthest.rank.outer.t > to.rank.outer.t else None

    # ---

    def _ready_s(self, cluster: _Cluster) -> float:
        """When it can go on, at the earliest; infinite while its round is open."""
        if cluster.waiting is None:
            return cluster.now_s
        return math.inf if cluster.waiting.over_s is None else max(cluster.now_s, cluster.waiting.over_s)

    def _close_rounds(self) -> None:
        """Close each roll call that all have answered, or that nobody can answer before its deadline."""
        for round_ in [r for r in self.rounds.values() if r.over_s is None and r.arrived]:
            missing = [c for c in self.clusters if not (c in round_.arrived or c.done or c.gone)]
            deadline_s = min(round_.arrived.values()) + self._timeouts.roll_call_s
            if all(self._ready_s(c) > deadline_s for c in missing):
                self._close(round_)

    def _close(self, round_: _Round) -> None:
        ordered = sorted(round_.arrived, key=lambda c: c.place.cluster_id)
        present = [c for c in ordered if c.rank.outer.lineage == self._lineage()]
        latest_s = max(round_.arrived.values())
        alive = [c for c in self.clusters if not (c.done or c.gone)]
        if 2 * len(present) < len(alive) or not any(round_.offers[c].weight > 0 for c in present):
            why = f"{len(present)} of {len(alive)} clusters came, or none of them had trained anything"
            round_.over_s = latest_s
            round_.outcomes = dict.fromkeys(ordered, Outcome(round_.t, reason=why))
            return
        members = [
            Member(c.place.cluster_id, c.rank.outer, c.layouts, round_.offers[c], c.place.link.uplink_mbps)
            for c in present
        ]
        assert self._loop is not None and self._codec is not None
        cap = float(tokens_per_outer_step(self.spec))
        done = average(round_.t, members, self._loop, self._codec, weight_cap=cap)
        seconds = round_s([c.place.link for c in present], done.sent, done.received)
        round_.over_s = latest_s + seconds
        for cluster, step, sent, received in zip(present, done.steps, done.sent, done.received, strict=True):
            cluster.sent_bytes += sent
            waited_s = round_.over_s - round_.arrived[cluster]
            round_.outcomes[cluster] = Outcome(round_.t, [step], "", waited_s, sent, received)
        self._committed.append((done.steps[0], round_.over_s))
        self._forget()

    def _forget(self) -> None:
        """What nobody can ask for any more: one that is gone takes a whole state when it comes back."""
        there = [c.rank for c in self.clusters if not (c.done or c.gone)]
        applied, begun = min(r.outer.t for r in there), min(r.t for r in there)
        self._committed = [(s, over) for s, over in self._committed if s.t > applied]
        self.rounds = {t: r for t, r in self.rounds.items() if t >= begun - 1 or r.over_s is None}

    def _lineage(self) -> str:
        """The one that the next round follows from."""
        return max((c.rank.outer for c in self.clusters), key=lambda outer: outer.t).lineage
