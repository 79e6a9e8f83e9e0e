"""One rank of a cluster, as a process: network first, then process group, model, data, state; then train.

Started by the supervisor: `python -m p2p_dilocox.peers.worker --config FILE --fd N`. Over the socket N it
writes its events
and reads commands, both as lines of JSON.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from p2p_dilocox.errors import ClusterError, DilocoxError
from p2p_dilocox.events import Event, Phase, Warned
from p2p_dilocox.swarm.process import die_with_parent
from p2p_dilocox.wish import Wish

__all__ = ["main"]

_PULSE_S = 1.0
_LOG = logging.getLogger(__name__)


class _Channel:
    """Events to the supervisor, its commands to us. If the supervisor is gone, so are we."""

    def __init__(self, descriptor: int) -> None:
        self.wish = Wish()
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        threading.Thread(target=self._live, name="pulse", daemon=True).start()

    def report(self, event: Event) -> None:
        line = json.dumps(event.to_dict()).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def _live(self) -> None:
        """Tell the supervisor every second that this process is not frozen."""
        with contextlib.suppress(OSError):
            while True:
                with self._lock:
                    self._socket.sendall(b"\n")
                time.sleep(_PULSE_S)

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                command = json.loads(line)
                match command:
                    case {"command": "leave", "now": bool(now)}:
                        self.wish.leave(now=now)
                    case {"command": "pause", "reason": str(reason), "now": bool(now)}:
                        self.wish.pause(reason, now=now)
                    case {"command": "resume"}:
                        self.wish.resume()
        os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if the run is complete or the cluster left,
    else the exit code of the error (errors.py)."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which tells us
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args(arguments)
    config: dict[str, Any] = json.loads(options.config.read_text())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = _Channel(options.fd)
    channel.report(Phase(rank=config["rank"], name="starting", detail="loading libraries"))
    from .memory import memory_errors_named
    from .rank import run_rank  # torch and transformers take seconds; the view should not be empty meanwhile

    try:
        with memory_errors_named(config["device"]):
            run_rank(config, channel.report, channel.wish)
    except DilocoxError as error:
        if channel.wish.value == channel.wish.LEAVE_NOW and isinstance(error, ClusterError):
            return 0  # another rank was quicker to leave
        _LOG.exception("rank %s ends", config["rank"])
        channel.report(Warned(rank=config["rank"], message=str(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # library threads (gloo, executors) must not keep a rank that is done
