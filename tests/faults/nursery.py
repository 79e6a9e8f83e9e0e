"""Starts members by forking one process that has imported everything: torch and hivemind take seconds.

The nursery is a process of its own, without threads and without event loop, so that a fork is safe. What it
forks is killed with it, and it with us.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from p2p_dilocox.swarm.process import die_with_parent

__all__ = ["Child", "Nursery", "serve"]

ROOT = Path(__file__).parents[2]
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 18


class Child:
    """A forked process, by its pid and a descriptor that says when it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def running(self) -> bool:
        return not select.select([self._ended], [], [], 0.0)[0]

    def kill(self) -> None:
        """And wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)
        select.select([self._ended], [], [], 10.0)

    def close(self) -> None:
        os.close(self._ended)


class Nursery:
    """One for a Python process; started when it is first needed."""

    _one: "Nursery | None" = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.member", "--nursery", str(theirs.fileno())],
                cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @classmethod
    def start(cls, argument: str, namespace: str, files: tuple[int, int, int]) -> Child:
        """A member with this argument. namespace: its network namespace, "" for ours. files: its stdin,
        stdout and stderr."""
        with cls._lock:
            if cls._one is None:
                cls._one = cls()
            one = cls._one
            socket.send_fds(one._socket, [json.dumps([argument, namespace]).encode()], list(files))
            return Child(int(one._socket.recv(64)))


def serve(descriptor: int, main: Callable[[str], None]) -> None:
    """The nursery's side: fork a process for every request that calls main, which does not return."""
    with socket.socket(fileno=descriptor) as requests:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries what has ended
        while True:
            data, files, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
            if not data:
                return
            argument, namespace = json.loads(data)
            pid = os.fork()
            if not pid:
                break
            for file in files:
                os.close(file)
            requests.send(str(pid).encode())
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if namespace:
        _enter(namespace)
    main(argument)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), namespace)
    os.close(descriptor)
