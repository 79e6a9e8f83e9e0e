"""The two programs as people start them: real processes on loopback, found by what is installed."""

import contextlib
import importlib.metadata
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from p2p_dilocox.swarm.process import die_with_parent

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
RUN = """
[run]
id = "tiny"
outer_steps = {outer_steps}
[model]
stages = 2
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true
[data]
seq_len = 16
[inner]
H = {H}
batch_size = 2
microbatches = 2
lr = 1e-2
[compression]
lowrank = 4
[deadlines]
round_s = 20.0
[eval]
batches = 2
"""


def command(name: str) -> click.Group:
    """What the console script `name` runs."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    group = entry.load()
    assert isinstance(group, click.Group)
    return group


class Program:
    """`name` with arguments as a process; its output, both streams in one, is kept in `output`."""

    def __init__(
        self,
        name: str,
        *arguments: str | Path,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        """prefix: what is put before the command. environment: added to ours."""
        self.output = ""
        self.process = subprocess.Popen(
            [*prefix, Path(sys.executable).with_name(name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=die_with_parent,
        )

    def read_until(self, text: str) -> str:
        """The first line with `text` in it. Fails if the program ends before it prints one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return line.rstrip("\n")
        pytest.fail(f"ended with {self.process.wait()} and never said {text!r}:\n{self.output}")

    def wait(self, timeout_s: float = 60.0) -> int:
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.output += rest
        return self.process.returncode

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, its workers and their p2pd too, as when a machine loses power."""
        for pid in [*self.descendants(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def descendants(self) -> dict[int, list[str]]:
        """Command lines of all living children and their children, by pid."""
        found: dict[int, list[str]] = {}
        parents = [self.process.pid]
        while parents:
            children = [pid for parent in parents for pid in _children(parent)]
            found |= {pid: _command_line(pid) for pid in children}
            parents = children
        return found


def wait_for_end(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until the kernel says that the processes, no children of ours, have ended. Those that have not."""
    open_ended: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                open_ended[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
        while open_ended:
            ready = poll.poll(timeout_s * 1000)
            if not ready:
                break
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                del open_ended[descriptor]
    return list(open_ended.values())


def _children(pid: int) -> list[int]:
    """Of all threads of `pid`."""
    with contextlib.suppress(OSError):
        return [
            int(child)
            for file in Path(f"/proc/{pid}/task").glob("*/children")
            for child in file.read_text().split()
        ]
    return []


def _command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().strip("\0").split("\0")
    return []


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Starts programs and ends them with the test, whatever became of it."""
    programs: list[Program] = []

    def start_one(name: str, *arguments: str | Path, **options: Any) -> Program:
        programs.append(Program(name, *arguments, **options))
        return programs[-1]

    yield start_one
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
        program.process.communicate()


def serve_text(start: Callable[..., Program], directory: Path, text: str) -> str:
    """Serve this run.toml from `directory`, without an archive; the join link."""
    (directory / "run.toml").write_text(text)
    options = ["--state-dir", directory / "organiser", "--listen", LOOPBACK, "--archive", "0"]
    serve = start("dilocox-bootstrap", "serve", "--run", directory / "run.toml", *options)
    return serve.read_until("dilocox://")


@pytest.fixture(scope="module")
def endless_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Join link of a served run that no test sees the end of. Clusters go on from what others left there."""
    directory = tmp_path_factory.mktemp("organiser")
    (directory / "run.toml").write_text(RUN.format(outer_steps=1_000_000, H=2))
    state = directory / "state"
    serve = Program(
        "dilocox-bootstrap",
        "serve",
        "--run",
        directory / "run.toml",
        "--state-dir",
        state,
        "--listen",
        LOOPBACK,
    )
    try:
        yield serve.read_until("dilocox://")
    finally:
        serve.send(signal.SIGINT)
        serve.wait()
