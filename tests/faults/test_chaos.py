"""A minute of chaos, always the same faults: real programs, real training. Longer: benchmarks/chaos.py."""

from pathlib import Path

import pytest

from benchmarks.chaos import chaos, draw
from benchmarks.links import Links, why_not

SEED, FAULTS, SECONDS = 12, 7, 45.0


@pytest.mark.timeout(600)
def test_three_clusters_train_on_while_they_die_freeze_and_lose_their_links(tmp_path: Path) -> None:
    """R10. It ends when all three have taken an outer step together after the last fault."""
    if why_not():
        row = chaos(draw(SEED, FAULTS, SECONDS, links=False), SECONDS, tmp_path, None)
    else:
        with Links(4, "200mbit") as links:
            row = chaos(draw(SEED, FAULTS, SECONDS, links=True), SECONDS, tmp_path, links)
    assert row["violations"] == []
    assert sum(row["faults"].values()) == FAULTS
    (_, first), *_, (_, last) = row["losses"]
    assert last < first
