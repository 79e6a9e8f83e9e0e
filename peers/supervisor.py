"""One per cluster: starts a process per rank, hears their events, passes commands on, and ends them all.

If a rank fails, all ranks end and start again from the last checkpoint, see restarts.py.

One thread and one selector: a rank dies with the thread that started it (PR_SET_PDEATHSIG), so that thread
must be the one that stays.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from p2p_dilocox.errors import ClusterError, DilocoxError, OutOfMemoryError, StateError
from p2p_dilocox.events import Event, Phase, Warned, event_from_dict
from p2p_dilocox.program import printable
from p2p_dilocox.sinks import JsonlSink
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.process import remove_sockets_of

from .control import SOCKET_NAME, bind_control
from .display import Display
from .limits import Limits, Pause
from .progress import Progress
from .rank_process import RankProcess
from .restarts import HOPELESS, MAX_RESTARTS, WINDOW_S, Restarts

__all__ = ["Outcome", "Supervisor"]

_TICK_S = 0.1
_STATUS_S = 1.0
_NOW_S = 6.0  # to leave at once: a rank that takes longer is killed
_EARLY_S = 3.0  # the same, while it loads or connects: it has nothing to save and cannot hear yet
_FAILED_S = 4.0  # the same, after another rank failed: its ranks wait for a process that is gone
_WINDOW = f"{WINDOW_S / 60:.0f} minutes"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """reason: complete, left, failed, or interrupted by signal number `signal`."""

    reason: str
    signal: int = 0

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0


class Supervisor:
    """Made for one `join`; `run` returns when every rank has ended and none will start again.

    workers: a config per rank, without `rendezvous`; see worker.py.
    leave_s: seconds that a rank may take to finish its round when it is asked to leave.
    """

    def __init__(
        self,
        state: Path,
        workers: Sequence[dict[str, Any]],
        progress: Progress,
        display: Display,
        limits: Limits,
        *,
        leave_s: float,
    ) -> None:
        self._limits = limits
        self._limited: Pause | None = None
        self._state = state
        self._workers = workers
        self._progress = progress
        self._display = display
        self._leave_s = leave_s
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._clients: dict[socket.socket, bytearray] = {}
        self._signals: list[int] = []
        self._interrupted = 0
        self._failed: RankProcess | None = None
        self._last_words: dict[int, str] = {}
        self._asked_to_leave = False
        self._asked_to_pause: Pause | None = None
        self._told: Pause | None = None  # of what the ranks know
        self._unwritable: set[str] = set()
        self._stopping: Literal["no", "leave", "now", "killed"] = "no"
        self._deadline = float("inf")
        self._next_status = 0.0
        self._looked = time.monotonic()

    def run(self) -> Outcome:
        """Start the ranks and stay until the last has ended; start them again if one failed.

        SIGINT, SIGTERM and SIGHUP leave the run without waiting for a round; a second one kills.
        Raises ClusterError, naming rank, exit status and last log lines, if ranks fail too often; the error
        of a rank that another start could not mend; StateError if the state directory cannot be written to.
        """
        with contextlib.ExitStack() as stack:
            self._events = JsonlSink(self._state / "events.jsonl")
            stack.callback(self._events.close)
            stack.callback(self._selector.close)
            stack.callback(self._limits.close)
            server = stack.enter_context(bind_control(self._state))
            stack.callback((self._state / SOCKET_NAME).unlink, missing_ok=True)
            self._selector.register(server, selectors.EVENT_READ)
            for number in _SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            stack.callback(self._end_all)
            restarts = Restarts()
            self._run_ranks(server)
            while (pause_s := self._pause_before_restart(restarts)) is not None:
                self._workers = [worker | {"since": time.time()} for worker in self._workers]
                until = time.monotonic() + pause_s
                while time.monotonic() < until and not self._told_to_end:
                    self._step(server)
                if self._told_to_end:
                    self._failed = None
                    break
                self._run_ranks(server)
            outcome = self._outcome()
            self._progress.phase, self._progress.detail = outcome.reason, ""
            self._write_status()
            self._dismiss_clients(outcome)
        if outcome.reason == "failed" and self._failed is not None:
            raise self._failure(self._failed, restarts.count)
        return outcome

    def _run_ranks(self, server: socket.socket) -> None:
        """From the start of all ranks to the end of the last."""
        self._ranks, self._failed, self._last_words = [], None, {}
        self._stopping, self._deadline, self._told = "no", float("inf"), None
        # A file that does not exist: torch's file store reads what an earlier start left in an old one.
        rendezvous = self._state / f"rendezvous-{secrets.token_hex(8)}"
        for config in self._workers:
            rank = RankProcess(self._state, config | {"rendezvous": f"file://{rendezvous}"})
            self._ranks.append(rank)
            self._selector.register(rank.channel, selectors.EVENT_READ, rank)
        while not all(rank.ended for rank in self._ranks):
            self._step(server)
        self._end_all()
        first = self._ranks[0]
        if self._failed is None and self._stopping == "no" and self._progress.finished.get(0) != "complete":
            self._failed = first

    @property
    def _told_to_end(self) -> bool:
        return bool(self._interrupted) or self._asked_to_leave

    def _pause_before_restart(self, restarts: Restarts) -> float | None:
        """Seconds, announced to everybody; None if the cluster does not start again."""
        if self._failed is None or self._told_to_end or self._failed.process.returncode in HOPELESS:
            return None
        pause_s = restarts.pause_s(time.monotonic())
        if pause_s is not None:
            when = f"in {pause_s:.0f} s (restart {restarts.count} of at most {MAX_RESTARTS} in {_WINDOW})"
            message = f"{self._failed.fate()}; the cluster starts again from its last checkpoint {when}"
            self._emit(Warned(rank=self._failed.number, message=message))
            self._emit(Phase(name="restarting", detail=when))
        return pause_s

    def _step(self, server: socket.socket) -> None:
        for key, _ in self._selector.select(_TICK_S):
            if isinstance(key.data, RankProcess):
                self._hear(key.data)
            elif key.fileobj is server:
                self._accept(server)
            elif isinstance(key.fileobj, socket.socket):
                self._serve(key.fileobj)
        while self._signals:
            self._interrupt(self._signals.pop(0))
        elapsed_s, self._looked = time.monotonic() - self._looked, time.monotonic()
        for rank in self._ranks:
            if not rank.ended and rank.process.poll() is not None:
                self._reap(rank)
            elif not rank.ended:
                rank.watch(elapsed_s)
        if time.monotonic() > self._deadline:
            self._escalate()
        if (pause := self._asked_to_pause or self._limited) != self._told and self._stopping == "no":
            self._tell_pause(pause)
        if time.monotonic() > self._next_status:
            self._next_status = time.monotonic() + _STATUS_S
            self._limited = self._limits.look(
                p for rank in self._ranks if not rank.ended for p in rank.p2pds()
            )
            self._write_status()
        self._display.tick()

    # Ranks

    def _hear(self, rank: RankProcess) -> bool:
        """Take what a rank has written; False once there is nothing more to read now."""
        lines = rank.hear()
        if lines is None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(rank.channel)
        for line in lines or []:
            self._take(rank, line)
        return bool(lines)

    def _take(self, rank: RankProcess, line: bytes) -> None:
        try:
            event = event_from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError):
            event = Warned(rank=rank.number, message=f"sent no event but {line[:80]!r}")
        if isinstance(event, Warned):
            self._last_words[rank.number] = event.message
        self._emit(event)

    def _emit(self, event: Event) -> None:
        try:
            self._events.write(event)
        except OSError as error:
            self._note_unwritable(f"cannot write {self._state / 'events.jsonl'}: {error.strerror}.")
        totals = self._progress.add(event)
        self._display.event(self._progress, event, totals)

    def _reap(self, rank: RankProcess) -> None:
        while self._hear(rank):  # its last words
            pass
        rank.ended = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.channel)
        rank.channel.close()
        if self._failed is not None:
            self._failed = max(self._failed, rank, key=lambda failed: failed.weight)
        elif rank.process.returncode != 0 and self._stopping in ("no", "leave"):
            self._failed = rank
            others = "; ending the others" if any(not r.ended for r in self._ranks) else ""
            self._display.say(f"rank {rank.number} failed{others}")
            self._leave(now=True, within_s=_FAILED_S)

    def _tell_pause(self, pause: Pause | None) -> None:
        self._told = pause
        command: dict[str, Any] = {"command": "resume"}
        if pause is not None:
            command = {"command": "pause", "reason": pause.reason, "now": pause.now}
            when = "this inner step" if pause.now else "this outer step"
            self._display.say(f"pausing after {when}: {pause.reason}")
        else:
            self._display.say("resuming")
        for rank in self._ranks:
            if not rank.ended:
                rank.send(command)

    def _leave(self, *, now: bool, within_s: float) -> None:
        self._stopping = "now" if now else "leave"
        self._deadline = time.monotonic() + within_s
        self._progress.phase, self._progress.detail = "leaving", f"for {within_s:.0f} s at most"
        for rank in self._ranks:  # they agree among themselves on the inner step after which they leave
            if not rank.ended:
                rank.send({"command": "leave", "now": now})

    def _escalate(self) -> None:
        if self._stopping == "leave":
            self._display.say("the round does not end; leaving without it")
            self._leave(now=True, within_s=_NOW_S)
        else:
            self._kill()

    def _kill(self) -> None:
        self._stopping, self._deadline = "killed", float("inf")
        for rank in self._ranks:
            rank.kill()

    def _end_all(self) -> None:
        """At the end of a start, also by an exception: no rank stays."""
        self._kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.channel.close()
            remove_sockets_of(rank.process.pid)  # of one that was killed
        for pattern in ("worker-rank*.json", "rendezvous-*"):
            for path in self._state.glob(pattern):
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
            early = self._progress.phase in ("starting", "connecting")
            self._leave(now=True, within_s=_EARLY_S if early else _NOW_S)

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
                    self._asked_to_leave = True
                    if self._stopping == "no" or (now and self._stopping == "leave"):
                        self._display.say("asked to leave" + (" now" if now else ""))
                        step_s = 0.0 if now else 2 * self._progress.rest_of_outer_step_s
                        self._leave(now=now, within_s=_NOW_S if now else self._leave_s + step_s)
                    return {"ok": True, "deadline_s": max(self._deadline - time.monotonic(), 0) + _NOW_S}
                case {"command": "pause", **rest}:
                    self._asked_to_pause = Pause("asked to", rest.get("now") is True)
                    return {"ok": True}
                case {"command": "resume"}:
                    self._asked_to_pause = None
                    return {"ok": True}
        except ValueError:
            pass
        return {"error": f"unknown command {printable(line.decode(errors='replace'), 80)!r}"}

    def _dismiss_clients(self, outcome: Outcome) -> None:
        for client in list(self._clients):
            self._send(client, {"ended": outcome.reason})
            client.close()

    @staticmethod
    def _send(client: socket.socket, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            client.sendall(json.dumps(answer).encode() + b"\n")

    # Reports

    def _status(self) -> dict[str, Any]:
        limits = {
            "paused": self._told.reason if self._told else None,
            "month_bytes": self._limits.month.bytes,
        }
        return {**self._progress.to_dict(), **limits, "pid": os.getpid(), "time": time.time()}

    def _write_status(self) -> None:
        try:
            write_atomic(self._state / "status.json", json.dumps(self._status()) + "\n")
        except StateError as error:
            self._note_unwritable(str(error))

    def _note_unwritable(self, problem: str) -> None:
        """A full disk hides what the cluster does; it does not end it. Said once."""
        if problem not in self._unwritable:
            self._unwritable.add(problem)
            self._display.say(f"warning: {problem}")

    def _outcome(self) -> Outcome:
        if self._interrupted:
            return Outcome(reason="interrupted", signal=self._interrupted)
        if self._failed is not None:
            return Outcome(reason="failed")
        return Outcome(reason="left" if self._asked_to_leave else "complete")

    def _failure(self, rank: RankProcess, num_restarts: int) -> DilocoxError:
        kind = (HOPELESS | {OutOfMemoryError.exit_code: OutOfMemoryError}).get(rank.process.returncode)
        if kind is not None and rank.number in self._last_words:
            return kind(f"rank {rank.number}: {self._last_words[rank.number]}")
        again = f", after {num_restarts} restarts in {_WINDOW}" if num_restarts else ""
        words = f"The last lines of {rank.log}:{rank.last_lines()}"
        return ClusterError(f"rank {rank.number} {rank.fate()}{again}. {words}")
