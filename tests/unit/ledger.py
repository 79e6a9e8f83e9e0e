"""A rank whose movement and rounds are played, and the balance of what it moved and what was delivered."""

import math
import random
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.tiny_llama import TINY_LLAMA
from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.events import Event
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.pipeline import StepResult
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.selection import selected
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.trainer import Rank
from p2p_dilocox.wish import Wish

__all__ = ["ME", "OTHER", "SHAPES", "Ledger", "random_tensors", "spec_of"]

SHAPES = {"0.a": (6, 4), "1.b": (5,)}
TEXT = (
    """
[run]
id = "test"
recipe = "dilocox"
outer_steps = 40
"""
    + TINY_LLAMA
    + """\
[inner]
H = 4
batch_size = 4
microbatches = 1
lr = 1e-3
[outer]
lr = 1.0
momentum = 0.0
nesterov = false
[overlap]
mode = "{mode}"
{overlap}
[compression]
bits = {bits}
return_bits = {bits}
lowrank = {lowrank}
feedback = "{feedback}"
gamma = {gamma}
{more}
[schedule]
{schedule}
[checkpoint]
every = 1000
[eval]
every = 1000
"""
)


def spec_of(
    mode: str = "arrival",
    feedback: str = "local",
    gamma: float = 1.0,
    bits: int = 64,
    lowrank: int = 0,
    schedule: str = "",
    more: str = "",
) -> RunSpec:
    overlap = "delay = 2" if mode == "delay" else ""
    overlap += "\nkeep = 0" if (mode, feedback) == ("delay", "parameters") else ""
    text = TEXT.format(
        mode=mode, feedback=feedback, gamma=gamma, bits=bits, lowrank=lowrank, schedule=schedule,
        overlap=overlap, more=more,
    )  # fmt: skip
    return parse_run(text)


def random_tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


ME, OTHER = "me", "other"


