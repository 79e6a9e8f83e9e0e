"""A minute of chaos, always the same faults: real programs, real training. Longer: benchmarks/chaos.py."""

from pathlib import Path

import pytest

from benchmarks.chaos import chaos, draw

SEED, FAULTS, SECONDS = 1, 6, 40.0


@pytest.mark.timeout(600)
def test_three_clusters_train_on_while_they_die_freeze_and_pause(tmp_path: Path) -> None:
    """R10. It ends when all three have taken an outer step together after the last fault. Links are cut in
    test_links.py and in the long form."""
    row = chaos(draw(SEED, FAULTS, SECONDS, links=False), SECONDS, tmp_path, None)
    assert row["violations"] == []
    assert row["faults"] == {"pause": 2, "freeze": 2, "rank": 1, "kill": 1}
    (_, first), *_, (_, last) = row["losses"]
    assert last < first
