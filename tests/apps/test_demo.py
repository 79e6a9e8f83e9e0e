"""The demo, whole: a bootstrap node and two clusters of two ranks, on a smaller model."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from .conftest import RUN, Program, wait_for_end

pytestmark = pytest.mark.swarm
Start = Callable[..., Program]


@pytest.mark.timeout(300)
def test_the_demo_shows_what_it_promises_and_leaves_nothing_running(tmp_path: Path, start: Start) -> None:
    (tmp_path / "run.toml").write_text(
        RUN.format(outer_steps=4, H=10).replace('"tiny"', '"tiny"\nmin_clusters = 2')
    )
    out = tmp_path / "demo"
    demo = start("dilocox-peer", "demo", "--run", tmp_path / "run.toml", "--out", out)
    demo.read_until("cluster-b  outer 2 committed  2 clusters")
    pids = list(demo.descendants())
    assert demo.wait(timeout_s=200) == 0, demo.output
    assert wait_for_end(pids, 0) == []

    summary = json.loads((out / "summary.json").read_text())
    assert summary["outer_steps"] == 4
    assert summary["val_loss_last"] < summary["val_loss_first"]
    assert summary["exported_val_loss"] == pytest.approx(summary["val_loss_last"], abs=1e-3)
    a, b = summary["parameter_digests"]["cluster-a"], summary["parameter_digests"]["cluster-b"]
    assert a == b
    assert sorted(a) == ["0", "1"]
    assert summary["bytes_sent_per_outer_step"] == pytest.approx(
        summary["bytes_predicted_per_outer_step"], rel=0.1
    )
    assert summary["fp16_bytes_per_outer_step"] == 2 * summary["parameters"]
    assert summary["traffic_factor_local_steps"] == 10
    assert 0 < summary["compute_utilisation"] <= 1
    assert {"unigram_loss", "seconds"} <= set(summary)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    AutoModelForCausalLM.from_pretrained(out / "model")
    assert (out / "cluster-a" / "history" / "rank0.jsonl").exists()

    again = start("dilocox-peer", "demo", "--run", tmp_path / "run.toml", "--out", out)
    again.read_until("cluster-a  connecting")
    assert not (out / "summary.json").exists()  # the earlier demo was replaced
    pids = list(again.descendants())
    again.send(signal.SIGINT)
    assert again.wait(timeout_s=25) == 130
    assert wait_for_end(pids, 0) == []
