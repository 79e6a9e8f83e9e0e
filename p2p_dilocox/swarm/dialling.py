"""Which addresses of a link answer: all are dialled at once, and the first that does is enough to go on."""

import asyncio
from collections.abc import Sequence

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from p2p_dilocox.errors import UnreachableError
from p2p_dilocox.swarm.patience import within

__all__ = ["DIAL_S", "dial_all"]

DIAL_S = 10.0  # per address
_GRACE_S = 1.5  # for the others, once one has answered


async def dial_all(p2p: P2P, peers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The peers that could be dialled, and why the others could not. Raises UnreachableError with each one's
    reason if there are none.
    """
    dials = {asyncio.create_task(_dial(p2p, peer)): peer for peer in dict.fromkeys(peers)}
    answered: list[str] = []
    dead: dict[str, str] = {}
    try:
        open_dials = set(dials)
        while open_dials:
            done, open_dials = await asyncio.wait(
                open_dials,
                timeout=_GRACE_S if answered else None,
                return_when=asyncio.ALL_COMPLETED if answered else asyncio.FIRST_COMPLETED,
            )
            for task in done:
                if (reason := task.result()) is None:
                    answered.append(dials[task])
                else:
                    dead[dials[task]] = reason
            if answered and not done:
                break
        for task in open_dials:
            dead[dials[task]] = f"no answer {_GRACE_S:g} s after another address had answered"
    finally:
        for task in dials:
            task.cancel()
    if dead and not answered:
        raise UnreachableError("cannot join: " + "; ".join(f"{p}: {r}" for p, r in dead.items()))
    return answered, dead


async def _dial(p2p: P2P, peer: str) -> str | None:
    """Why it cannot be dialled; None if it can."""
    maddr = Multiaddr(peer)
    peer_id = maddr["p2p"]
    try:
        address = maddr.decapsulate(f"/p2p/{peer_id}")
        await within(p2p._client.connect(PeerID.from_base58(peer_id), [address]), DIAL_S)
    except TimeoutError:
        return f"no answer within {DIAL_S:.0f} s: the host is down, or a firewall drops the port"
    except (ControlFailure, P2PDaemonError) as error:
        return _reason(str(error))
    return None


def _reason(message: str) -> str:
    if "connection refused" in message:
        return "connection refused: nobody listens on that port. Is the bootstrap node running?"
    if "peer id mismatch" in message:
        return "another peer answers there: the bootstrap node has a new identity. Ask for a new link"
    if "no route to host" in message or "network is unreachable" in message:
        return "no route to that host: check the address and your network"
    if "no such host" in message or "no good addresses" in message or "failed to resolve" in message:
        return "that name has no address: check the spelling and your DNS"
    if "deadline" in message or "timeout" in message or "backoff" in message:
        return "no answer in time: the host is down, or a firewall drops the port"
    return message.strip().splitlines()[-1][:200] if message.strip() else "the connection failed"
