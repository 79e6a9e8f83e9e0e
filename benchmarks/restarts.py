"""Kill everything, start it again: `python -m benchmarks.restarts [--times 20] [--clusters 3] [--seed 0]`.

A bootstrap node and clusters of one process each, as people start them. All clusters and their workers are
killed (kill -9) at a random moment, and started again. Each must come back to the last outer step that its
own history says was committed, or later, and the run must go on. Prints a line per time; fails at the first
miss.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.tiny_llama import TINY_LLAMA
from p2p_dilocox.invariants import check_history, read_history

RUN = (
    """
[run]
id = "restarts"
outer_steps = 1000000
[model]
stages = 2
"""
    + TINY_LLAMA
    + """\
max_position_embeddings = 64
tie_word_embeddings = true
[data]
seq_len = 32
[inner]
H = 8
batch_size = 2
microbatches = 2
lr = 1e-3
[compression]
lowrank = 8
[checkpoint]
every = 5
[deadlines]
round_s = 20.0
[eval]
every = 1000
batches = 1
"""
)
BIN = Path(sys.executable).parent


class Program:
    """Its output goes to a file; `pids` are its own and its workers'."""

    def __init__(self, log: Path, *arguments: str | Path) -> None:
        self._log, self._start = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self.process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self._log.read_bytes()[self._start :].decode(errors="replace")

    def until(self, word: str, limit_s: float = 120.0) -> str:
        """The line with `word` in it."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for line in self.text().splitlines():
                if word in line:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"no {word!r} in {self._log}:\n{self.text()[-3000:]}")

    def kill(self) -> None:
        """Its workers die with it (PR_SET_PDEATHSIG)."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def committed(state: Path) -> int:
    lines = read_history(sorted((state / "history").glob("*.jsonl")))
    return max((int(line["t"]) for line in lines if line["decision"] != "dropped"), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--clusters", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        (where / "run.toml").write_text(RUN)
        boot = Program(
            where / "boot.log", BIN / "dilocox-bootstrap", "serve", "--run", where / "run.toml",
            "--state-dir", where / "boot", "--listen", "/ip4/127.0.0.1/tcp/0", "--archive", "0",
        )  # fmt: skip
        link = boot.until("dilocox://").strip()
        states = [where / f"cluster-{n}" for n in range(options.clusters)]
        running: list[Program] = []
        try:
            for number in range(options.times + 1):
                before = [committed(state) for state in states]
                running = [
                    Program(
                        where / f"{state.name}.log", BIN / "dilocox-peer", "join", link, "--state-dir", state,
                        "--devices", "cpu:1", "--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0",
                    )
                    for state in states
                ]  # fmt: skip
                if number:
                    said = [program.until("resumed outer step") for program in running]
                    resumed = [int(line.split("outer step ")[1].split(",")[0]) for line in said]
                    print(json.dumps({"time": number, "committed": before, "resumed": resumed}), flush=True)
                    if any(r < b for r, b in zip(resumed, before, strict=True)):
                        raise SystemExit("an outer step that was committed is lost")
                for program in running:
                    program.until("committed", 180.0)
                time.sleep(dice.uniform(0.0, 5.0))
                for program in running:
                    program.kill()
            files = [f for state in states for f in sorted((state / "history").glob("*.jsonl"))]
            violations = check_history(read_history(files))
            print(f"{options.times} times resumed, {len(violations)} violations", *violations, sep="\n")
        finally:
            for program in [*running, boot]:
                if program.process.poll() is None:
                    program.kill()
    if violations:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
