"""Rank and H while a run goes on: AdaGradCmp, Algorithm 3 of DiLoCoX (arXiv 2506.21263). Data in, data out.

Its inputs are as printed: a window of c outer steps, r_1, H_1, and the effective rank r'_t of the average.
`literal` is the plain reading of what follows: r_t is r_1 while t < c, then the mean of the last c effective
ranks, and H_t = alpha H_1 with the reduction ratio alpha = r_t / r_1. It fails: an average has no more than r
directions, so what is measured follows what was chosen, and the rank shrinks to nothing. So our rule (`band`)
asks how much of the rank is used, and leaves it alone while that is more than three quarters.
"""

# m, n: rows, columns of a matrix   r: lowrank   k: effective rank   u: utilisation, k / r

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RankChoice", "agreed", "band", "effective_rank", "inner_steps", "literal", "utilisation"]

_LEAST_USED, _TARGET = 0.75, 0.85  # a rank that is used less than the first is cut until the second is
_FLOOR = 4  # of the rank; a quarter of the first one, if that is more


@dataclass(frozen=True)
class RankChoice:
    """The rank of a stage, and the last effective ranks, the newest last."""

    r: int
    window: tuple[float, ...] = ()

    def used(self, k: float, c: int) -> float:
        """The mean of the last c effective ranks, with k as the newest."""
        return statistics.fmean((*self.window, k)[-c:])


def effective_rank(q: Tensor, energy: float) -> int:
    """The smallest k whose k largest singular values have the part `energy` of all squares.

    q: [n, r], of an average P Q^T with orthonormal P, which has the singular values of Q.
    """
    wide = q.double()
    squares = torch.linalg.eigvalsh(wide.T @ wide).flip(0).clamp(min=0)
    total = float(squares.sum())
    if total == 0:
        return 0
    return min(len(squares), 1 + int((squares.cumsum(0) < energy * total).sum()))


def utilisation(factors: Mapping[str, tuple[Tensor, Tensor]], energy: float) -> float:
    """Of the rank of a stage, in (0, 1]: its matrices' effective ranks over r, weighted by what they cost.

    factors: name -> (P [m, r], Q [n, r]), of an average. 1 if there are none.
    """
    used = full = 0
    for p, q in factors.values():
        cost = len(p) + len(q)
        used += cost * effective_rank(q, energy)
        full += cost * q.shape[1]
    return used / full if full else 1.0


def band(choice: RankChoice, k: float, *, c: int, first: int) -> RankChoice:
    """After c outer steps of one rank: cut to what is used, over 0.85, if less than 0.75 is. It never grows.
    k: mean effective rank of an average, its directions times `utilisation`.

    The band between the two is what stops it: a rank that was cut is used to 0.85, which is above 0.75.
    """
    window, used = (*choice.window, k)[-c:], choice.used(k, c)
    if len(window) < c or used >= _LEAST_USED * choice.r:
        return RankChoice(choice.r, window)
    r = max(_FLOOR, math.ceil(first / 4), math.ceil(used / _TARGET))
    return RankChoice(r) if r < choice.r else RankChoice(choice.r, window)


def literal(choice: RankChoice, k: float, *, c: int, first: int) -> RankChoice:
    """The first rank for c outer steps, then the mean of the last c effective ranks, rounded."""
    window = (*choice.window, k)[-c:]
    if len(window) < c:
        return RankChoice(choice.r, window)
    return RankChoice(max(1, min(first, math.floor(choice.used(k, c) + 0.5))), window)


def inner_steps(
    alpha: float, *, first: int, least: int, most: int, comm_s: float, step_s: float, overlap: float
) -> int:
    """H: the paper's alpha times the first one; and more if a round needs more to be hidden.

    alpha: r over the first r, the largest of all stages. comm_s, step_s: seconds of a round and of an inner
    step. overlap: the part of an outer step that a round may take; 1 is the paper's "fully hidden", and half
    of it costs less loss than a round that is hidden by a hair.
    """
    hidden = math.ceil(comm_s / (overlap * step_s)) if step_s > 0 else 0
    follows = math.ceil(alpha * first - 1e-9)  # 7 / 25 * 25 is 7.000000000000001
    return min(most, max(least, follows, hidden))


def agreed(wishes: Sequence[int]) -> int:
    """One number from all members' wishes, the same on each: the upper median of those that have one, 0 if
    none has. A member that lies moves it no further than its honest neighbours are apart."""
    known = sorted(wish for wish in wishes if wish > 0)
    return known[len(known) // 2] if known else 0
