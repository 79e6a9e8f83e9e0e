"""How large a part of a round each member averages: as much as its link carries in the time of the slowest.

With parts x_i of a vector of length 1, member i sends its own vector but for its part, 1 - x_i, and the
averages of its part to D - 1 others: 1 + x_i (D - 2) in all. The round is over after T = max_i (1 + x_i (D -
2)) / speed_i.
"""

from collections.abc import Sequence

__all__ = ["shares"]

_LEAST = 0.1  # of an equal part: what a slow link gets, so that nobody who can take part is left with nothing


def shares(speeds: Sequence[float], reducers: Sequence[bool]) -> list[float]:
    """One share per member, their sum 1: the x_i with the smallest T, but never less than a tenth of an equal
    part.

    speeds: uplinks in any unit, 0 if unknown (then it counts as the median of the known ones). reducers:
    whether a member can be sent to; those that cannot get 0. If none can, all are treated alike. Every member
    computes the same numbers: IEEE operations in a fixed order.
    """
    if not any(reducers):
        reducers = [True] * len(speeds)
    known = sorted(s for s in speeds if s > 0)
    usual = known[len(known) // 2] if known else 1.0
    rates = [s if s > 0 else usual for s in speeds]
    members = [i for i, can in enumerate(reducers) if can]
    least = _LEAST / len(members)
    others = max(1, len(speeds) - 2)

    def filled(t: float) -> list[float]:
        return [min(1.0, max(least, (t * rates[i] - 1.0) / others)) for i in members]

    low, high = 0.0, (1.0 + others) / min(rates[i] for i in members)
    for _ in range(60):  # to the last bits of a float64
        middle = 0.5 * (low + high)
        low, high = (low, middle) if sum(filled(middle)) >= 1.0 else (middle, high)
    parts = filled(high)
    total = sum(parts)
    result = [0.0] * len(speeds)
    for i, part in zip(members, parts, strict=True):
        result[i] = part / total
    return result
