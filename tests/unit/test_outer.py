"""Outer steps against torch's own optimizer, and the balance of what is moved and what is delivered."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from p2p_dilocox.outer import Average, OuterState, nesterov_
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.settings import RunSpec

SHAPES = {"a": (6, 4), "b": (5,)}
TEXT = """
[run]
id = "test"
recipe = "dilocox"
outer_steps = 10
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
[overlap]
mode = "{mode}"
[compression]
bits = 64
return_bits = 64
lowrank = 0
feedback = "{feedback}"
gamma = {gamma}
"""


def spec_of(mode: str = "arrival", feedback: str = "local", gamma: float = 1.0) -> RunSpec:
    return parse_run(TEXT.format(mode=mode, feedback=feedback, gamma=gamma))


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


@pytest.mark.parametrize("mode", [m.value for m in Overlap])
@pytest.mark.parametrize("seed", range(4))
def test_every_movement_is_delivered_exactly_once_over_random_drops(mode: str, seed: int) -> None:
    """Rule V2. What was committed plus what waits is what was moved; `arrival` gives up (1 - keep) in flight.

    One cluster with a lossless codec and outer SGD lr 1: its anchor must have gone wherever it moved.
    """
    overlap, dice = Overlap(mode), random.Random(seed)
    spec = spec_of(mode, gamma=0.5)
    keep = spec.overlap.keep
    theta_i = {n: t.double() for n, t in random_tensors(0).items()}
    start = {n: t.clone() for n, t in theta_i.items()}
    outer = OuterState(spec, theta_i, frozenset(), "")
    moved = {n: torch.zeros_like(t) for n, t in theta_i.items()}  # all local movement, downwards
    given_up = {n: torch.zeros_like(t) for n, t in theta_i.items()}
    steps = itertools.count(1)

    def train(scale: float) -> None:
        for name, step in random_tensors(next(steps), scale).items():
            theta_i[name] -= step
            moved[name] += step

    def finish(dropped: bool) -> bool:
        """The end of the round on the wire, at lr 1 without momentum."""
        if dropped:
            outer.keep_undelivered()
            return False
        average = Average(dense={n: t.clone() for n, t in outer.residual.items()})
        average.add_to_(outer.anchor, -1.0)
        outer.commit(average, average)
        return True

    def restart(unsent_is_sent: bool) -> None:
        if not unsent_is_sent:
            for name in moved:
                given_up[name] += (1 - keep) * (outer.base[name] - theta_i[name])
        outer.restart_(theta_i, keep)

    pending = False
    for _ in range(30):
        train(1.0)
        if pending and overlap.lands_between and dice.random() < 0.7:
            if finish(dice.random() < 0.4):
                restart(unsent_is_sent=False)
                outer.mark_sent(outer.anchor)
            pending = False
            train(0.5)
        landed = pending and finish(dice.random() < 0.4)
        if landed and not overlap.sends_before_restart:
            restart(unsent_is_sent=False)
            outer.mark_sent(outer.anchor)
            landed = False
        outer.contribute(theta_i)
        if landed:
            restart(unsent_is_sent=True)
        outer.mark_sent(theta_i)
        pending = True
        if overlap.waits_at_start:
            if finish(dice.random() < 0.4):
                restart(unsent_is_sent=False)
                outer.mark_sent(outer.anchor)
            pending = False
    for name in moved:
        waiting = outer.residual[name] if pending else outer.residual_scale * outer.residual[name]
        delivered = start[name] - outer.anchor[name]
        # What a restart kept of the movement in flight is measured again at the next boundary.
        unsent = outer.base[name] - theta_i[name]
        torch.testing.assert_close(
            delivered + waiting + unsent, moved[name] - given_up[name], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_local_feedback_keeps_exactly_what_the_others_could_not_decode(gamma: float) -> None:
    outer = OuterState(spec_of(gamma=gamma), random_tensors(0), frozenset(), "")
    theta_i = random_tensors(1)
    delta = {n: t.clone() for n, t in outer.contribute(theta_i).items()}
    own = {n: t.round() for n, t in delta.items()}
    outer.mark_sent(theta_i)
    outer.commit(Average(dense=random_tensors(2)), Average(dense=own))
    for name, error in outer.residual.items():
        torch.testing.assert_close(error, delta[name] - own[name])
    again = outer.contribute(theta_i)
    for name, carried in again.items():
        torch.testing.assert_close(carried, gamma * (delta[name] - own[name]))


def test_paper_feedback_accumulates_the_deviation_from_the_mean() -> None:
    """e = delta - average (DiLoCoX, Algorithm 2): grows with every round of unequal clusters, as measured."""
    outer = OuterState(spec_of(feedback="paper"), random_tensors(0), frozenset(), "")
    theta_i = {n: t.clone() for n, t in outer.anchor.items()}
    for n in range(1, 11):
        for p in theta_i.values():
            p -= 2.0  # this cluster moves by 2 each round, the mean by 1
        outer.contribute(theta_i)
        outer.mark_sent(theta_i)
        mean = Average(dense={name: torch.ones(shape).double() for name, shape in SHAPES.items()})
        outer.commit(mean, mean)
        for error in outer.residual.values():
            torch.testing.assert_close(error, torch.full_like(error, float(n)), rtol=0, atol=1e-4)
