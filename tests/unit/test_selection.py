"""What a round averages, and the methods that average a part: SPARTA and Streaming DiLoCo, as published."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from p2p_dilocox.selection import drawn, fragment_of, selected
from p2p_dilocox.settings import Outer, Schedule
from tests.unit.in_step import InStep
from tests.unit.ledger import random_tensors, spec_of

NAMES = {
    "model.embed_tokens.weight": 640, **{f"model.layers.{i}.mlp.weight": 64 for i in range(6)},
    "model.norm.weight": 8, "lm_head.weight": 640,
}  # fmt: skip
PINNED = [14, 38, 56, 93, 239, 248, 251, 278, 339, 381, 452, 536, 573, 595, 755, 761, 772, 829, 832, 884]


def test_a_draw_is_the_same_on_every_machine_and_another_one_each_step() -> None:
    """Pinned: a change would part clusters of two versions in silence."""
    places = drawn(3, 7, "model.layers.0.mlp.weight", 1000, 0.02)
    assert places.tolist() == drawn(3, 7, "model.layers.0.mlp.weight", 1000, 0.02).tolist()
    assert places.tolist()[:20] == PINNED
    assert places.tolist() != drawn(3, 8, "model.layers.0.mlp.weight", 1000, 0.02).tolist()
    assert places.tolist() != drawn(4, 7, "model.layers.0.mlp.weight", 1000, 0.02).tolist()


@pytest.mark.parametrize("fraction", [0.005, 0.1, 0.5])
def test_every_value_is_drawn_with_the_given_probability(fraction: float) -> None:
    """Bernoulli: over 400 steps the counts of 1000 values are within 6 standard deviations of their mean."""
    counts = torch.zeros(1000)
    for t in range(400):
        counts[drawn(0, t, "w", 1000, fraction)] += 1
    spread = (400 * fraction * (1 - fraction)) ** 0.5
    assert (counts - 400 * fraction).abs().max() < 6 * spread + 1
    assert abs(float(counts.mean()) - 400 * fraction) < 6 * spread / 1000**0.5


@pytest.mark.parametrize(
    ("order", "layers"),
    [("strided", [[0, 3], [1, 4], [2, 5]]), ("sequential", [[0, 1], [2, 3], [4, 5]])],
)
def test_fragments_are_strided_or_neighbouring_layers_and_cover_the_model_once(
    order: str, layers: list[list[int]]
) -> None:
    schedule = Schedule(fragments=3, order=order)
    fragments = [[n for n in NAMES if fragment_of(n, 6, schedule) == f] for f in range(3)]
    assert sorted(n for fragment in fragments for n in fragment) == sorted(NAMES)
    for fragment, expected in zip(fragments, layers, strict=True):
        assert [int(n.split(".")[2]) for n in fragment if "layers" in n] == expected
    assert "model.embed_tokens.weight" in fragments[0]
    assert {"model.norm.weight", "lm_head.weight"} <= set(fragments[2])


@pytest.mark.parametrize("schedule", ["fragments = 3", "fraction = 0.1"])
def test_the_last_round_of_a_run_averages_everything(schedule: str) -> None:
    spec = spec_of("none", "parameters", schedule=schedule)
    last = spec.run.outer_steps
    assert selected(spec, last, NAMES, 6) == dict.fromkeys(NAMES)
    assert selected(spec, last - 1, NAMES, 6) != dict.fromkeys(NAMES)


def test_sparta_sets_the_drawn_values_to_their_mean_and_touches_no_other() -> None:
    """EXO gym: after the inner step param[mask] = mean over nodes of param[mask]."""
    spec = spec_of("none", "parameters", schedule="fraction = 0.3")
    start = {n: v.double() for n, v in random_tensors(0).items()}
    swarm, reference = InStep(spec, start, 3, 2), [copy.deepcopy(start) for _ in range(3)]
    for t in range(1, 9):

        def move(number: int, theta: dict[str, Tensor], t: int = t) -> None:
            for name, step in random_tensors(100 * t + number, 0.1).items():
                theta[name] -= step

        swarm.move(move)
        for number, theta in enumerate(reference):
            move(number, theta)
        for name, p in start.items():
            places = drawn(spec.run.seed, t, name, p.numel(), 0.3)
            mean = torch.stack([theta[name].view(-1)[places] for theta in reference]).mean(0)
            for theta in reference:
                theta[name].view(-1)[places] = mean
        swarm.land(swarm.start(t))
        for ours, theirs in zip(swarm.theta, reference, strict=True):
            for name in start:
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-14)


def test_overlapped_sparta_overwrites_with_means_of_one_step_before() -> None:
    spec = spec_of("delay", "parameters", schedule="fraction = 0.3")
    start = {n: v.double() for n, v in random_tensors(0).items()}
    swarm, reference = InStep(spec, start, 2, 2), [copy.deepcopy(start) for _ in range(2)]
    pending, late = None, None
    for t in range(1, 9):

        def move(number: int, theta: dict[str, Tensor], t: int = t) -> None:
            for name, step in random_tensors(100 * t + number, 0.1).items():
                theta[name] -= step

        swarm.move(move)
        for number, theta in enumerate(reference):
            move(number, theta)
        if pending and late:
            swarm.land(pending)
            for name, (places, mean) in late.items():
                for theta in reference:
                    theta[name].view(-1)[places] = mean
        pending, late = swarm.start(t), {}
        for name, p in start.items():
            places = drawn(spec.run.seed, t, name, p.numel(), 0.3)
            mean = torch.stack([theta[name].view(-1)[places] for theta in reference]).mean(0)
            late[name] = (places, mean)
        for ours, theirs in zip(swarm.theta, reference, strict=True):
            for name in start:
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-14)


def test_streaming_diloco_is_its_algorithm_2() -> None:
    """arXiv 2501.18512: each fragment's pseudo-gradient is averaged in turn, the outer step of the fragment
    is taken tau inner steps later, and theta_i <- alpha theta_i + (1 - alpha) theta."""
    spec = spec_of("delay", "none", schedule="fragments = 2")  # tau 2, alpha 0.5; every 4 inner steps
    spec = replace(spec, outer=Outer(lr=0.4, momentum=0.9))
    alpha, lr, tau, every = spec.overlap.keep, spec.outer.lr, spec.overlap.delay, spec.inner.H
    assert (alpha, tau, every) == (0.5, 2, 4)
    beta = spec.outer.momentum
    start = {n: v.double() for n, v in random_tensors(0).items()}
    fragments = list(start)  # of layers 0 and 1
    swarm, theta_m = InStep(spec, start, 2, 2), [copy.deepcopy(start) for _ in range(2)]
    theta, v = copy.deepcopy(start), {n: torch.zeros_like(p) for n, p in start.items()}
    pending, delta, name = None, torch.zeros(0), ""
    for n in range(1, 41):

        def move(number: int, params: dict[str, Tensor], n: int = n) -> None:
            for key, step in random_tensors(100 * n + number, 0.1).items():
                params[key] -= step

        swarm.move(move)
        for number, params in enumerate(theta_m):
            move(number, params)
        if pending and n % every == tau:
            swarm.land(pending)
            pending = None
            v[name] = beta * v[name] + delta
            theta[name] = theta[name] - lr * (delta + beta * v[name])
            for params in theta_m:
                params[name] = alpha * params[name] + (1 - alpha) * theta[name]
        if n % every == 0:
            t = n // every
            name = fragments[(t - 1) % 2]
            delta = torch.stack([theta[name] - params[name] for params in theta_m]).mean(0)
            pending = swarm.start(t)
        for ours, theirs in zip(swarm.theta, theta_m, strict=True):
            for key in start:
                torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-13)
        for key in start:
            torch.testing.assert_close(swarm.outers[0].anchor[key], theta[key], rtol=0, atol=1e-13)
