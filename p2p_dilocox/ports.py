"""Ports of multiaddresses: whether one can be taken, and the ones that belong to the ranks of a cluster."""

import contextlib
import errno
import re
import socket
from pathlib import Path

from p2p_dilocox.errors import LinkError
from p2p_dilocox.program import printable

__all__ = ["check_port", "shift_port"]

_ADDRESS = re.compile(r"/ip[46]/([^/]+)/(tcp|udp)/([0-9]+)")
_LISTENS = "0A"  # a state in /proc/net/tcp
_PORT = re.compile(r"(?<=/)(tcp|udp)/([0-9]+)")


def check_port(maddr: str) -> None:
    """Take the port of a valid `maddr` for a moment; LinkError that says why it cannot be listened on.

    p2pd would fail too, but seconds later and in its own words. Names in place of an IP address pass.
    """
    match = _ADDRESS.match(maddr)
    if match is None:
        return
    host, kind, port = match[1], match[2], int(match[3])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as probe:
        try:
            if kind == "tcp":  # as p2pd does; two UDP sockets may share a port if they set it
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            if kind == "tcp":
                probe.listen(1)
        except OSError as error:
            reasons = {
                errno.EADDRINUSE: f"port {port} is in use{_by(kind, port)}. End it or choose another port",
                errno.EACCES: f"port {port} is reserved for root. Choose one of 1024 to 65535",
                errno.EADDRNOTAVAIL: f"{host} is not an address of this machine. 0.0.0.0 means all of them",
            }
            reason = reasons.get(error.errno or 0, f"{error.strerror}. Choose another address")
            raise LinkError(f"cannot listen on {maddr}: {reason}.") from error


def _by(kind: str, port: int) -> str:
    """ " by process 123 (name)", if Linux tells us, which it does of our own user's processes."""
    inodes = set()
    for table in (kind, f"{kind}6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and (kind == "udp" or fields[3] == _LISTENS):
                    inodes.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) in inodes:
                process = link.parents[1]
                return f" by process {process.name} ({printable((process / 'comm').read_text().strip(), 40)})"
    return ""


def shift_port(maddr: str, by: int) -> str:
    """The address of rank `by`, given rank 0's: its ports plus `by`. Port 0 stays 0, any free port."""

    def shifted(match: re.Match[str]) -> str:
        port = int(match[2])
        if port + by > 65535:
            raise LinkError(
                f"address {maddr!r}: rank {by} would need port {port + by}; the highest is 65535."
            )
        return f"{match[1]}/{port + by if port else 0}"

    return _PORT.sub(shifted, maddr)
