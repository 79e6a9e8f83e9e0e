"""What the supervisor makes of a rank's silence and of its end."""

import importlib
import os
import signal
import subprocess
import sys
import time

cause = importlib.import_module("p2p_dilocox.peers.cause")


def test_a_process_that_says_nothing_and_does_nothing_is_frozen() -> None:
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(idle.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, idle.pid, os.WSTOPPED)
        silence = cause.Silence(idle.pid)
        assert not silence.goes_on(1000.0), "the supervisor slept, and so did everybody"
        seconds = 1
        while not silence.goes_on(1.0):
            seconds += 1
        assert seconds == cause.FROZEN_S
        silence.end()
        assert not silence.goes_on(1.0)
    finally:
        idle.kill()
        idle.communicate()


def test_a_process_that_computes_is_not_frozen() -> None:
    silence = cause.Silence(os.getpid())
    for _ in range(3 * int(cause.FROZEN_S)):
        until = time.process_time() + 0.02  # two ticks of the kernel's clock
        while time.process_time() < until:
            pass
        assert not silence.goes_on(1.0)


def test_a_process_that_is_gone_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    silence = cause.Silence(gone.pid)
    assert [silence.goes_on(1.0) for _ in range(3)] == [False] * 3


def test_ends_are_told_apart() -> None:
    assert cause.status_text(-signal.SIGKILL) == "ended with signal SIGKILL"
    assert "out of memory" in cause.status_text(-signal.SIGKILL, memory_short=True)
    assert cause.status_text(-signal.SIGSEGV, memory_short=True) == "ended with signal SIGSEGV"
    assert cause.status_text(-signal.SIGKILL, frozen=True).startswith("froze: for 15 s")
    assert cause.status_text(10) == "ran out of memory"
    assert cause.status_text(3) == "ended with exit status 3"
    assert cause.kills_for_memory() >= 0
