"""Where a bootstrap node listens and what others are told, checked before anything starts."""

import ipaddress
import re
from collections.abc import Sequence

from p2p_dilocox.ports import check_port
from p2p_dilocox.swarm.maddr import check_maddr, is_loopback

__all__ = ["DEFAULT_LISTEN", "check_addresses", "linkable", "reach_warning"]

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/31337"

_IP = re.compile(r"/ip[46]/([^/]+)")


def check_addresses(listen: Sequence[str], announce: Sequence[str]) -> None:
    """Raises LinkError for a bad address, for port 0 in `announce` and for a port that cannot be taken."""
    for maddr in announce:
        check_maddr(maddr, announce=True)
    for maddr in listen:
        check_port(check_maddr(maddr))


def linkable(maddrs: Sequence[str], peer_id: str, announce: Sequence[str]) -> list[str]:
    """The addresses for the join link: what is announced; else all but loopback; else loopback."""
    if announce:
        return [f"{maddr}/p2p/{peer_id}" for maddr in announce]
    full = list(dict.fromkeys(m if "/p2p/" in m else f"{m}/p2p/{peer_id}" for m in maddrs))
    return [maddr for maddr in full if not is_loopback(maddr)] or full


def reach_warning(maddrs: Sequence[str]) -> str | None:
    """Why others may not reach these addresses, and what to do; None if one is public or a name."""
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
