"""The demo, whole: a bootstrap node and two clusters of two ranks, on a smaller model."""

import importlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from p2p_dilocox.errors import ClusterError
from p2p_dilocox.runspec import parse_run

from .conftest import RUN, Program, wait_for_end

demo = importlib.import_module("p2p_dilocox.peers.demo")

pytestmark = pytest.mark.swarm
Start = Callable[..., Program]


@pytest.mark.timeout(300)
def test_the_demo_shows_what_it_promises_and_leaves_nothing_running(tmp_path: Path, start: Start) -> None:
    (tmp_path / "run.toml").write_text(
        RUN.format(outer_steps=4, H=10).replace('"tiny"', '"tiny"\nmin_clusters = 2')
    )
    out = tmp_path / "demo"
    program = start("dilocox-peer", "demo", "--run", tmp_path / "run.toml", "--out", out)
    program.read_until("cluster-b  outer 2 committed  2 clusters")
    pids = list(program.descendants())
    assert program.wait(timeout_s=200) == 0, program.output
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


def test_a_machine_that_slept_is_no_cluster_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    running = SimpleNamespace(process=SimpleNamespace(poll=lambda: None))
    cluster = demo.Cluster("a", tmp_path, parse_run(RUN.format(outer_steps=1, H=1)), 1, running)
    for slept_s in (0.1, 3600.0, 0.1, 170.0):
        now[0] += slept_s
        cluster.follow(None)
    with pytest.raises(ClusterError, match="a reports nothing for 180 s"):
        while True:
            now[0] += 1.0
            cluster.follow(None)
    assert 3600 + 170 + 160 < now[0] < 3600 + 170 + 190
