"""Five minutes of chaos, always the same faults: real programs and training. Longer: benchmarks/chaos.py."""

from pathlib import Path

import pytest

from benchmarks.chaos import chaos, draw

SEED, FAULTS, SECONDS = 1, 33, 300.0


@pytest.mark.timeout(1200)
def test_three_clusters_train_on_while_they_die_freeze_and_pause(tmp_path: Path) -> None:
    """R10. It ends when all three have taken an outer step together after the last fault. Links are cut in
    test_links.py and in the long form."""
    row = chaos(draw(SEED, FAULTS, SECONDS, links=False), SECONDS, tmp_path, None)
    assert row["violations"] == []
    assert row["faults"] == {"freeze": 16, "pause": 7, "rank": 5, "kill": 5}
    (_, first), *_, (_, last) = row["losses"]
    assert last < first
