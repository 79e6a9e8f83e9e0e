"""Where a bootstrap node listens and what others are told, checked before anything starts."""

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence

from p2p_dilocox.errors import LinkError
from p2p_dilocox.swarm.link import check_maddr, is_loopback

__all__ = ["DEFAULT_LISTEN", "check_addresses", "linkable", "reach_warning"]

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/31337"

_IP = re.compile(r"/ip[46]/([^/]+)")
_TCP = re.compile(r"/ip[46]/([^/]+)/tcp/([0-9]+)")


def check_addresses(listen: Sequence[str], announce: Sequence[str]) -> None:
    """Raises LinkError for a bad address, for port 0 in `announce` and for a port that cannot be taken."""
    for maddr in announce:
        check_maddr(maddr, announce=True)
        if "/p2p/" in maddr:
            raise LinkError(f"address {maddr!r}: leave out /p2p/..., the node adds its own peer id.")
    for maddr in listen:
        check_maddr(maddr)
        if match := _TCP.match(maddr):
            _check_port(maddr, match[1], int(match[2]))


def linkable(maddrs: Sequence[str], peer_id: str, announce: Sequence[str]) -> list[str]:
    """The addresses for the join link: what is announced; else all but loopback; else loopback."""
    if announce:
        return [f"{maddr}/p2p/{peer_id}" for maddr in announce]
    full = list(dict.fromkeys(m if "/p2p/" in m else f"{m}/p2p/{peer_id}" for m in maddrs))
    return [maddr for maddr in full if not is_loopback(maddr)] or full


def reach_warning(maddrs: Sequence[str]) -> str | None:
    """Why other hosts may not reach these addresses, and what to do; None if at least one is public or a name."""
    if all(is_loopback(maddr) for maddr in maddrs):
        return (
            "this link works on this machine only (loopback). Pass --listen /ip4/0.0.0.0/tcp/31337, "
            "and --announce with the address under which others reach this host."
        )
    ips = [match[1] for maddr in maddrs if (match := _IP.match(maddr))]
    if len(ips) == len(maddrs) and not any(ipaddress.ip_address(ip).is_global for ip in ips):
        return (
            "this link works inside this network only (private addresses). For the Internet, open the port "
            "and pass --announce /ip4/<public address>/tcp/<port>."
        )
    return None


def _check_port(maddr: str, host: str, port: int) -> None:
    """Take the port for a moment. p2pd would fail too, but seconds later and in its own words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            reasons = {
                errno.EADDRINUSE: f"port {port} is in use. End the program that holds it or choose another port",
                errno.EACCES: f"port {port} is reserved for root. Choose one of 1024 to 65535",
                errno.EADDRNOTAVAIL: f"{host} is not an address of this machine. 0.0.0.0 means all of them",
            }
            reason = reasons.get(error.errno or 0, f"{error.strerror}. Choose another address")
            raise LinkError(f"cannot listen on {maddr}: {reason}.") from error