class Ledger:
    """A rank whose inner steps and rounds come from dice, and what became of every bit of its movement.

    `train` itself runs; inner steps, the pipeline and the rounds behind it are played here. The ledger is
    kept beside it, from what is moved, offered and landed; of the rank's state it takes only what rounding
    left.
    """

    def __init__(self, spec: RunSpec, seed: int, stormy: bool = True) -> None:
        self.dice, self.spec, self.stormy = random.Random(seed), spec, stormy
        self.overlap = Overlap(spec.overlap.mode)
        self.theta_i = {n: t.double() for n, t in random_tensors(seed).items()}
        self.outer = OuterState(spec, self.theta_i, frozenset(), "")
        zeros = {n: torch.zeros_like(t) for n, t in self.theta_i.items()}
        self.start = {n: t.clone() for n, t in self.theta_i.items()}
        self.moved, self.given_up, self.delivered, self.fresh, self.foreign = (
            {n: t.clone() for n, t in zeros.items()} for _ in range(5)
        )
        self.steps = 0
        self.in_doubt: OuterStep | None = None
        self.kinds: set[str] = set()
        self.weights: list[float] = []
        self.events: list[Event] = []
        self.bad = False
        pipeline = SimpleNamespace(
            parameters=self.theta_i, num_ranks=1, num_parameters=29, stage_of=dict.fromkeys(SHAPES, 0),
            forward_backward=lambda *_: None, clip_=self._clip, sync_tied_=lambda: None,
            sum=lambda values: [float(v) for v in values],
        )  # fmt: skip
        self.rank = Rank(
            index=0, cluster_id=ME, pipeline=cast(Any, pipeline), outer=self.outer, progress=Progress(),
            inner=cast(Any, SimpleNamespace(step=self._move)),
            rounds=cast(Any, SimpleNamespace(start=self._start)),
            batches=cast(Any, SimpleNamespace(batch=lambda _t, _h: torch.zeros(1, 11))),
            history=cast(Any, SimpleNamespace(write=self._landed)), checkpoints=cast(Any, None),
            wish=Wish(), report=self.events.append,
        )  # fmt: skip

    def _clip(self, flags: list[float]) -> StepResult:
        self.bad = self.stormy and self.dice.random() < 0.2
        if self.bad:
            for name, fresh in self.fresh.items():  # all that no round carries is lost with the bad step
                self.given_up[name] += fresh
                fresh.zero_()
        return StepResult(math.nan if self.bad else 1.0, 1.0, flags)

    def _move(self, _number: int) -> float:
        self.steps += 1
        for name, step in random_tensors(1000 + self.steps, 0.01).items():
            self.theta_i[name] -= step
            self.moved[name] += step
            self.fresh[name] += step
        return 0.0

    def _start(self, t: int, offer: Offer) -> Any:
        """The round of outer step t: its outcome is drawn now, and there after some inner steps."""
        for name, fresh in self.fresh.items():  # the contribution has it, but for what it rounds
            fresh.copy_(self._unsent(name))
            half_ulp = 2.0**-8 if self.spec.compression.bits < 32 else 2.0**-53
            assert (fresh.abs() <= half_ulp * self.outer.residual[name].abs() + 1e-15).all()
        self.weights.append(offer.weight)
        own = self._part(t, {n: r.clone() for n, r in self.outer.residual.items()})
        mine = self._step(t, own if offer.weight else self._noise(t), own, [offer.weight, 1.0])
        kinds = ["committed", "dropped", "left behind", "ahead"]
        if self.spec.compression.bits == 64:  # one that is late leaves an error of its own in bf16
            kinds += ["in doubt"]
        kind = self.dice.choice(kinds)
        steps: list[OuterStep] = []
        if self.in_doubt is not None and kind != "dropped":
            # Only now it is heard that the others committed a round we took for dropped, and what came after.
            kind, steps = "adopted", [self.in_doubt, self._foreign(t)]
            self.in_doubt = None
        elif kind == "committed":
            steps = [mine]
        elif kind == "in doubt" and self.in_doubt is None:
            self.in_doubt = mine
        elif kind == "left behind":
            steps = [self._foreign(t), self._foreign(t + 1), self._foreign(t + 2)]
        elif kind == "ahead":
            steps = [mine, self._foreign(t + 1)]
        self.kinds.add(kind)
        outcome, polls = Outcome(t, steps), self.dice.randrange(6)
        countdown = iter(range(polls, -1, -1))
        return SimpleNamespace(
            ready=lambda: next(countdown, 0) == 0, wait=lambda _give_up: self._wait(outcome)
        )

    def _wait(self, outcome: Outcome) -> Outcome:
        self.before = {n: p.clone() for n, p in self.theta_i.items()}
        return outcome

    def _part(self, t: int, tensors: dict[str, Tensor]) -> Average:
        """What the round of outer step t averages of these."""
        chosen = selected(self.spec, t, {n: v.numel() for n, v in tensors.items()}, 2)
        places = {n: p for n, p in chosen.items() if p is not None}
        dense = {n: tensors[n] if p is None else tensors[n].view(-1)[p] for n, p in chosen.items()}
        return Average(dense=dense, places=places)

    def _step(self, t: int, average: Average, own: Average | None, weights: list[float]) -> OuterStep:
        return OuterStep(t, [ME, OTHER] if own else [OTHER], weights, "", "", {0: ""}, average, own)

    def _noise(self, t: int) -> Average:
        return self._part(t, {n: v.double() for n, v in random_tensors(t, 0.01).items()})

    def _foreign(self, t: int) -> OuterStep:
        return self._step(t, self._noise(t), None, [])

    def _landed(self, outcome: Outcome, _lineage: str) -> None:
        covers = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in self.theta_i.items()}
        blended, keep = False, self.spec.overlap.keep
        for step in outcome.steps:
            ours = step.own is not None and step.weights[0] > 0
            step.average.add_to_(self.delivered if ours else self.foreign, 1.0)
            blended |= ours and step.t == outcome.t and self.overlap is Overlap.DELAY
            for name, places in step.average.covers().items():
                covers[name].view(-1)[slice(None) if places is None else places] = True
        for name, on in covers.items():
            fresh, theta_i = self.fresh[name], self.theta_i[name]
            # Nothing moves outside of what was averaged.
            assert torch.equal(theta_i[~on], self.before[name][~on])
            if self.overlap is Overlap.ARRIVAL:
                self.given_up[name][on] += (1 - keep) * fresh[on]
                fresh[on] *= keep  # sent with the next contribution
            elif blended:
                if not self.outer.keeps_undelivered:
                    mixed = keep * self.before[name] + (1 - keep) * self.outer.anchor[name]
                    torch.testing.assert_close(theta_i[on], mixed[on], rtol=0, atol=1e-12)
                self.given_up[name][on] += (fresh - self._unsent(name))[on]
                fresh[on] = self._unsent(name)[on]
            else:
                fresh.copy_(self._unsent(name))

    def _unsent(self, name: str) -> Tensor:
        return self.outer.anchor[name] - self.outer.counted[name] - self.theta_i[name]

    def check(self) -> None:
        for name, moved in self.moved.items():
            anchor = self.outer.anchor[name]
            torch.testing.assert_close(
                self.start[name] - self.delivered[name] - self.foreign[name], anchor, rtol=0, atol=1e-12
            )
            torch.testing.assert_close(
                self.delivered[name] + self.outer.residual[name] + self._unsent(name),
                moved - self.given_up[name],
                rtol=0,
                atol=1e-12,
            )
