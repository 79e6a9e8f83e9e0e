"""Rank and H from averages: against hand-made spectra, and the traps of the plain reading."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from p2p_dilocox.compression import orthonormalise
from p2p_dilocox.controller import (
    RankChoice,
    agreed,
    band,
    effective_rank,
    inner_steps,
    literal,
    utilisation,
)

SPECTRUM = torch.tensor([float(2.0 ** (-i / 8)) for i in range(64)])  # of the true average: k95 is 18


def factor(singular: Tensor, n: int = 80, seed: int = 0) -> Tensor:
    """Q [n, r] with these singular values, in a basis of its own."""
    generator = torch.Generator().manual_seed(seed)
    r = len(singular)
    left = orthonormalise(torch.randn(n, r, generator=generator))
    right = orthonormalise(torch.randn(r, r, generator=generator))
    return left * singular @ right.T


@pytest.mark.parametrize(
    ("singular", "energy", "k"),
    [
        ([1.0, 1.0, 1.0, 1.0], 0.95, 4),
        ([1.0, 1.0, 1.0, 1.0], 0.74, 3),
        ([10.0, 1.0, 0.1], 0.95, 1),
        ([3.0, 2.0, 1.0], 0.9, 2),  # 13 of 14
        ([1.0, 0.0, 0.0], 0.99, 1),
        ([0.0, 0.0], 0.95, 0),
    ],
)
def test_the_effective_rank_is_how_many_directions_have_the_energy(
    singular: list[float], energy: float, k: int
) -> None:
    assert effective_rank(factor(torch.tensor(singular)), energy) == k


def test_an_average_has_the_singular_values_of_its_second_factor() -> None:
    p, q = orthonormalise(torch.randn(50, 12)), torch.randn(40, 12)
    squares = torch.linalg.svdvals((p @ q.T).double()).square()
    expected = 1 + int((squares.cumsum(0) < 0.95 * squares.sum()).sum())
    assert effective_rank(q, 0.95) == expected


def test_utilisation_weighs_a_matrix_by_what_its_directions_cost() -> None:
    flat, steep = factor(torch.ones(8), 30), factor(torch.tensor([1.0] + [0.0] * 7), 90)
    factors = {"a": (torch.zeros(10, 8), flat), "b": (torch.zeros(30, 8), steep)}
    assert utilisation(factors, 0.95) == pytest.approx((8 * 40 + 1 * 120) / (8 * 160))
    assert utilisation({}, 0.95) == 1.0


def followed(rule: str, first: int, steps: int = 60) -> list[int]:
    """The ranks that a rule chooses when every average is the best of its rank, as the codec makes it."""
    choice, ranks = RankChoice(first), []
    for _ in range(steps):
        kept = factor(SPECTRUM[: choice.r])
        u = utilisation({"a": (torch.zeros(80, choice.r), kept)}, 0.95)
        choice = (band if rule == "band" else literal)(choice, u * choice.r, c=5, first=first)
        ranks.append(choice.r)
    return ranks


@pytest.mark.parametrize("first", [12, 16, 20, 24, 32, 48, 64])
def test_the_band_cuts_what_is_not_used_and_then_stops(first: int) -> None:
    ranks = followed("band", first)
    assert all(later <= earlier for earlier, later in itertools.pairwise([first, *ranks]))
    assert ranks[:4] == [first] * 4  # a whole window before anything happens
    assert len(set(ranks[20:])) == 1
    assert ranks[-1] >= max(4, first / 4)
    used = effective_rank(factor(SPECTRUM[: ranks[-1]]), 0.95) / ranks[-1]
    assert used >= 0.75 or ranks[-1] == max(4, math.ceil(first / 4))


def test_a_rank_that_is_used_is_left_alone_however_small() -> None:
    assert set(followed("band", 8)) == {8}


def test_the_plain_reading_shrinks_until_nothing_is_left() -> None:
    """convergence.md, section 6: what is measured follows what was chosen."""
    ranks = followed("literal", 32)
    assert ranks[3] == 32 and all(b <= a for a, b in itertools.pairwise(ranks))
    assert ranks[-1] <= 0.5 * effective_rank(factor(SPECTRUM), 0.95)


def test_without_a_bandwidth_h_follows_the_rank_as_in_the_paper() -> None:
    limits = {"first": 125, "least": 10, "most": 500, "overlap": 1.0}
    assert inner_steps(1.0, comm_s=0.0, step_s=1.0, **limits) == 125  # type: ignore[arg-type]
    assert inner_steps(0.64, comm_s=0.0, step_s=1.0, **limits) == 80  # type: ignore[arg-type]
    assert inner_steps(0.01, comm_s=0.0, step_s=1.0, **limits) == 10  # type: ignore[arg-type]


@pytest.mark.parametrize(("overlap", "H"), [(1.0, 100), (0.5, 200), (0.1, 500)])
def test_a_round_that_takes_longer_gets_more_inner_steps_to_hide_behind(overlap: float, H: int) -> None:
    assert inner_steps(
        0.5, first=125, least=1, most=500, comm_s=50.0, step_s=0.5, overlap=overlap
    ) == H  # fmt: skip


def test_members_agree_on_the_upper_median_of_those_that_know() -> None:
    assert agreed([]) == agreed([0, 0]) == 0
    assert agreed([0, 7]) == 7
    assert agreed([5, 9]) == 9
    assert agreed([80, 81, 10**9]) == 81  # a liar
    assert agreed([1, 80, 81]) == 80
