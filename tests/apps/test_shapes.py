"""Clusters of every shape in one run: each with its own number of ranks and its own schedule."""

import contextlib
import importlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

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


def exported(state: Path, out: Path) -> dict[str, Tensor]:
    """Parameters of what from_pretrained makes of a cluster's last checkpoint."""
    importlib.import_module("p2p_dilocox.peers.export").export_newest(state, out)
    answer: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, info = answer
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.named_parameters())


@pytest.mark.timeout(400)
def test_clusters_of_1_2_and_4_ranks_end_with_equal_stages(tmp_path: Path, start: Start) -> None:
    """Field report G7: they start at the same instant, on one machine where torch's usual port is taken."""
    link = serve(start, tmp_path)
    refused = start("dilocox-peer", "join", link, "--devices", "cpu:3", "--schedule", "zbv",
                    "--state-dir", tmp_path / "three")  # fmt: skip
    assert refused.wait() == 2
    assert 'schedule = "zbv" needs 2 stages per process, 6 for 3; this run has 4' in refused.output
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then somebody else has it
            stack.enter_context(socket.create_server(("127.0.0.1", 29500)))
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
    one, four = (exported(tmp_path / name, tmp_path / f"model-{name}") for name in ("one", "four"))
    assert one.keys() == four.keys() and all(torch.equal(one[name], four[name]) for name in one)
    history = read_history(path for name in SHAPES for path in (tmp_path / name / "history").glob("*.jsonl"))
    assert check_history(history) == []
    assert {len(line["members"]) for line in history if line["decision"] == "committed"} == {3}
