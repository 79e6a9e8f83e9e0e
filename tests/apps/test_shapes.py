"""Clusters of every shape in one run: each with its own number of ranks and its own schedule."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_dilocox.invariants import check_history, read_history

from .conftest import LOOPBACK, RUN, Program, serve_text

pytestmark = pytest.mark.swarm
Start = Callable[..., Program]
STEPS, STAGES = 10, 4
SHAPES = {
    "one": ["--devices", "cpu:1"],
    "two": ["--devices", "cpu:2", "--schedule", "zbv", "--microbatches", "2"],
    "four": ["--devices", "cpu:4", "--schedule", "interleaved-zero-bubble"],
}
"""With zbv the first and the last stage are in one process, and a process holds no consecutive stages."""


def serve(start: Start, directory: Path) -> str:
    text = RUN.format(outer_steps=STEPS, H=2).replace("stages = 2", f"stages = {STAGES}")
    # Embedding and head are stages without a layer: the cluster of four has a rank for each.
    text = text.replace("num_hidden_layers = 2", "num_hidden_layers = 3")
    text = text.replace(f"stages = {STAGES}", f"stages = {STAGES}\ncut = [0, 2, 1, 0]")
    text = text.replace("batch_size = 2\nmicrobatches = 2", "batch_size = 4\nmicrobatches = 4")
    text = text.replace("[model]", "min_clusters = 3\n[model]", 1)
    return serve_text(start, directory, text)


def digests_of(state: Path) -> dict[str, str]:
    """Stage -> digest of its anchor at the end, from all ranks of a cluster."""
    found: dict[str, str] = {}
    for line in (state / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "finished":
            assert event["t"] == STEPS
            assert not found.keys() & event["parameter_digests"].keys(), "two ranks hold one stage"
            found |= event["parameter_digests"]
    return found


@pytest.mark.timeout(400)
def test_clusters_of_1_2_and_4_ranks_end_with_equal_stages(tmp_path: Path, start: Start) -> None:
    link = serve(start, tmp_path)
    refused = start("dilocox-peer", "join", link, "--devices", "cpu:3", "--schedule", "zbv",
                    "--state-dir", tmp_path / "three")  # fmt: skip
    assert refused.wait() == 2
    assert 'schedule = "zbv" needs 2 stages per process, 6 for 3; this run has 4' in refused.output
    clusters = {
        name: start("dilocox-peer", "join", link, "--threads", "1", "--listen", LOOPBACK,
                    "--state-dir", tmp_path / name, *options)
        for name, options in SHAPES.items()
    }  # fmt: skip
    for name, cluster in clusters.items():
        assert cluster.wait(300) == 0, f"{name}: {cluster.output}"
    digests = {name: digests_of(tmp_path / name) for name in SHAPES}
    assert sorted(digests["one"]) == [str(stage) for stage in range(STAGES)]
    assert digests["one"] == digests["two"] == digests["four"]
    history = read_history(path for name in SHAPES for path in (tmp_path / name / "history").glob("*.jsonl"))
    assert check_history(history) == []
    assert {len(line["members"]) for line in history if line["decision"] == "committed"} == {3}
