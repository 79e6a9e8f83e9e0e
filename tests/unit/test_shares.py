"""How parts follow from link speeds: against a grid search and the formula they come from."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dilocox.averaging.shares import shares

SPEEDS = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=32)


def seconds(parts: list[float], speeds: list[float]) -> float:
    """Time of a round: each sends all but its part, and the averages of its part to the D - 1 others."""
    others = len(speeds) - 1
    return max((1 - x + x * others) / speed for x, speed in zip(parts, speeds, strict=True))


@given(SPEEDS)
def test_all_get_something_and_together_everything(speeds: list[float]) -> None:
    parts = shares(speeds, [True] * len(speeds))
    assert math.isclose(sum(parts), 1.0)
    assert min(parts) >= 0.05 / len(speeds)


@given(SPEEDS)
def test_the_round_is_no_slower_than_with_equal_parts(speeds: list[float]) -> None:
    equal = [1 / len(speeds)] * len(speeds)
    assert seconds(shares(speeds, [True] * len(speeds)), speeds) <= seconds(equal, speeds) * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [[1.0] * 3, [1.0, 2.0, 4.0], [10.0, 100.0, 100.0], [50.0, 60.0, 70.0]])
def test_no_other_division_of_three_is_faster(speeds: list[float]) -> None:
    grid = np.linspace(0.1 / 3, 1, 300)
    best = min(seconds([a, b, 1 - a - b], speeds) for a in grid for b in grid if 1 - a - b >= 0.1 / 3)
    assert seconds(shares(speeds, [True] * 3), speeds) <= best * (1 + 1e-6)


def test_equal_links_get_equal_parts_and_unknown_ones_count_as_usual() -> None:
    assert shares([5.0] * 4, [True] * 4) == pytest.approx([0.25] * 4)
    assert shares([0.0] * 4, [True] * 4) == pytest.approx([0.25] * 4)
    assert shares([5.0, 0.0, 5.0], [True] * 3) == pytest.approx([1 / 3] * 3)


def test_a_slow_link_gets_a_small_part_but_not_nothing() -> None:
    slow, *fast = shares([2.0, 1000.0, 1000.0, 1000.0], [True] * 4)
    assert slow == pytest.approx(0.1 / 4)
    assert fast == pytest.approx([(1 - slow) / 3] * 3)


def test_who_cannot_be_dialled_averages_nothing_unless_nobody_can() -> None:
    assert shares([1.0, 1.0, 1.0], [True, False, True]) == pytest.approx([0.5, 0.0, 0.5])
    assert shares([1.0, 1.0], [False, False]) == pytest.approx([0.5, 0.5])
