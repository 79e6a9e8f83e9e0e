"""The demo: a bootstrap node and a few clusters, each a program of its own, train a small model here."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from p2p_dilocox.errors import ClusterError, SpecError, StateError
from p2p_dilocox.events import event_from_dict
from p2p_dilocox.program import printable
from p2p_dilocox.runspec import RunSpec, parse_run, read_run_text
from p2p_dilocox.state_dir import locked_state_dir, write_atomic
from p2p_dilocox.swarm.process import die_with_parent

from .display import Display, LiveDisplay, PlainDisplay
from .progress import Progress
from .view import DemoView, console

__all__ = ["Cluster", "Host", "cluster_name", "run_demo", "train_clusters"]

_MARKER = ".made-by-dilocox-demo"
_LINK_S = 90.0
_SILENCE_S = 180.0  # a cluster that reports nothing for so long has failed,
_PATIENCE = 5  # or for so many deadlines: its own last one, of its ranks for each other, is four of them
_MOST_PAUSE_S = 5.0  # between two looks, while this machine runs
_END_S = 12.0  # a program that was told to end gets this long; each promises 10 s
_TICK_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(Exception):  # noqa: N818 (no error: how a signal ends the demo)
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclass(frozen=True)
class Host:
    """Where a program runs. prefix: what is put before its command."""

    address: str
    prefix: Sequence[str] = ()


class _Program:
    """A child process in a process group of its own, with its output in a file."""

    def __init__(self, name: str, host: Host, arguments: Sequence[str], log: Path) -> None:
        self.name, self.log = name, log
        listen = ["--listen", f"/ip4/{host.address}/tcp/0"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*host.prefix, sys.executable, "-P", "-m", *arguments, *listen],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                process_group=0, preexec_fn=die_with_parent,
            )  # fmt: skip

    def check(self) -> bool:
        """True while it runs, False once it has ended well; ClusterError with its last words otherwise."""
        status = self.process.poll()
        if status is None or status == 0:
            return status is None
        words = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise ClusterError(
            f"{self.name} ended with status {status}. The last lines of {self.log}:"
            + "".join(f"\n  {printable(line, 300)}" for line in words)
        )

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for the end; afterwards kill. Its own children die with it."""
        try:
            self.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Cluster:
    """A `dilocox-peer join` and what its events tell."""

    def __init__(self, name: str, state: Path, spec: RunSpec, num_ranks: int, program: _Program) -> None:
        self.state, self.program = state, program
        self.progress = Progress(
            run_id=spec.run.id, cluster_id="", name=name, recipe=spec.run.recipe,
            num_ranks=num_ranks, outer_steps=spec.run.outer_steps,
        )  # fmt: skip
        self._offset, self._silent_s = 0, 0.0
        self._limit_s = max(_SILENCE_S, _PATIENCE * spec.deadlines.round_s)
        self._looked = time.monotonic()

    def follow(self, display: Display) -> None:
        """Take the whole lines that its events.jsonl has grown by. ClusterError after a long silence."""
        data = b""
        with contextlib.suppress(FileNotFoundError), (self.state / "events.jsonl").open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = event_from_dict(json.loads(line))
            display.event(self.progress, event, self.progress.add(event))
        # A machine that slept, or was stopped with all programs on it, jumps: nobody was silent meanwhile.
        self._silent_s += min(time.monotonic() - self._looked, _MOST_PAUSE_S)
        self._looked = time.monotonic()
        if whole:
            self._silent_s = 0.0
        elif self._silent_s > self._limit_s and self.program.process.poll() is None:
            logs = self.state / "logs"
            raise ClusterError(f"{self.progress.name} reports nothing for {self._limit_s:.0f} s. See {logs}.")


def cluster_name(number: int) -> str:
    """Of the number-th cluster, from 0: it is called so, and so is its state directory."""
    return f"cluster-{chr(ord('a') + number)}"


def run_demo(out: Path, *, run: str, num_clusters: int) -> int:
    """Train `run` with clusters of up to two processes each, and report in `out`. Returns the exit code.

    An earlier demo in `out` is replaced; any other directory that is not empty is refused (StateError). No
    process stays, however this ends. Raises ClusterError if a program fails or the demo does not show what it
    should.
    """
    started = time.monotonic()
    spec = parse_run(read_run_text(run), name=run)
    if num_clusters < spec.run.min_clusters:
        raise SpecError(
            f"--clusters {num_clusters}: this run waits for {spec.run.min_clusters} (run.min_clusters). "
            f"Give --clusters {spec.run.min_clusters} or more."
        )
    num_ranks = min(2, spec.model.stages)
    hosts = [Host("127.0.0.1")] * (num_clusters + 1)
    clusters: Sequence[Cluster] = []
    with _demo_dir(out) as out:
        click.echo("starting a bootstrap node")
        try:
            with _signals() as signals, contextlib.ExitStack() as stack:
                displays = None
                for clusters in stack.enter_context(
                    contextlib.closing(train_clusters(out, run, spec, hosts, num_ranks, signals))
                ):
                    displays = displays or stack.enter_context(contextlib.closing(_Displays(clusters)))
                    displays.follow()
        except _Interrupted as interrupted:
            return 128 + interrupted.number
        click.echo("exporting and checking the model")
        if not any(cluster.progress.rounds for cluster in clusters):
            raise ClusterError(f"the clusters ended without an outer step. See their logs in {out}.")
        from .demo_report import problems, report_demo, summary_table

        summary = report_demo(
            out, [c.progress for c in clusters], [c.state for c in clusters], time.monotonic() - started
        )
        console().print(summary_table(summary))
        click.echo(f"in {out}: summary.json, loss.png, model/, and a state directory per cluster")
        if failed := problems(summary):
            raise ClusterError("the demo failed: " + "; ".join(failed))
    return 0


