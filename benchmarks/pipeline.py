"""The pipeline of a cluster: speed against the model in one piece, bubble and memory against the plan.

    python -m benchmarks.pipeline [--only PART] [--quick] [--json] [--save]

bubble   stages that sleep instead of computing, over real gloo processes: the schedule and its messages
         alone, however many cores there are. Idle time of a rank, against (S - 1) / (m + S - 1).
speed    tokens per second of one model over 2 ranks with 1 thread each, and uncut in one process with 1 and
         2 threads, in turns; medians.
memory-1, memory-2
         peak resident memory of every rank of two clusters in real runs over loopback (`dilocox-peer demo`)
         with 1 and 2 ranks each, against `dilocox-peer plan`; the higher one of the clusters.
gpu      where there is CUDA: a Llama of 1.2 billion parameters, ours against plain PyTorch, tokens per
         second, MFU against --flops, and peak memory against plan.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.memory import all_ranks
from p2p_dilocox.plan.model import PlannedModel
from p2p_dilocox.plan.speed import bubble_share, flops_per_token
from p2p_dilocox.runspec import parse_run

RESULTS = Path(__file__).parent / "results" / "pipeline.json"
ROOT = Path(__file__).parents[1]
DEADLINE_S = 900.0
Row = dict[str, Any]

RUN = """
[run]
id = "bench"
outer_steps = {outer_steps}
min_clusters = 2
[model]
stages = {stages}
[model.config]
model_type = "llama"
vocab_size = {vocabulary}
hidden_size = {width}
intermediate_size = {inner}
num_hidden_layers = {layers}
num_attention_heads = 8
num_key_value_heads = {kv}
max_position_embeddings = {seq_len}
tie_word_embeddings = true
bos_token_id = 0
eos_token_id = 0
[data]
seq_len = {seq_len}
[inner]
H = 1
batch_size = {batch}
microbatches = {microbatches}
lr = 1e-4
[compression]
lowrank = {lowrank}
[deadlines]
round_s = 300
[checkpoint]
every = {every}
[eval]
batches = 1
"""


def run_text(*, width: int, layers: int, batch: int, microbatches: int, **more: int) -> str:
    values = {
        "outer_steps": 2, "vocabulary": 8192, "kv": 8, "seq_len": 128, "inner": 8 * width // 3 // 16 * 16,
        "lowrank": width // 4, "stages": 2, "every": 1000,
    } | more  # fmt: skip
    return RUN.format(width=width, layers=layers, batch=batch, microbatches=microbatches, **values)


def ranks(kind: str, count: int, threads: int = 1, **config: Any) -> list[Row]:
    """What each of `count` processes of benchmarks/ranks/pipeline.py found."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that spin for each other starve on shared cores
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps({"kind": kind, "ranks": count, "threads": threads, **config}))
        command = [sys.executable, "-m", "benchmarks.ranks.pipeline", str(path)]
        processes = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment) for rank in range(count)
        ]
        try:
            deadline = time.monotonic() + DEADLINE_S
            for process in processes:
                if process.wait(max(0.1, deadline - time.monotonic())):
                    raise RuntimeError(f"a rank of {kind} ended with {process.returncode}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(count)]


def bubbles(*, quick: bool) -> list[Row]:
    cases = [("1f1b", 2, 4), ("1f1b", 2, 8), ("1f1b", 4, 8), ("1f1b", 4, 16), ("gpipe", 4, 8)]
    cases, rows = [("1f1b", 2, 4)] if quick else cases, []
    for schedule, count, microbatches in cases:
        found = ranks(
            "bubble", count, schedule=schedule, microbatches=microbatches, forward_s=0.04, backward_s=0.08,
            steps=2 if quick else 5,
        )  # fmt: skip
        idle = statistics.mean(row["idle"] for row in found)
        theory = bubble_share(schedule, count, microbatches)
        rows.append(
            {"schedule": schedule, "ranks": count, "microbatches": microbatches, "idle": round(idle, 4),
             "theory": round(theory, 4)}
        )  # fmt: skip
    return rows


def speeds(*, quick: bool) -> list[Row]:
    """Each set-up several times in turns, since other programs share the cores."""
    size = {"width": 256, "layers": 4} if quick else {"width": 384, "layers": 8}
    setups = {
        "2 ranks, 1 thread each, 8 microbatches": (2, 1, 8),
        "1 process, 2 threads, 8 microbatches": (1, 2, 8),
        "1 process, 2 threads, 1 microbatch": (1, 2, 1),
        "1 process, 1 thread, 8 microbatches": (1, 1, 8),
    }
    found: dict[str, list[float]] = {name: [] for name in setups}
    for _ in range(1 if quick else 3):
        for name, (count, threads, microbatches) in setups.items():
            text = run_text(**size, batch=8, microbatches=microbatches, vocabulary=2048)
            rows = ranks(
                "train", count, threads, run=text, device="cpu", outer=False, steps=2 if quick else 4
            )
            found[name].append(min(row["tokens_per_s"] for row in rows))
    return [
        {"what": name, "tokens_per_s": round(statistics.median(rates)), "of": [round(r) for r in rates]}
        for name, rates in found.items()
    ]


def memory(count: int, *, quick: bool) -> list[Row]:
    """Of whole runs with `count` ranks per cluster. Every outer step saves a checkpoint, so one is written
    while the next steps train and average, as a plan has it."""
    sizes = [
        {"width": 768, "layers": 8, "batch": 4, "microbatches": 2, "seq_len": 64, "lowrank": 64},
        {"width": 1024, "layers": 4, "batch": 4, "microbatches": 2, "vocabulary": 16384, "lowrank": 0},
        {"width": 512, "layers": 4, "batch": 8, "microbatches": 2, "vocabulary": 16384, "seq_len": 256},
    ]  # fmt: skip
    rows = []
    for size in sizes[:1] if quick else sizes:
        text = run_text(**size, outer_steps=3, stages=count, every=1)
        spec = parse_run(text)
        model = PlannedModel(spec)
        planned = all_ranks(spec, model, Cluster(count, "cpu"), 2)
        for rank, (peak, plan) in enumerate(zip(_peaks(text), planned, strict=True)):
            expected = plan.total("host")
            rows.append(
                {"parameters_M": round(model.tensors.num_parameters / 1e6), "ranks": count, "rank": rank,
                 "peak_MB": round(peak / 1e6), "plan_MB": round(expected / 1e6),
                 "peak_over_plan": round(peak / expected, 3)}
            )  # fmt: skip
    return rows


def _peaks(text: str) -> list[float]:
    """Peak resident bytes of rank 0 and 1, the larger of both clusters, in a whole run."""
    found: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        run, out = Path(directory) / "run.toml", Path(directory) / "out"
        run.write_text(text)
        command = [sys.executable, "-m", "p2p_dilocox.peers", "demo", "--run", str(run), "--out", str(out)]
        with (Path(directory) / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < deadline:
                for rank, peak in _resident(out):
                    found[rank] = max(peak, found.get(rank, 0))
                time.sleep(0.1)
            if process.wait(0.1):
                raise RuntimeError((Path(directory) / "log").read_text()[-2000:])
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [float(found[rank]) for rank in sorted(found)]


def _resident(out: Path) -> list[tuple[int, int]]:
    """(rank, peak bytes so far) of the workers whose state is under `out`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError):
            words = (status.parent / "cmdline").read_bytes().decode().split("\0")
            config = words[words.index("--config") + 1] if "p2p_dilocox.peers.worker" in words else ""
            if config.startswith(str(out)):
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
                rank = int(Path(config).stem.removeprefix("worker-rank"))
                found.append((rank, 1024 * int(lines["VmHWM"].split()[0])))
    return found


def gpu(flops: float) -> list[Row]:
    """Not run where there is no CUDA."""
    text = run_text(
        width=2048, layers=16, batch=32, microbatches=8, vocabulary=128256, inner=8192, kv=2, seq_len=2048
    )
    spec = parse_run(text)
    model, cluster = PlannedModel(spec), Cluster(1, "cuda")
    planned = all_ranks(spec, model, cluster, 2)[0]
    # No round runs here.
    parts = ("averaging: factors", "averaging: factorising", "libraries", "at other moments")
    expected = sum(r.bytes for r in planned.rows if r.where == "device" and r.name not in parts)
    rows = []
    for kind in ("train", "plain"):
        (found,) = ranks(kind, 1, run=text, device="cuda:0", outer=True, steps=20)
        mfu = found["tokens_per_s"] * flops_per_token(spec, model) / flops
        row = {"what": kind, "tokens_per_s": round(found["tokens_per_s"]), "mfu": round(mfu, 4),
               "peak_bytes": found["peak_bytes"]}  # fmt: skip
        rows.append(
            row | ({"peak_over_plan": round(found["peak_bytes"] / expected, 3)} if kind == "train" else {})
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small case of each, once")
    parser.add_argument("--only", choices=("bubble", "speed", "memory-1", "memory-2", "gpu"))
    parser.add_argument("--flops", type=float, default=312e12, help="the GPU's bf16 peak, for MFU")
    parser.add_argument("--json", action="store_true")
    where = RESULTS.relative_to(ROOT)
    parser.add_argument("--save", action="store_true", help=f"write what was measured to {where}")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    parts: dict[str, Callable[[], list[Row]]] = {
        "bubble": lambda: bubbles(quick=quick),
        "speed": lambda: speeds(quick=quick),
        "memory-1": lambda: memory(1, quick=quick),
        "memory-2": lambda: memory(2, quick=quick),
        "gpu": lambda: gpu(arguments.flops) if torch.cuda.is_available() else [{"not run": "no CUDA here"}],
    }
    machine = {
        "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    record: Row = json.loads(RESULTS.read_text()) if arguments.save and RESULTS.exists() else {}
    for name, measure in parts.items():
        if arguments.only in (None, name):
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            load = round(os.getloadavg()[0], 1)  # of other programs, in the minute before
            record[name] = {"date": date, "machine": machine | {"load": load}, "rows": measure()}
            for row in record[name]["rows"] if not arguments.json else []:
                print(f"{name:8}", "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if arguments.save:
                RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
