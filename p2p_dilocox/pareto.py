"""What nothing beats with as few bytes."""

from collections.abc import Mapping

__all__ = ["pareto"]


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Of named (bytes, loss) those on the Pareto front, the fewest bytes first."""
    best: list[str] = []
    for name, (_, loss) in sorted(points.items(), key=lambda item: item[1]):
        if not best or loss < points[best[-1]][1]:
            best.append(name)
    return best