def train_clusters(
    out: Path, run: str, spec: RunSpec, hosts: Sequence[Host], num_ranks: int, signals: list[int]
) -> Generator[Sequence[Cluster], None, None]:
    """A bootstrap node on the first host and a cluster of num_ranks processes on each other one, from start
    to end: hands out the clusters every 0.1 s. run: a file, or a shipped name. What they write is in `out`.

    Raises _Interrupted once there is a signal in `signals`, and ClusterError. However it ends, no program
    stays.
    """
    programs: list[_Program] = []
    try:
        arguments = ["serve", "--run", run, "--state-dir", str(out / "bootstrap"), "--archive", "0"]
        bootstrap = _Program(
            "the bootstrap node", hosts[0], ["p2p_dilocox.bootstrap", *arguments], out / "bootstrap.log"
        )
        programs.append(bootstrap)
        link = _wait_for_link(bootstrap, out / "bootstrap" / "join-link", signals)
        threads = max(1, len(os.sched_getaffinity(0)) // (num_ranks * (len(hosts) - 1)))
        clusters = []
        for number, host in enumerate(hosts[1:]):
            name = cluster_name(number)
            program = _Program(
                name, host,
                ["p2p_dilocox.peers", "join", link, "--state-dir", str(out / name), "--name", name,
                 "--devices", f"cpu:{num_ranks}", "--threads", str(threads)],
                out / f"{name}.log",
            )  # fmt: skip
            programs.append(program)
            clusters.append(Cluster(name, out / name, spec, num_ranks, program))
        running = True
        while running:
            _raise_if_interrupted(signals)
            bootstrap.check()
            running = sum(cluster.program.check() for cluster in clusters) > 0
            yield clusters
            time.sleep(_TICK_S)
    finally:
        _end(programs, signals)


class _Displays:
    """One live view of all clusters on a terminal, else lines that start with the cluster's name."""

    def __init__(self, clusters: Sequence[Cluster]) -> None:
        self._clusters = clusters
        screen = console()
        self._display: Display | None = None
        if screen.is_terminal:
            self._display = LiveDisplay(screen, DemoView([c.progress for c in clusters]))
            self._each: list[Display] = [self._display] * len(clusters)
        else:
            self._each = [PlainDisplay(prefix=f"{c.progress.name}  ") for c in clusters]

    def follow(self) -> None:
        for cluster, display in zip(self._clusters, self._each, strict=True):
            cluster.follow(display)
            display.tick()

    def close(self) -> None:
        if self._display is not None:
            self._display.close()


def _wait_for_link(bootstrap: _Program, file: Path, signals: list[int]) -> str:
    deadline = time.monotonic() + _LINK_S
    while not file.exists():
        _raise_if_interrupted(signals)
        if not bootstrap.check():
            raise ClusterError(f"the bootstrap node ended before it had a join link. See {bootstrap.log}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the bootstrap node has no join link after {_LINK_S:.0f} s. See {bootstrap.log}"
            )
        time.sleep(_TICK_S)
    return file.read_text(encoding="utf-8").strip()


def _end(programs: Sequence[_Program], signals: list[int]) -> None:
    """End the clusters, then the bootstrap node. A second signal kills what is left at once."""
    if signals:
        click.echo("ending the programs; once more to kill")
    for group in (programs[1:], programs[:1]):
        for program in group:
            program.interrupt()
        deadline = time.monotonic() + _END_S
        for program in group:
            while program.process.poll() is None and time.monotonic() < deadline and len(signals) < 2:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.process.wait(_TICK_S)
            program.wait(0.0)


def _raise_if_interrupted(signals: list[int]) -> None:
    if signals:
        raise _Interrupted(signals[0])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The numbers of the signals that came, in order, while inside."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _demo_dir(out: Path) -> Iterator[Path]:
    """`out`, empty but for its lock and a marker. Raises StateError rather than delete what no demo made."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / _MARKER).is_file())):
        raise StateError(
            f"{out} is not empty and not from an earlier demo; nothing was deleted. Give another --out."
        )
    with locked_state_dir(out) as directory:
        write_atomic(directory / _MARKER, "dilocox-peer demo replaces this directory\n")
        for path in directory.iterdir():
            if path.name in (_MARKER, "lock"):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        yield directory
