"""Outer steps against torch's own optimizer, and the balance of what is moved and what is delivered."""

import math
import random
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.round import Outcome, OuterStep
from p2p_dilocox.events import Event, StepSkipped
from p2p_dilocox.outer import Average, OuterState, nesterov_
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.pipeline import StepResult
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.trainer import Rank, train
from p2p_dilocox.wish import Wish

SHAPES = {"a": (6, 4), "b": (5,)}
TEXT = """
[run]
id = "test"
recipe = "dilocox"
outer_steps = 40
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
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
[compression]
bits = {bits}
return_bits = {bits}
lowrank = {lowrank}
feedback = "{feedback}"
gamma = {gamma}
[checkpoint]
every = 1000
[eval]
every = 1000
"""


def spec_of(
    mode: str = "arrival", feedback: str = "local", gamma: float = 1.0, bits: int = 64, lowrank: int = 0
) -> RunSpec:
    text = TEXT.format(mode=mode, feedback=feedback, gamma=gamma, bits=bits, lowrank=lowrank)
    return parse_run(text)


def random_tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


@pytest.mark.parametrize(("beta", "nesterov"), [(0.9, True), (0.7, True), (0.9, False), (0.0, False)])
def test_the_outer_step_is_torch_sgd(beta: float, nesterov: bool) -> None:
    theta = {n: t.double() for n, t in random_tensors(0).items()}
    momentum = {n: torch.zeros_like(t) for n, t in theta.items()}
    reference = [t.clone().requires_grad_() for t in theta.values()]
    sgd = torch.optim.SGD(reference, lr=0.7, momentum=beta, nesterov=nesterov)
    for step in range(1, 6):
        delta = {n: t.double() for n, t in random_tensors(step).items()}
        for p, grad in zip(reference, delta.values(), strict=True):
            p.grad = grad
        sgd.step()
        nesterov_(theta, momentum, Average(dense=delta), lr=0.7, beta=beta, nesterov=nesterov)
        for ours, torchs in zip(theta.values(), reference, strict=True):
            torch.testing.assert_close(ours, torchs.detach(), rtol=0, atol=1e-14)


def test_factors_and_their_product_give_the_same_step() -> None:
    p, q = torch.randn(6, 2), torch.randn(4, 2)
    for average in (Average(factors={"a": (p, q)}), Average(dense={"a": p @ q.T})):
        theta, momentum = {"a": torch.ones(6, 4)}, {"a": torch.full((6, 4), 0.5)}
        nesterov_(theta, momentum, average, lr=0.7, beta=0.7, nesterov=True)
        expected_v = 0.35 + p @ q.T
        torch.testing.assert_close(momentum["a"], expected_v)
        torch.testing.assert_close(theta["a"], 1 - 0.7 * (p @ q.T + 0.7 * expected_v))


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
            forward_backward=lambda _tokens: None, clip_=self._clip, sync_tied_=lambda: None,
            sum=lambda values: [float(v) for v in values],
        )  # fmt: skip
        self.rank = Rank(
            index=0, cluster_id=ME, pipeline=cast(Any, pipeline), outer=self.outer, progress=Progress(),
            inner=cast(Any, SimpleNamespace(step=self._move)),
            rounds=cast(Any, SimpleNamespace(start=self._start)),
            batches=cast(Any, SimpleNamespace(batch=lambda _t, _h: torch.zeros(1, 11))),
            history=cast(Any, SimpleNamespace(write=self._landed)), checkpoints=cast(Any, None),
            wish=Wish(), report=self.events.append, lock=threading.Lock(),
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
        own = Average(dense={n: r.clone() for n, r in self.outer.residual.items()})
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
        return SimpleNamespace(ready=lambda: next(countdown, 0) == 0, wait=lambda _give_up: outcome)

    def _step(self, t: int, average: Average, own: Average | None, weights: list[float]) -> OuterStep:
        return OuterStep(t, [ME, OTHER] if own else [OTHER], weights, "", "", {0: ""}, average, own)

    def _noise(self, t: int) -> Average:
        return Average(dense={n: v.double() for n, v in random_tensors(t, 0.01).items()})

    def _foreign(self, t: int) -> OuterStep:
        return self._step(t, self._noise(t), None, [])

    def _landed(self, outcome: Outcome, _lineage: str) -> None:
        for step in outcome.steps:
            ours = step.own is not None and step.weights[0] > 0
            for name, value in step.average.dense.items():
                (self.delivered if ours else self.foreign)[name].add_(value)
        if outcome.steps:
            for name, fresh in self.fresh.items():
                if self.overlap is Overlap.ARRIVAL:
                    self.given_up[name] += (1 - self.spec.overlap.keep) * fresh
                    fresh.mul_(self.spec.overlap.keep)  # sent with the next contribution
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


@pytest.mark.parametrize("mode", [m.value for m in Overlap])
@pytest.mark.parametrize("bits", [64, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_movement_is_delivered_exactly_once_over_random_drops(mode: str, bits: int, seed: int) -> None:
    """Rule V2. What was committed plus what waits is what was moved; `arrival` gives up (1 - keep) in flight.

    Through `train`: drops, rounds that turn out to be committed later, several rounds at once without us,
    steps that are not finite, offers of weight 0. Outer SGD with lr 1; the codec of these rounds is exact, so
    with 4 bits, where the state is bf16, what it rounds must not be lost either.
    """
    ledger = Ledger(spec_of(mode, gamma=0.5, bits=bits), seed)
    assert train(ledger.spec, ledger.rank)
    ledger.check()
    assert ledger.kinds >= {"committed", "dropped", "left behind"} | ({"adopted"} if bits == 64 else set())
    assert min(ledger.weights) == 0.0 < max(ledger.weights)
    assert any(isinstance(e, StepSkipped) for e in ledger.events)
    assert all(torch.isfinite(p).all() for p in ledger.theta_i.values())


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_local_feedback_keeps_exactly_what_the_others_could_not_decode(gamma: float) -> None:
    outer = OuterState(spec_of(gamma=gamma), random_tensors(0), frozenset(), "")
    theta_i = random_tensors(1)
    outer.contribute(theta_i)
    delta = {n: t.clone() for n, t in outer.residual.items()}
    own = {n: t.round() for n, t in delta.items()}
    outer.commit(Average(dense=random_tensors(2)), Average(dense=own))
    outer.contribute(theta_i)
    for name, carried in outer.residual.items():
        torch.testing.assert_close(carried, gamma * (delta[name] - own[name]))


def test_paper_feedback_accumulates_the_deviation_from_the_mean() -> None:
    """e = delta - average (DiLoCoX, Algorithm 2): grows with every round of unequal clusters, as measured."""
    outer = OuterState(spec_of(feedback="paper"), random_tensors(0), frozenset(), "")
    theta_i = {n: t.clone() for n, t in outer.anchor.items()}
    for n in range(1, 11):
        for p in theta_i.values():
            p -= 2.0  # this cluster moves by 2 each round, the mean by 1
        outer.contribute(theta_i)
        mean = Average(dense={name: torch.ones(shape).double() for name, shape in SHAPES.items()})
        outer.commit(mean, mean)
        for error in outer.residual.values():
            torch.testing.assert_close(error, torch.full_like(error, float(n)), rtol=0, atol=1e-4)
