"""One peer of the run: libp2p and the hivemind DHT inside the caller's event loop.

hivemind.DHT would fork a process; running its DHTNode here instead needs no fork (CUDA may be in use
already), no
shared memory and no fork order, and only one child: the p2pd daemon, which dies with us.
"""

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto.dht_pb2 import NodeInfo, PingRequest
from hivemind.utils import get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from p2p_dilocox.errors import LinkError, NotTrustedError, UnreachableError
from p2p_dilocox.ports import check_port
from p2p_dilocox.swarm.calls import survive_cancelled_calls
from p2p_dilocox.swarm.clock import refused_for_its_clock
from p2p_dilocox.swarm.dialling import DIAL_S, dial_all
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.keys import clusters_key, run_key
from p2p_dilocox.swarm.messages import Presence, open_sealed, seal
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.process import die_with_parent, make_socket_dir
from p2p_dilocox.swarm.records import PRESENCE_LIFE_S, RUN_LIFE_S, RunRecords
from p2p_dilocox.swarm.signed import SignedRun

__all__ = ["Node"]

_DHT_S = 10.0
_TRIES = 3


class Node:
    """Made by `start`, ended by `close`; both in the same event loop, whose thread must outlive the node."""

    def __init__(self, run_id: str, p2p: P2P, dht: DHTNode, sockets: Path, listens: bool) -> None:
        self.run_id = run_id
        self._sockets, self._listens = sockets, listens
        self.p2p = p2p
        self.dht = dht
        self.peer_id = str(p2p.peer_id)
        self.unreachable: dict[str, str] = {}  # address of the link -> why it could not be dialled
        self._entries: dict[str, list[str]] = {}  # peer id of the link -> its addresses

    @classmethod
    async def start(
        cls,
        *,
        run_id: str,
        organiser: bytes,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = (),
        announce_maddrs: Sequence[str] = (),
        identity_path: Path | None = None,
        client_mode: bool = False,
    ) -> "Node":
        """Start p2pd and join the DHT of the run.

        initial_peers: full multiaddresses, dialled all at once; dead ones are skipped. If all are dead this
        raises
            UnreachableError rather than start a swarm of one.
        host_maddrs: where to listen; none: nowhere.
        client_mode: nobody is to dial this peer, so it keeps no records for others.
        announce_maddrs: what to tell others instead of it.
        Raises LinkError if the addresses cannot be listened on; it names who has the port.
        """
        sockets = make_socket_dir()
        with _p2pd_as_we_want_it():
            try:
                p2p = await _p2p_in(sockets).create(
                    host_maddrs=list(host_maddrs) or None,
                    announce_maddrs=list(announce_maddrs) or None,
                    identity_path=str(identity_path) if identity_path else None,
                    no_listen=not host_maddrs,
                    dht_mode="client" if client_mode else "server",
                    check_if_identity_free=False,
                )
            except P2PDaemonError as error:
                shutil.rmtree(sockets, ignore_errors=True)
                for maddr in host_maddrs:
                    check_port(maddr)
                raise LinkError(f"cannot listen on {', '.join(host_maddrs)}: {_last_line(error)}") from error
        survive_cancelled_calls(p2p)
        try:
            reachable, unreachable = await dial_all(p2p, initial_peers)
            dht = await DHTNode.create(
                p2p=p2p,
                initial_peers=reachable,
                client_mode=client_mode,
                record_validator=RunRecords(run_id, organiser),
            )
        except BaseException as error:
            await p2p.shutdown()
            shutil.rmtree(sockets, ignore_errors=True)
            if isinstance(error, RuntimeError):
                raise UnreachableError(f"no peer of the link answers as part of a swarm: {error}") from error
            if type(error).__name__ == "ValidationError":
                why = refused_for_its_clock(str(error)) or f"the swarm does not accept this machine: {error}"
                raise UnreachableError(why) from error
            raise
        node = cls(run_id, p2p, dht, sockets, bool(host_maddrs))
        node.unreachable = unreachable
        for maddr in initial_peers:
            node._entries.setdefault(maddr.rpartition("/p2p/")[2], []).append(maddr)
        return node

    async def maddrs(self) -> list[str]:
        """Full multiaddresses, ending in /p2p/<our id>, at which others may dial us."""
        if not self._listens:
            return []
        return [str(maddr) for maddr in await self.p2p.get_visible_maddrs(latest=True)]

    async def connect(self, peer: str, maddrs: Iterable[str]) -> None:
        """Tell p2pd where `peer` lives. Never raises: whether it can be reached shows when it is called."""
        with contextlib.suppress(P2PDaemonError, ControlFailure, asyncio.TimeoutError, ValueError):
            addresses = [
                Multiaddr(m).decapsulate("/p2p/" + peer) if "/p2p/" in m else Multiaddr(m) for m in maddrs
            ]
            await within(self.p2p._client.connect(PeerID.from_base58(peer), addresses), DIAL_S)

    async def reattach(self) -> None:
        """Greet the peers of the link again: one that was away and is back takes part in the DHT then.

        Not at the first try, for libp2p does not dial an address that was dead for 5 s, and longer after each
        further failure, up to minutes: this is to be called again and again.
        """
        await asyncio.gather(*(self._greet(peer, maddrs) for peer, maddrs in self._entries.items()))

    async def _greet(self, peer: str, maddrs: list[str]) -> None:
        with contextlib.suppress(TimeoutError):
            if await within(self.dht.protocol.call_ping(PeerID.from_base58(peer)), DIAL_S) is None:
                await self.connect(peer, maddrs)
                await within(self.dht.protocol.call_ping(PeerID.from_base58(peer)), DIAL_S)

    async def time_at(self, peer: str) -> float | None:
        """A peer's clock, Unix seconds; None if it does not answer."""
        try:
            stub = self.dht.protocol.get_stub(PeerID.from_base58(peer))
            answer = await stub.rpc_ping(PingRequest(peer=NodeInfo(), validate=False), timeout=_DHT_S)
        except (TimeoutError, P2PDaemonError, P2PHandlerError, ControlFailure, ConnectionError):
            return None
        return float(answer.dht_time) or None

    @property
    def entry_peers(self) -> list[str]:
        """The peer ids of the link."""
        return list(self._entries)

    async def publish_run(self, signed: SignedRun) -> bool:
        """Store the run spec for RUN_LIFE_S seconds; whoever holds it may refresh it."""
        return bool(await self.dht.store(run_key(self.run_id), signed.pack(), get_dht_time() + RUN_LIFE_S))

    async def fetch_run(self, timeout_s: float = 4.0) -> SignedRun:
        """The signed run spec; the caller verifies it. Raises UnreachableError if nobody has it after some
        tries and timeout_s: who has it says so at once."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for number in itertools.count(1):
            with contextlib.suppress(asyncio.TimeoutError):
                found = await within(self.dht.get(run_key(self.run_id), latest=True), _DHT_S)
                if found is not None:
                    return SignedRun.from_bytes(found.value)
            if number >= _TRIES and asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.5)
        raise UnreachableError(
            f"nobody in the swarm has the spec of run {self.run_id!r} (asked {number} times). "
            "Is the link for another run?"
        )

    async def publish_presence(
        self, key: SigningKey, presence: Presence, life_s: float = PRESENCE_LIFE_S
    ) -> bool:
        expires = get_dht_time() + life_s
        sealed = seal(key, self.run_id, presence)
        return bool(
            await self.dht.store(clusters_key(self.run_id), sealed, expires, subkey=presence.cluster_id)
        )

    async def clusters(self) -> dict[str, Presence]:
        """The clusters that were heard of in the last PRESENCE_LIFE_S
        seconds, by id; those that left are not in it."""
        return {cluster: presence for cluster, (presence, _) in (await self.sightings()).items()}

    async def sightings(self) -> dict[str, tuple[Presence, float]]:
        """The same, each with the seconds since its last heartbeat."""
        return {c: s for c, s in (await self._present()).items() if s[0].state not in ("left", "archive")}

    async def archives(self) -> dict[str, Presence]:
        """Who keeps states and trains nothing, likewise."""
        return {c: p for c, (p, _) in (await self._present()).items() if p.state == "archive"}

    async def _present(self) -> dict[str, tuple[Presence, float]]:
        try:
            found = await within(self.dht.get(clusters_key(self.run_id), latest=True), _DHT_S)
        except TimeoutError:
            return {}
        present: dict[str, tuple[Presence, float]] = {}
        if found is not None and isinstance(found.value, dict):
            for sealed in found.value.values():
                with contextlib.suppress(NotTrustedError):
                    presence = open_sealed(sealed.value, self.run_id, Presence)
                    left_s = sealed.expiration_time - get_dht_time()
                    present[presence.cluster_id] = (presence, max(0.0, PRESENCE_LIFE_S - left_s))
        return present

    async def close(self) -> None:
        await self.dht.shutdown()
        await self.p2p.shutdown()
        shutil.rmtree(self._sockets, ignore_errors=True)


def _p2p_in(sockets: Path) -> type[P2P]:
    """hivemind puts its sockets to p2pd into /tmp and leaves one of them there."""
    return type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:200] if lines else type(error).__name__


@contextlib.contextmanager
def _p2pd_as_we_want_it() -> Iterator[None]:
    """hivemind starts p2pd by asyncio and has no hook for it. Without this p2pd outlives a killed rank, and
    two that are told one port both take it, so that each gets some of the other's calls (both measured)."""
    real = asyncio.subprocess.create_subprocess_exec

    async def start(*command: Any, **_options: Any) -> Any:
        _options["env"] = _options["env"] | {"LIBP2P_TCP_REUSEPORT": "false"}
        _options["preexec_fn"] = die_with_parent  # once, where two nodes of one process start together
        return await real(*command, **_options)

    asyncio.subprocess.create_subprocess_exec = start
    try:
        yield
    finally:
        asyncio.subprocess.create_subprocess_exec = real
