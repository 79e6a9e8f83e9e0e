"""The local socket of a running cluster: `status`, `leave`, `pause`, `resume`, one JSON object per line.

Whoever may open STATE/control.sock (mode 0600) may end the cluster; nobody else can.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from p2p_dilocox.errors import ClusterError, StateError

__all__ = ["SOCKET_NAME", "ask", "bind_control", "request_leave"]

SOCKET_NAME = "control.sock"
_ANSWER_S = 5.0
_MAX_LINE_BYTES = 1 << 20


def bind_control(state: Path) -> socket.socket:
    """A listening, non-blocking socket at STATE/control.sock. Call it with the directory's lock held.

    A socket file left by a killed supervisor is replaced.
    """
    (state / SOCKET_NAME).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.setblocking(False)
    with _short_path(state) as path:
        server.bind(path)
    (state / SOCKET_NAME).chmod(0o600)
    server.listen(8)
    return server


def ask(state: Path, command: dict[str, Any]) -> dict[str, Any]:
    """Send one command and return its answer. Raises StateError if no cluster runs in `state`."""
    with _connected(state) as (_, lines):
        return _ask(lines, command, state)


def request_leave(state: Path, *, now: bool) -> str:
    """Take the cluster out of its run and wait until its last process has ended. Returns how it ended.

    now: do not wait for the round in flight. Raises StateError if no cluster runs in `state` or it does not
    end within the deadline it announces, ClusterError if a rank failed on the way.
    """
    with _connected(state) as (connection, lines):
        answer = _ask(lines, {"command": "leave", "now": now}, state)
        deadline_s = float(answer.get("deadline_s", _ANSWER_S))
        connection.settimeout(deadline_s + _ANSWER_S)
        try:
            last = _read_line(lines)
        except TimeoutError as error:
            raise StateError(
                f"the cluster in {state} has not left within {deadline_s:.0f} s. "
                "See its logs; --now waits for nothing."
            ) from error
        except OSError:
            last = None  # the supervisor was killed while it left
    ended = str(last.get("ended")) if last else "failed"
    if ended == "failed":
        raise ClusterError(
            f"the cluster in {state} failed while it left. Its last words are in {state / 'logs'}."
        )
    return ended


def _ask(lines: BinaryIO, command: dict[str, Any], state: Path) -> dict[str, Any]:
    try:
        lines.write(json.dumps(command).encode() + b"\n")
        lines.flush()
        answer = _read_line(lines)
    except TimeoutError as error:
        raise StateError(
            f"the supervisor in {state} gives no answer for {_ANSWER_S:.0f} s. Is it stopped?"
        ) from error
    except OSError as error:
        raise StateError(f"the supervisor in {state} went away: {error.strerror}") from error
    if answer is None or "error" in answer:
        reason = answer["error"] if answer else "it closed the connection"
        raise StateError(
            f"the supervisor in {state} did not take the command {command['command']!r}: {reason}"
        )
    return answer


def _read_line(lines: BinaryIO) -> dict[str, Any] | None:
    """The next line's object; None at the end of the stream. Raises TimeoutError and OSError."""
    line = lines.readline(_MAX_LINE_BYTES)
    answer = json.loads(line) if line.endswith(b"\n") else None
    return answer if isinstance(answer, dict) else None


@contextlib.contextmanager
def _connected(state: Path) -> Iterator[tuple[socket.socket, BinaryIO]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            with _short_path(state) as path:
                connection.connect(path)
        except OSError as error:
            raise StateError(
                f"no cluster is running in {state} ({error.strerror}). Check the directory."
            ) from error
        with connection.makefile("rwb") as lines:
            yield connection, cast(BinaryIO, lines)


@contextlib.contextmanager
def _short_path(state: Path) -> Iterator[str]:
    """The socket's path by way of a directory descriptor: a path of more than 107 bytes cannot be bound."""
    descriptor = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
