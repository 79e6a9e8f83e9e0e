"""Outer steps against torch's own optimizer, and the balance of what is moved and what is delivered."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.error_alarm import ErrorAlarm
from p2p_dilocox.errors import SpecError
from p2p_dilocox.events import RoundDropped, RoundStarted, StepSkipped, Warned
from p2p_dilocox.outer import Average, OuterState, nesterov_
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.trainer import take_outer_steps, train
from p2p_dilocox.wish import Wish
from tests.unit.ledger import ME, OTHER, SHAPES, Ledger, random_tensors, spec_of


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


@pytest.mark.parametrize("mode", [m.value for m in Overlap])
@pytest.mark.parametrize("schedule", ["", "fraction = 0.3", "fragments = 2", "fragments = 3"])
@pytest.mark.parametrize("feedback", ["parameters", "none"])
def test_rounds_that_average_a_part_deliver_every_movement_once_and_leave_the_rest_alone(
    mode: str, schedule: str, feedback: str
) -> None:
    """The last round, of everything, is as likely to be dropped as any."""
    if mode == "eager" and (schedule or feedback == "parameters"):
        with pytest.raises(SpecError, match="eager"):
            spec_of(mode, feedback, schedule=schedule)
        return
    for seed, bits in enumerate((64, 4)):
        ledger = Ledger(spec_of(mode, feedback, bits=bits, schedule=schedule), seed)
        assert train(ledger.spec, ledger.rank)
        ledger.check()


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


def test_a_round_heard_of_later_takes_what_it_delivered_out_of_what_waits() -> None:
    outer = OuterState(spec_of(gamma=0.5), random_tensors(0), frozenset(), "")
    theta_i = {n: t.clone() for n, t in outer.anchor.items()}
    for p in theta_i.values():
        p -= 2.0
    outer.contribute(theta_i)
    own = Average(dense={n: torch.full(shape, 1.5).double() for n, shape in SHAPES.items()})
    for p in theta_i.values():  # the round seems dropped, and training goes on
        p -= 4.0
    outer.contribute(theta_i)
    outer.commit(own, own, late=True)
    for waiting in outer.residual.values():  # gamma would take from the 4 that were moved since
        torch.testing.assert_close(waiting, torch.full_like(waiting, 4.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", [m.value for m in Overlap])
def test_a_share_that_was_delivered_before_a_restart_leaves_nothing_that_could_count_twice(mode: str) -> None:
    """The others had it; what it was is gone with the process that sent it."""
    ledger = Ledger(spec_of(mode), 0)
    rank, outer = ledger.rank, ledger.outer
    rank.inner.step(0)
    outer.contribute(ledger.theta_i)
    rank.inner.step(1)
    average = Average(dense={n: t.double() for n, t in random_tensors(7).items()})
    step = OuterStep(1, [ME, OTHER], [], "", "", {0: ""}, average, None)
    take_outer_steps(ledger.spec, rank, Outcome(1, [step]))
    for name, start in ledger.start.items():
        torch.testing.assert_close(outer.anchor[name], start - average.dense[name], rtol=0, atol=1e-12)
        assert torch.equal(ledger.theta_i[name], outer.anchor[name])
        assert not outer.residual[name].any() and not outer.counted[name].any()


def test_no_offer_is_over_the_largest_weight() -> None:
    """A cluster that comes back with most of an outer step trained may have to start where the others are."""
    ledger = Ledger(spec_of(), 0, stormy=False)
    most = 4 * 4 * 128
    ledger.rank.unsent_tokens = most - 10
    assert train(ledger.spec, ledger.rank)
    assert ledger.weights[:2] == [most, 40]


def test_the_alarm_speaks_once_and_only_when_the_error_buffer_stays_large() -> None:
    alarm = ErrorAlarm()
    heard = [alarm.hear(r) for r in (1.0, 4.0, None, 4.0, 2.9, 3.1, 3.2, 5.25, 9.0)]
    assert [bool(text) for text in heard] == [False] * 7 + [True, False]
    assert "5.2 times" in heard[7] and "compression.gamma" in heard[7]


@pytest.mark.parametrize(("feedback", "warned"), [("paper", True), ("local", False)])
def test_a_growing_error_buffer_is_reported(feedback: str, warned: bool) -> None:
    """Feedback `paper` keeps the deviation from the mean of unequal clusters, here twice the movement."""

    class Unequal(Ledger):
        def _start(self, t: int, offer: Offer) -> Any:
            own = Average(dense={n: r.clone() for n, r in self.outer.residual.items()})
            mean = Average(dense={n: -r for n, r in own.dense.items()})
            step = OuterStep(t, [ME, OTHER], [1.0, 1.0], "", "", {0: ""}, mean, own)
            return SimpleNamespace(ready=lambda: True, wait=lambda _give_up: Outcome(t, [step]))

        def _landed(self, outcome: Outcome, _lineage: str) -> None: ...

    ledger = Unequal(spec_of(feedback=feedback, gamma=0.9, bits=4), 0, stormy=False)
    assert train(ledger.spec, ledger.rank)
    started = [e for e in ledger.events if isinstance(e, RoundStarted)]
    warnings = [e.message for e in ledger.events if isinstance(e, Warned)]
    assert len(warnings) == warned
    assert started[0].error_ratio is None  # nothing was committed yet
    assert all(e.norm > 0 and e.weight == 40 for e in started)
    ratios = [e.error_ratio for e in started[1:]]
    assert all(r is not None and (r > 3 if warned and t > 3 else r >= 0) for t, r in enumerate(ratios))


@pytest.mark.parametrize("mode", [m.value for m in Overlap])
def test_what_is_not_finite_is_never_offered(mode: str) -> None:
    """The last inner step of an outer step blows up: no loss has shown it when the round starts."""

    class BlowsUp(Ledger):
        def _move(self, number: int) -> float:
            super()._move(number)
            if number == 11:  # the last one of outer step 3
                self.theta_i["0.a"][2, 3] = math.inf
            return 0.0

        def _start(self, t: int, offer: Offer) -> Any:
            assert math.isfinite(offer.norm) and all(map(math.isfinite, offer.fingerprint))
            assert all(torch.isfinite(r).all() for r in self.outer.residual.values())
            assert all(torch.isfinite(p).all() for p in self.theta_i.values())
            return super()._start(t, offer)

    ledger = BlowsUp(spec_of(mode, bits=4), 1, stormy=False)
    assert train(ledger.spec, ledger.rank)
    assert [w for w in ledger.weights if w == 0] == [ledger.weights[2]]
    assert [e.message for e in ledger.events if isinstance(e, Warned)]


def test_a_cluster_that_lost_sight_of_the_others_stops_training_alone() -> None:
    """With a quorum: three rounds in a row come to nothing, and it goes to look for the others."""
    ledger = Ledger(spec_of(), 0, stormy=False)
    run = replace(ledger.spec.run, quorum=2)
    dropped = SimpleNamespace(ready=lambda: True, wait=lambda _give_up: Outcome(ledger.rank.t - 1))
    ledger.rank.rounds = cast(Any, SimpleNamespace(start=lambda _t, _offer: dropped))
    ledger.rank.history = cast(Any, SimpleNamespace(write=lambda *_: None))
    assert not train(replace(ledger.spec, run=run), ledger.rank)
    assert ledger.rank.wanted == Wish.PAUSE_NOW
    assert [e.t for e in ledger.events if isinstance(e, RoundDropped)] == [1, 2, 3, 4]  # one was in flight
