"""Which part of the data a run has seen how often, from the events of its clusters."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from p2p_dilocox.errors import StateError
from p2p_dilocox.events import ShardTrained
from p2p_dilocox.sinks import read_events

__all__ = ["Coverage", "read_coverage"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """num_shards: parts of the data. times: for each part that was seen, how often. twice: numbers of shards
    (see data/leases.py) that were trained more than once, with how often. by_cluster: outer steps of each."""

    num_shards: int
    times: dict[int, int]
    twice: dict[int, int]
    by_cluster: dict[str, int]

    @property
    def seen(self) -> float:
        """The fraction of the data that was seen at all."""
        return len(self.times) / self.num_shards

    def fractions(self) -> dict[int, float]:
        """How often -> the fraction of the data that was seen so often."""
        counts = Counter(self.times.values())
        counts[0] = self.num_shards - len(self.times)
        return {times: count / self.num_shards for times, count in sorted(counts.items()) if count}


def read_coverage(states: Iterable[Path]) -> Coverage:
    """From the state directories of any number of clusters of a run. Raises StateError if no shard is in
    them, or if they are of runs with other data."""
    sizes: set[int] = set()
    trained: set[tuple[str, int, int]] = set()  # what was done again after a restart counts once
    for state in states:
        for event in read_events(state / "events.jsonl"):
            if isinstance(event, ShardTrained):
                sizes.add(event.num_shards)
                trained.add((str(state), event.t, event.shard))
    if len(sizes) != 1:
        raise StateError(
            'no outer step with a shard of the data yet. Has the run data.order = "shards"?'
            if not sizes
            else f"these are clusters of several runs: their data has {sorted(sizes)} shards."
        )
    (num_shards,) = sizes
    numbers = Counter(shard for _, _, shard in trained)
    return Coverage(
        num_shards=num_shards,
        times=dict(Counter(shard % num_shards for _, _, shard in trained)),
        twice={shard: count for shard, count in sorted(numbers.items()) if count > 1},
        by_cluster=dict(Counter(state for state, _, _ in trained)),
    )
