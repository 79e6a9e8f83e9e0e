"""Checkpoints of processes that are killed while they write them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_50_of_50_kills_while_saving_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    """R15, field report E1."""
    program = subprocess.run(
        [sys.executable, "-m", "tests.faults.saver", str(tmp_path), "50", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    kills = [json.loads(line) for line in program.stdout.splitlines()]
    assert program.returncode == 0 and len(kills) == 50, program.stderr
    for before, after in zip(kills, kills[1:], strict=False):
        # One more may have been complete before it could say so.
        assert before["saved"] <= after["resumed"] <= before["saved"] + 1, (before, after)
    assert max(len(kill["partial"]) for kill in kills) <= 1  # nothing piles up
    assert sum(bool(kill["partial"]) for kill in kills) >= 10  # most were struck in the middle of it
