"""One per cluster: starts a process per rank, hears their events, passes commands on, and ends them all.

One thread and one selector: a rank dies with the thread that started it (PR_SET_PDEATHSIG), so that thread
must be the one that stays.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from p2p_dilocox.errors import ClusterError
from p2p_dilocox.events import Event, Warned, event_from_dict
from p2p_dilocox.program import printable
from p2p_dilocox.sinks import JsonlSink
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.process import die_with_parent

from .control import SOCKET_NAME, bind_control
from .display import Display
from .progress import Progress

__all__ = ["Outcome", "Supervisor"]

_TICK_S = 0.1
_STATUS_S = 1.0
_NOW_S = 8.0  # to leave at once: a rank that takes longer is killed
_FAILED_S = 4.0  # the same, after another rank failed: its ranks wait for a process that is gone
_MAX_LINE_BYTES = 1 << 20
_LOG_TAIL_LINES = 8
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """reason: complete, left, or interrupted by signal number `signal`."""

    reason: str
    signal: int = 0

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    log: Path
    log_start: int  # where the lines of this start begin
    buffer: bytearray = field(default_factory=bytearray)
    ended: bool = False


class Supervisor:
    """Made for one start of a cluster; `run` returns when every rank has ended.

    workers: a config per rank, see worker.py; written to STATE/worker-rank<r>.json, mode 0600.
    leave_s: seconds that a rank may take to finish its round when it is asked to leave.
    """

    def __init__(
        self,
        state: Path,
        workers: Sequence[dict[str, Any]],
        progress: Progress,
        display: Display,
        *,
        leave_s: float,
    ) -> None:
        self._state = state
        self._workers = workers
        self._progress = progress
        self._display = display
        self._leave_s = leave_s
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._clients: dict[socket.socket, bytearray] = {}
        self._signals: list[int] = []
        self._interrupted = 0
        self._failed: tuple[_Rank, int] | None = None
        self._stopping: Literal["no", "leave", "now", "killed"] = "no"
        self._deadline = float("inf")
        self._next_status = 0.0

    def run(self) -> Outcome:
        """Start the ranks and stay until the last has ended.

        SIGINT, SIGTERM and SIGHUP leave the run without waiting for a round; a second one kills.
        Raises ClusterError, naming rank, exit status and last log lines, if a rank fails.
        """
        with contextlib.ExitStack() as stack:
            self._events = JsonlSink(self._state / "events.jsonl")
            stack.callback(self._events.close)
            stack.callback(self._selector.close)
            server = stack.enter_context(bind_control(self._state))
            stack.callback((self._state / SOCKET_NAME).unlink, missing_ok=True)
            self._selector.register(server, selectors.EVENT_READ)
            for number in _SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            stack.callback(self._end_all)
            for config in self._workers:
                self._ranks.append(self._start(config))
            while not all(rank.ended for rank in self._ranks):
                self._step(server)
            outcome = self._outcome()
            self._write_status()
            self._dismiss_clients(outcome)
        if self._failed is not None:
            raise ClusterError(self._failure(*self._failed))
        return outcome

    def _start(self, config: dict[str, Any]) -> _Rank:
        number = int(config["rank"])
        path = self._state / f"worker-rank{number}.json"
        write_atomic(path, json.dumps(config), mode=0o600)
        log = self._state / "logs" / f"rank{number}.log"
        log.parent.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2p_dilocox.peers.worker", "--config", str(path),
                 "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C on the terminal reaches the supervisor alone
                preexec_fn=die_with_parent,
            )  # fmt: skip
            log_start = output.tell()
        ours.setblocking(False)
        rank = _Rank(number, process, ours, log, log_start)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        return rank

    def _step(self, server: socket.socket) -> None:
        for key, _ in self._selector.select(_TICK_S):
            if isinstance(key.data, _Rank):
                self._hear(key.data)
            elif key.fileobj is server:
                self._accept(server)
            elif isinstance(key.fileobj, socket.socket):
                self._serve(key.fileobj)
        while self._signals:
            self._interrupt(self._signals.pop(0))
        for rank in self._ranks:
            if not rank.ended and rank.process.poll() is not None:
                self._reap(rank)
        if time.monotonic() > self._deadline:
            self._escalate()
        if time.monotonic() > self._next_status:
            self._next_status = time.monotonic() + _STATUS_S
            self._write_status()
        self._display.tick()

    # Ranks

    def _hear(self, rank: _Rank) -> bool:
        """Take what a rank has written; False once there is nothing more to read now."""
        try:
            data = rank.channel.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(rank.channel)
            return False
        rank.buffer += data
        *lines, rest = rank.buffer.split(b"\n")
        rank.buffer = rest if len(rest) < _MAX_LINE_BYTES else bytearray()
        for line in lines:
            self._take(rank, bytes(line))
        return True

    def _take(self, rank: _Rank, line: bytes) -> None:
        try:
            event = event_from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError):
            event = Warned(rank=rank.number, message=f"sent no event but {line[:80]!r}")
        self._emit(event)

    def _emit(self, event: Event) -> None:
        self._events.write(event)
        totals = self._progress.add(event)
        self._display.event(self._progress, event, totals)

    def _reap(self, rank: _Rank) -> None:
        while self._hear(rank):  # its last words
            pass
        rank.ended = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.channel)
        rank.channel.close()
        code = rank.process.returncode
        if code != 0 and self._failed is None and self._stopping in ("no", "leave"):
            self._failed = (rank, code)
            self._display.say(f"rank {rank.number} failed; ending the others")
            self._leave(now=True, within_s=_FAILED_S)

    def _leave(self, *, now: bool, within_s: float) -> None:
        self._stopping = "now" if now else "leave"
        self._deadline = time.monotonic() + within_s
        self._progress.phase, self._progress.detail = "leaving", f"for {within_s:.0f} s at most"
        command = json.dumps({"command": "leave", "now": now}).encode() + b"\n"
        for rank in self._ranks:  # they agree among themselves on the inner step after which they leave
            if not rank.ended:
                with contextlib.suppress(OSError):
                    rank.channel.send(command)

    def _escalate(self) -> None:
        if self._stopping == "leave":
            self._display.say("the round does not end; leaving without it")
            self._leave(now=True, within_s=_NOW_S)
        else:
            self._kill()

    def _kill(self) -> None:
        self._stopping, self._deadline = "killed", float("inf")
        for rank in self._ranks:
            if not rank.ended and rank.process.poll() is None:
                # The rank leads a process group of its own: this takes its p2pd along.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """At the end of `run`, also by an exception: no rank stays."""
        self._kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.channel.close()
        for path in self._state.glob("worker-rank*.json"):
            path.unlink(missing_ok=True)

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _interrupt(self, number: int) -> None:
        if self._interrupted:
            self._display.say("killed")
            self._kill()
            return
        self._interrupted = number
        if self._failed is None:
            self._display.say("leaving; once more to kill")
            self._leave(now=True, within_s=_NOW_S)

    # Control socket

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = server.accept()
            client.setblocking(False)
            self._clients[client] = bytearray()
            self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        try:
            data = client.recv(4096)
        except OSError:
            data = b""
        buffer = self._clients[client]
        buffer += data
        if not data or len(buffer) > 4096:
            self._selector.unregister(client)
            del self._clients[client]
            client.close()
        elif buffer.endswith(b"\n"):
            answer = self._answer(bytes(buffer))
            buffer.clear()
            self._send(client, answer)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            match json.loads(line):
                case {"command": "status"}:
                    return self._status()
                case {"command": "leave", **rest}:
                    now = rest.get("now") is True
                    if self._stopping == "no" or (now and self._stopping == "leave"):
                        self._display.say("asked to leave" + (" now" if now else ""))
                        self._leave(now=now, within_s=_NOW_S if now else self._leave_s)
                    return {"ok": True, "deadline_s": max(self._deadline - time.monotonic(), 0) + _NOW_S}
        except ValueError:
            pass
        return {"error": f"unknown command {printable(line.decode(errors='replace'), 80)!r}"}

    def _dismiss_clients(self, outcome: Outcome) -> None:
        for client in list(self._clients):
            self._send(client, {"ended": "failed" if self._failed else outcome.reason})
            client.close()

    @staticmethod
    def _send(client: socket.socket, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            client.sendall(json.dumps(answer).encode() + b"\n")

    # Reports

    def _status(self) -> dict[str, Any]:
        return {**self._progress.to_dict(), "pid": os.getpid(), "time": time.time()}

    def _write_status(self) -> None:
        write_atomic(self._state / "status.json", json.dumps(self._status()) + "\n")

    def _outcome(self) -> Outcome:
        if self._interrupted:
            return Outcome(reason="interrupted", signal=self._interrupted)
        reasons = self._progress.finished
        if self._failed is None and self._stopping == "no" and reasons.get(0) != "complete":
            self._failed = (self._ranks[0], self._ranks[0].process.returncode)
        return Outcome(reason="left" if self._stopping != "no" else reasons.get(0, "failed"))

    def _failure(self, rank: _Rank, code: int) -> str:
        status = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        with rank.log.open("rb") as log:
            log.seek(rank.log_start)
            tail = log.read()[-8192:].decode(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
        words = "".join(f"\n  {printable(line, 300)}" for line in tail) or " (its log is empty)"
        return f"rank {rank.number} ended with {status}. The last lines of {rank.log}:{words}"
