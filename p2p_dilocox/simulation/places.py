"""What a simulation is told of its clusters, and what it tells."""

import random
from dataclasses import dataclass

from p2p_dilocox.simulation.links import Link

__all__ = ["Absence", "Place", "Point", "drawn_absences"]


@dataclass(frozen=True)
class Absence:
    """A cluster is gone from start_s to stop_s of simulated time, as after kill -9: it comes back with its
    parameters of then, fetches the others' state and goes on where they are.
    """

    start_s: float
    stop_s: float


def drawn_absences(who: str, share: float, mean_s: float, until_s: float) -> tuple[Absence, ...]:
    """Of a cluster that comes and goes without memory: away for `share` of its time (below 1), `mean_s` at a
    time on average, all lengths exponential. who: the same name gets the same absences."""
    found: list[Absence] = []
    if share <= 0:
        return ()
    lengths, now_s = random.Random(f"p2p_dilocox absences {who}"), 0.0
    while now_s < until_s:
        start_s = now_s + lengths.expovariate(share / ((1 - share) * mean_s))
        now_s = start_s + lengths.expovariate(1 / mean_s)
        found.append(Absence(start_s, now_s))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a cluster trains. step_s: seconds of an inner step."""

    cluster_id: str
    step_s: float = 1.0
    link: Link = Link()
    absences: tuple[Absence, ...] = ()


@dataclass(frozen=True)
class Point:
    """A validation: of the anchor after outer step t, at `seconds` of simulated time, when all clusters
    together had trained `tokens` and each had sent `sent_bytes` (mean). mean_val_loss: of the mean of the
    last anchors, if the run has one.
    """

    t: int
    seconds: float
    tokens: int
    sent_bytes: float
    val_loss: float
    mean_val_loss: float | None = None
