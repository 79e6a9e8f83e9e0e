"""How large the outer learning rate may be: in one direction, training is a linear recurrence.

Of the distance of theta_i from the optimum of a direction the inner steps of an outer step leave 1 - kappa:
flat directions have a kappa near 0, sharp ones 1. Outer step, momentum and delay make a linear map of it,
which shrinks distances or lets some grow without end. A learning rate is stable if none grows at any kappa.
Clusters are alike here and nothing is compressed: noise, and clusters that differ, only make it worse.

The map follows from `overlap`; the tests play the same with the trainer's own loop.
"""

# a: anchor   v: momentum   x: theta_i   p: pseudo-gradient on the wire   u: momentum of our own shares

from functools import cache

import numpy as np
from numpy.typing import NDArray

from p2p_dilocox.settings import Overlap, RunSpec

__all__ = ["largest_stable_lr", "unstable"]

_KAPPAS = np.array([*np.linspace(0.02, 0.98, 49), 0.99, 0.999, 1.0])
_PARTS = (0.0, 0.02, 0.25, 0.5, 0.75, 0.98, 1.0)  # of an outer step: where an average may land
_MOST = 4.0  # larger ones are not looked for
_ROUNDING = 1e-6
_MANY = 4096  # clusters: as good as any number of them

Array = NDArray[np.float64]


@cache
def largest_stable_lr(overlap: Overlap, momentum: float, nesterov: bool, clusters: int = _MANY) -> float:
    """Of an outer step; to 0.001, at most 4. clusters: D, of whose shares an `eager` one goes on from its
    own; no other form depends on it. With `arrival` and `delay` an average may land at any inner step.
    """
    stable, unstable = 0.0, _MOST
    while unstable - stable > 1e-3:
        lr = (stable + unstable) / 2
        if _growth(overlap, lr, momentum, nesterov, clusters) <= 1 + _ROUNDING:
            stable = lr
        else:
            unstable = lr
    return stable


def unstable(spec: RunSpec, clusters: int | None = None) -> list[str]:
    """A sentence for each learning rate of an outer step at which the run will probably diverge.

    clusters: how many there will be; None: all that `members` names, or any number.
    """
    found, overlap, outer = [], spec.overlap, spec.outer
    many = clusters or len(spec.run.members) or _MANY
    limit = largest_stable_lr(overlap, outer.momentum, outer.nesterov, many)
    if outer.average != "gradient" and outer.lr > limit:
        form = f'overlap.mode = "{overlap.mode}"'
        form += f" and keep = {overlap.keep:g}" if overlap.mode == "boundary" else ""
        if overlap.mode == "eager":
            form += f" and {many if many < _MANY else 'any number of'} clusters"
        arrival = largest_stable_lr(Overlap(mode="arrival", keep=0.5), outer.momentum, outer.nesterov)
        other = f', or overlap.mode = "arrival", which is stable up to {arrival:.2f}' * (outer.lr < arrival)
        found.append(_sentence("outer", outer.lr, outer.momentum, limit, f"stable with {form}") + other)
    local, alone = spec.local, largest_stable_lr(Overlap(), spec.local.momentum, True)
    if local.every and local.lr > alone:
        found.append(_sentence("local", local.lr, local.momentum, alone, "stable for a cluster alone"))
    return found


def _sentence(table: str, lr: float, momentum: float, limit: float, form: str) -> str:
    return (
        f"{table}.lr = {lr:g} with momentum {momentum:g} is above {limit:.2f}, the largest that is {form}: "
        "the loss will probably diverge. Take a smaller lr or momentum"
    )


def _growth(overlap: Overlap, lr: float, momentum: float, nesterov: bool, clusters: int) -> float:
    """What distances are multiplied with per outer step in the long run: the largest spectral radius."""
    anywhere = overlap.mode in ("arrival", "delay")
    maps = [
        _outer_step(overlap, lr, momentum, nesterov, 1 / clusters, part)
        for part in (_PARTS if anywhere else (0.0,) if overlap.mode == "none" else (1.0,))
    ]
    return float(np.abs(np.linalg.eigvals(np.concatenate(maps))).max())


def _outer_step(
    overlap: Overlap, lr: float, momentum: float, nesterov: bool, share: float, part: float
) -> Array:
    """The map of an outer step on (a, v, x, p, u) for each kappa, [kappas, 5, 5].

    It begins when p is on the wire; part: how much of it is over when the average, p as well, lands.
    """

    def ahead(p: Array, v: Array) -> Array:
        return p + momentum * v if nesterov else v

    a, v, x, p, u = (np.tile(row, (len(_KAPPAS), 1)) for row in np.eye(5))
    left = (1.0 - _KAPPAS)[:, None]
    before = left**part  # 0 ** 0 is 1: nothing is trained in no time
    trained = before * x
    v, u = momentum * v + p, momentum * u + p
    a = a - lr * ahead(p, v)
    kept = overlap.keep * (trained - x)
    if overlap.mode in ("boundary", "eager", "paper"):  # what is not kept is in the next contribution
        p = x - trained
        x = a + kept - (lr * share * ahead(p, momentum * u + p) if overlap.mode == "eager" else 0.0)
    else:
        blended = overlap.keep * trained + (1 - overlap.keep) * a
        x = left ** (1 - part) * (blended if overlap.mode == "delay" else a + kept)
        p = a - x
    return np.stack([a, v, x, p, u], axis=1)
