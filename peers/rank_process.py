"""A rank as its supervisor sees it: a process in a group of its own, a socket to it, and its log."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from p2p_dilocox.errors import ClusterError
from p2p_dilocox.program import printable
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.process import die_with_parent

from .cause import Silence, kills_for_memory, status_text
from .restarts import HOPELESS

__all__ = ["RankProcess"]

_MAX_LINE_BYTES = 1 << 20
_LOG_TAIL_BYTES = 8192
_LOG_TAIL_LINES = 8


class RankProcess:
    """Started when it is made. It dies with the thread that makes it.

    config: see worker.py; written to STATE/worker-rank<r>.json, mode 0600. Raises StateError, OSError.
    """

    def __init__(self, state: Path, config: dict[str, Any]) -> None:
        self.number = int(config["rank"])
        self.ended = False
        """Set by the supervisor when it has heard the last words."""
        self.log = state / "logs" / f"rank{self.number}.log"
        self._buffer = bytearray()
        path = state / f"worker-rank{self.number}.json"
        write_atomic(path, json.dumps(config), mode=0o600)
        self.log.parent.mkdir(exist_ok=True)
        self.channel, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2p_dilocox.peers.worker", "--config", str(path),
                 "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C on the terminal reaches the supervisor alone
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self.channel.setblocking(False)
        self._silence = Silence(self.process.pid)
        self._frozen = self._killed = False
        self._kills_before = kills_for_memory()

    def hear(self) -> list[bytes] | None:
        """The whole lines that it has written by now, but for empty ones, which only say that it lives; [] if
        there are none yet, None at the end."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self._silence.end()
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest if len(rest) < _MAX_LINE_BYTES else bytearray()
        return [bytes(line) for line in lines if line]

    def watch(self, seconds: float) -> None:
        """It has not ended, and time has passed. One that is frozen is killed: its neighbours wait for it."""
        if not self._frozen and self._silence.goes_on(seconds):
            self.kill()
            self._frozen = True

    def send(self, command: dict[str, Any]) -> None:
        """Never waits: a rank that does not read has a deadline of its own."""
        with contextlib.suppress(OSError):
            self.channel.send(json.dumps(command).encode() + b"\n")

    def p2pds(self) -> list[int]:
        """Its children."""
        found: list[int] = []
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, file.read_text().split())
        return found

    def kill(self) -> None:
        """It and its p2pd, which is in its process group."""
        if not self.ended and self.process.poll() is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def weight(self) -> int:
        """Of two ranks that ended, the heavier one is the cause: the other lost it, or was told to end."""
        code = self.process.returncode
        if code in (0, ClusterError.exit_code) or (self._killed and not self._frozen):
            return 0
        return 2 if code in HOPELESS else 1

    def fate(self) -> str:
        """How it ended, as the end of a sentence."""
        memory_short = kills_for_memory() > self._kills_before
        return status_text(self.process.returncode, frozen=self._frozen, memory_short=memory_short)

    def last_lines(self) -> str:
        """The end of what this process has logged, each line on one of its own and without control codes."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            tail = log.read()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        lines = tail.strip().splitlines()[-_LOG_TAIL_LINES:]
        return "".join(f"\n  {printable(line, 300)}" for line in lines) or " (its log is empty)"
