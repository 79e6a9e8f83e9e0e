"""Families over real processes: inner steps, outer steps, a resume from a checkpoint, also where embedding
and head are ranks without a layer; ends of a tied embedding stay equal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.families import TIED
from tests.unit.family_rank import OVER_RANKS, STAGES, train

pytestmark = pytest.mark.timeout(240)  # the first test starts three processes


@pytest.fixture(scope="module")
def over_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks saw, by family."""
    directory = tmp_path_factory.mktemp("families")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(STAGES):
        command = [sys.executable, "-m", "tests.unit.family_rank", str(rank), str(STAGES), str(directory)]
        with (directory / f"log{rank}").open("w") as log:
            root = Path(__file__).parents[2]
            processes.append(subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            code = process.wait(200)
            assert code == 0, (directory / f"log{rank}").read_text()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(STAGES)]


@pytest.mark.parametrize("family", OVER_RANKS)
def test_three_ranks_train_like_one_through_outer_steps_and_a_resume(
    family: str, over_ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    losses = [of_rank[family]["losses"] for of_rank in over_ranks]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] == pytest.approx(train(family, 0, 1, tmp_path)["losses"], rel=1e-5)


@pytest.mark.parametrize("family", sorted(TIED))
def test_both_ends_of_a_tied_embedding_stay_equal_in_bits(
    family: str, over_ranks: list[dict[str, Any]]
) -> None:
    """Field report G4."""
    for of_rank in over_ranks:
        assert of_rank[family]["equal"] == [True] * 6
