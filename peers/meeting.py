"""STATE/join-link: a link by way of this cluster and of others that are there now. When the bootstrap node is
gone others join with it, and this cluster comes back with it."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from p2p_dilocox.errors import LinkError, StateError
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.maddr import check_maddr, is_loopback

__all__ = ["keep_link", "read_kept_link", "with_kept_peers"]

_EVERY_S = 10.0
_MOST_CLUSTERS = 6
_MOST_ADDRESSES = 2  # of each


async def keep_link(state: Path, link: JoinLink, clusters: Callable[[], list[list[str]]]) -> None:
    """Keep the file up to date until cancelled. A full disk leaves it as it is.

    clusters: the addresses of ours and of each other cluster that is there.
    """
    written = ""
    while True:
        addresses = _addresses(clusters()[:_MOST_CLUSTERS], link.peers)
        fresh = str(JoinLink(link.run_id, link.organiser, addresses))
        if fresh != written:
            try:
                await asyncio.to_thread(write_atomic, state / "join-link", fresh + "\n")
                written = fresh
            except StateError:
                pass
        await asyncio.sleep(_EVERY_S)


def read_kept_link(state: Path) -> str:
    """Raises StateError."""
    try:
        return (state / "join-link").read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise StateError(
            f"{state} has no join link: it is there once a cluster has joined with this --state-dir."
        ) from error


def with_kept_peers(state: Path, link: JoinLink) -> JoinLink:
    """`link` with the peers that this cluster knew last; they are dialled too, and dead ones do no harm."""
    try:
        kept = JoinLink.parse(read_kept_link(state))
    except (StateError, LinkError):
        return link
    if (kept.run_id, kept.organiser) != (link.run_id, link.organiser):
        return link
    return JoinLink(link.run_id, link.organiser, tuple(dict.fromkeys((*link.peers, *kept.peers))))


def _addresses(clusters: Iterable[list[str]], first: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the link, then some of each cluster, those that other machines can dial before loopback."""
    found = list(first)
    for maddrs in clusters:
        good = [m for m in maddrs if _is_good(m)]
        found += sorted(good, key=is_loopback)[:_MOST_ADDRESSES]
    return tuple(dict.fromkeys(found))


def _is_good(maddr: str) -> bool:
    try:
        check_maddr(maddr, peer=True)
    except LinkError:
        return False
    return True
