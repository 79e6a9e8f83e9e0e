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

from p2p_dilocox.program import printable
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.process import die_with_parent

__all__ = ["RankProcess", "status_text"]

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

    def hear(self) -> list[bytes] | None:
        """The whole lines that it has written by now; [] if there are none yet, None at the end."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest if len(rest) < _MAX_LINE_BYTES else bytearray()
        return [bytes(line) for line in lines]

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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def last_lines(self) -> str:
        """The end of what this process has logged, each line on one of its own and without control codes."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            tail = log.read()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        lines = tail.strip().splitlines()[-_LOG_TAIL_LINES:]
        return "".join(f"\n  {printable(line, 300)}" for line in lines) or " (its log is empty)"


def status_text(code: int) -> str:
    """`code` as subprocess gives it, as the end of a sentence."""
    name = signal.Signals(-code).name if code < 0 else ""
    return f"ended with signal {name}" if name else f"ended with exit status {code}"
