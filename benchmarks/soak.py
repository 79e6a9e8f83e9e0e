"""Many rounds of four clusters, each a process of its own: does anything grow?

    python -m benchmarks.soak [--rounds 500] [--failing 50] [--json]

Resident memory and open files of every rank and its p2pd, together, at the first and the last sample, and the
slope of a straight line through all samples. Ten rounds come before: buffers fill up. Then, with
clusters that have to move more than their deadline allows, rounds that all fail: what a failed round leaves
behind would add up. hivemind's averager loses memory there until the machine has none (its issues 264, 654).
The C library gives memory back at once (MALLOC_MMAP_THRESHOLD_), so that what is resident is what is held.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.faults.crew import Crew, members_of, spec_text, usage

CLUSTERS = 4
WARM_UP = 10  # rounds
SAMPLES = 50  # at most, per part
EXACT = "[compression]\nbits = 16\nreturn_bits = 16\nlowrank = 0\ngather_up_to = 0\n"
Row = dict[str, Any]


class Gauge:
    """Samples of what all processes of a crew hold."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._samples: dict[str, list[tuple[int, dict[str, int]]]] = {c.id: [] for c in crew.clusters}

    def read(self, t: int) -> None:
        for cluster in self._crew.clusters:
            self._samples[cluster.id].append((t, usage(cluster.lead)))

    def rows(self) -> list[Row]:
        """One per cluster."""
        rows = []
        for samples in self._samples.values():
            row: Row = {}
            for what, scale, digits in (("rss", 1e-6, 1), ("fds", 1.0, 0)):
                points = [(float(t), scale * found[what]) for t, found in samples]
                row[f"{what}_first"] = round(points[0][1], digits)
                row[f"{what}_last"] = round(points[-1][1], digits)
                row[f"{what}_per_100_rounds"] = round(100 * slope(points), 3)
            rows.append(row)
        return rows


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line through the points with the least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    below = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / below if below else 0.0


def soak(rounds: int, *, side: int, round_s: float) -> Row:
    """rounds in a row; with a round_s that is too short for `side`, failing ones. rss is in MB."""
    count = {"committed": 0, "partial": 0, "dropped": 0}
    text = spec_text(min_clusters=CLUSTERS, round_s=round_s, more=EXACT)
    with tempfile.TemporaryDirectory() as directory, Crew(Path(directory), text, side=side) as crew:
        crew.join(CLUSTERS)
        gauge = Gauge(crew)
        for number in range(1 - WARM_UP, rounds + 1):
            t = max(c.t for c in crew.clusters) + 1
            outcomes = crew.round(t)
            members = {tuple(members_of(o)) if o["steps"] else () for o in outcomes}
            whole = all(len(m) == CLUSTERS for m in members) and len(members) == 1
            if number > 0:
                count["committed" if whole else "partial" if any(members) else "dropped"] += 1
            for cluster, outcome in zip(crew.clusters, outcomes, strict=True):
                if outcome["failed"]:
                    crew.catch_up(cluster)
            if number >= 0 and number % max(1, rounds // SAMPLES) == 0:
                gauge.read(number)
        crew.check([c for c in crew.clusters if c.in_step])
        return {"rounds": rounds, **count, "clusters": gauge.rows()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--failing", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # of the members that are started from here on
    result = {
        "fault-free": soak(options.rounds, side=64, round_s=60.0),
        "failing": soak(options.failing, side=3072, round_s=0.6),
    }
    if options.json:
        print(json.dumps(result))
        return
    for what, row in result.items():
        print({"what": what, **{k: v for k, v in row.items() if k != "clusters"}})
        for cluster in row["clusters"]:
            print("   ", cluster)


if __name__ == "__main__":
    main()
