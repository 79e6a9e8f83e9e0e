"""What a round leaves behind adds up: memory and open files over many rounds."""

import pytest

from benchmarks.soak import soak


@pytest.mark.timeout(120)
def test_many_rounds_leave_no_memory_and_no_open_file_behind() -> None:
    """benchmarks/soak.py has 500 of them; here 60, with limits that a leak per round or stream breaks."""
    row = soak(60, side=64, round_s=60.0)
    assert row["committed"] == 60
    for cluster in row["clusters"]:
        assert cluster["fds_last"] - cluster["fds_first"] <= 15, cluster
        assert cluster["rss_last"] - cluster["rss_first"] < 40, cluster  # MB; a chunk kept per round is more
