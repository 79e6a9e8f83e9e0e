"""The DHT of a run: what its nodes store, whom they believe, and what a wrong address says."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hivemind.utils import get_dht_time

from p2p_dilocox.errors import LinkError, NotTrustedError, UnreachableError
from p2p_dilocox.swarm.identity import SigningKey, ensure_libp2p_identity
from p2p_dilocox.swarm.keys import clusters_key, run_key
from p2p_dilocox.swarm.messages import Presence, RankAddress, Ready, Votes, open_sealed, seal, unpack
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.signed import SignedRun, sign_run

ORGANISER = SigningKey.generate()
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
SWARMS = int(os.environ.get("NODE_SWARMS", "3"))  # of which each takes a second; 20 in field report A1
PEER = "12D3KooWKrsNNSqV8PpeGJM2CTxwQKz67SJQLUCiTahKMhgKLqb9"


def presence(key: SigningKey, name: str = "fine", peer: str = PEER) -> Presence:
    address = RankAddress(peer=peer, maddrs=["/ip4/127.0.0.1/tcp/1"], stages=[0])
    return Presence(
        cluster_id=key.cluster_id, name=name, ranks=[address], t=1, h=0, state="training", loss=1.0,
        tokens_per_s=1.0, tokens=1,
    )  # fmt: skip


def with_two_nodes(
    body: Callable[[Node, Node], Awaitable[None]], stranger_knows: SigningKey = ORGANISER
) -> None:
    """An honest node, and one of somebody who is in the swarm and may check records by another key."""

    async def run() -> None:
        honest = await Node.start(run_id="run", organiser=ORGANISER.public, host_maddrs=LOOPBACK)
        stranger = await Node.start(
            run_id="run",
            organiser=stranger_knows.public,
            initial_peers=await honest.maddrs(),
            host_maddrs=LOOPBACK,
        )
        try:
            await body(honest, stranger)
        finally:
            await stranger.close()
            await honest.close()

    asyncio.run(run())


def test_a_taken_port_is_not_shared_and_its_owner_is_named() -> None:
    """Field report G7, where another takes it after it was looked at. libp2p by itself would take it too."""

    async def run() -> None:
        async def start(listen: str) -> Node:
            return await Node.start(run_id="run", organiser=ORGANISER.public, host_maddrs=[listen])

        first = await start(LOOPBACK[0])
        listen = (await first.maddrs())[0].partition("/p2p/")[0]
        with pytest.raises(LinkError, match=rf"{listen}: port \d+ is in use by process \d+ \(p2pd\)"):
            await start(listen)
        await first.close()
        await (await start(listen)).close()

    asyncio.run(run())


def test_a_stranger_cannot_replace_the_dictionary_of_clusters() -> None:
    """Field report I11: stock hivemind accepts a plain value with a later expiry; the dictionary is gone."""
    key = SigningKey.generate()

    async def body(honest: Node, stranger: Node) -> None:
        assert await honest.publish_presence(key, presence(key))
        stranger.dht.protocol.record_validator = None  # it stores whatever it likes at home, and offers it
        for expires_in in (35.0, 1e6, float("nan")):
            await stranger.dht.store(clusters_key("run"), b"junk", get_dht_time() + expires_in)
        later = presence(key, name="forged")
        forged = seal(SigningKey.generate(), "run", later)
        await stranger.dht.store(clusters_key("run"), forged, get_dht_time() + 35, subkey=key.cluster_id)
        assert {c: p.name for c, p in (await honest.clusters()).items()} == {key.cluster_id: "fine"}
        await honest.publish_presence(
            key, presence(key, name="again")
        )  # the stranger keeps its junk, we do not
        assert {p.name for p in (await honest.clusters()).values()} == {"again"}

    with_two_nodes(body)


def test_only_the_organiser_can_publish_the_run_and_only_keys_of_the_run_are_stored() -> None:
    async def body(honest: Node, stranger: Node) -> None:
        assert await honest.publish_run(sign_run(ORGANISER, "run", "the true spec"))
        stranger.dht.protocol.record_validator = None
        false = sign_run(SigningKey.generate(), "run", "another spec").pack()
        await stranger.dht.store(run_key("run"), false, get_dht_time() + 605)
        await stranger.dht.store("something else", b"x" * 1000, get_dht_time() + 60)
        assert (await honest.fetch_run()).verify(ORGANISER.public) == "the true spec"
        keys = [k for k, _ in honest.dht.protocol.storage.items()]
        assert len(keys) == 1

    with_two_nodes(body)


def test_a_link_for_another_run_says_so() -> None:
    """S5."""

    async def run() -> None:
        there = await Node.start(run_id="run", organiser=ORGANISER.public, host_maddrs=LOOPBACK)
        visitor = await Node.start(
            run_id="other", organiser=ORGANISER.public, initial_peers=await there.maddrs(), client_mode=True
        )
        try:
            assert await there.publish_run(sign_run(ORGANISER, "run", "the spec"))
            with pytest.raises(UnreachableError, match="spec of run 'other'.*for another run"):
                await visitor.fetch_run(timeout_s=0.1)
        finally:
            await visitor.close()
            await there.close()

    asyncio.run(run())


def test_a_run_signed_by_another_key_is_not_trusted() -> None:
    signed = sign_run(ORGANISER, "run", "text")
    assert signed.verify(ORGANISER.public) == "text"
    with pytest.raises(NotTrustedError, match="not signed by the key in the join link"):
        signed.verify(SigningKey.generate().public)
    renamed = SignedRun(run_id="other", text=signed.text, signature=signed.signature)
    with pytest.raises(NotTrustedError):
        renamed.verify(ORGANISER.public)


@pytest.mark.parametrize(
    ("peer", "sentence"),
    [
        ("/ip4/127.0.0.1/tcp/1/p2p/{id}", "nobody listens on that port"),
        ("{maddr}/p2p/" + PEER, "another peer answers there"),
        ("/ip4/127.0.0.1/tcp/{silent}/p2p/{id}", "no answer within 1 s"),
    ],
)
def test_each_kind_of_dead_address_has_its_own_sentence(
    peer: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report A15."""
    monkeypatch.setattr("p2p_dilocox.swarm.dialling.DIAL_S", 1.0)

    async def run() -> None:
        there = await Node.start(run_id="run", organiser=ORGANISER.public, host_maddrs=LOOPBACK)
        try:
            maddr = (await there.maddrs())[0].split("/p2p/")[0]
            port = silent.getsockname()[1]
            address = peer.format(id=there.peer_id, maddr=maddr, silent=port)
            with pytest.raises(UnreachableError, match=sentence):
                await Node.start(
                    run_id="run", organiser=ORGANISER.public, initial_peers=[address], client_mode=True
                )
            alive = await Node.start(  # a dead address next to a good one does not matter
                run_id="run",
                organiser=ORGANISER.public,
                initial_peers=[address, (await there.maddrs())[0]],
                client_mode=True,
            )
            await alive.close()
        finally:
            await there.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(run())


def test_peers_that_start_at_the_same_moment_are_one_swarm() -> None:
    """Field report A1: hivemind's own programs made two swarms of two."""

    async def run() -> None:
        first = await Node.start(run_id="run", organiser=ORGANISER.public, host_maddrs=LOOPBACK)
        link = await first.maddrs()

        async def start() -> Node:
            return await Node.start(
                run_id="run", organiser=ORGANISER.public, initial_peers=link, host_maddrs=LOOPBACK
            )

        nodes = await asyncio.gather(*(start() for _ in range(4)))
        keys = [SigningKey.generate() for _ in nodes]
        ids = {key.cluster_id for key in keys}

        async def meet(node: Node, key: SigningKey) -> None:
            while set(await node.clusters()) != ids:
                await node.publish_presence(key, presence(key))  # what the next heartbeat does

        try:
            await within(asyncio.gather(*map(meet, nodes, keys)), 10.0)
        finally:
            await asyncio.gather(*(node.close() for node in (*nodes, first)))

    for _ in range(SWARMS):
        asyncio.run(run())


def test_a_signature_says_for_whom_of_what_kind_and_in_which_run(tmp_path: Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    sealed = seal(key, "run", presence(key))
    assert open_sealed(sealed, "run", Presence).cluster_id == key.cluster_id
    for forged in (seal(other, "run", presence(key)), sealed[:-1], b"", b"\x80\x04."):
        with pytest.raises(NotTrustedError):
            open_sealed(forged, "run", Presence)
    with pytest.raises(NotTrustedError):
        open_sealed(sealed, "another-run", Presence)
    with pytest.raises(NotTrustedError):
        open_sealed(sealed, "run", Ready)


@pytest.mark.parametrize("name", ["../../tmp/x", "a\n", "\x1b[31m", "", "x" * 33, "a b"])
def test_names_that_could_steer_a_path_or_a_terminal_are_not_accepted(name: str) -> None:
    key = SigningKey.generate()
    with pytest.raises(NotTrustedError, match="malformed Presence"):
        open_sealed(seal(key, "run", presence(key, name=name)), "run", Presence)


def test_messages_with_unknown_fields_or_wrong_types_are_refused() -> None:
    good = Votes(t=1, attempt=0, votes=[b"x"], outcome="open").pack()
    assert unpack(good, Votes).votes == [b"x"]
    for bad in (
        good.replace(b"open", b"opem"),
        good.replace(b"attempt", b"attempd"),
        Votes(t=-1, attempt=0, votes=[], outcome="open").pack(),
        Votes(t=1, attempt=0, votes=[b"x"] * 257, outcome="open").pack(),
        Votes(t=1, attempt=0, votes=[b"x" * 300_000], outcome="open").pack(),
    ):
        with pytest.raises(NotTrustedError):
            unpack(bad, Votes)


def test_keys_are_private_files_and_wider_ones_are_refused(tmp_path: Path) -> None:
    """Field report I4."""
    key = SigningKey.load_or_create(tmp_path / "cluster.key")
    assert SigningKey.load_or_create(tmp_path / "cluster.key").public == key.public
    assert ensure_libp2p_identity(tmp_path / "rank0.key")
    assert not ensure_libp2p_identity(tmp_path / "rank0.key")
    for name in ("cluster.key", "rank0.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        (tmp_path / name).chmod(0o644)
    with pytest.raises(NotTrustedError, match="chmod 600"):
        SigningKey.load_or_create(tmp_path / "cluster.key")
    with pytest.raises(NotTrustedError, match="chmod 600"):
        ensure_libp2p_identity(tmp_path / "rank0.key")


@pytest.mark.parametrize("host", ["ip4/127.0.0.1", "ip6/::1", "dns4/localhost"])
def test_a_name_or_ipv6_is_dialled_and_dead_addresses_are_named_and_not_waited_for(host: str) -> None:
    """S11, field report A3. 192.0.2.1 and 2001:db8::1 are nobody's (RFC 5737, RFC 3849)."""

    async def body() -> None:
        first = await Node.start(
            run_id="run", organiser=ORGANISER.public, host_maddrs=[*LOOPBACK, "/ip6/::1/tcp/0"]
        )
        ports = {m.split("/")[1]: m.split("/")[4] for m in await first.maddrs()}
        alive = f"/{host}/tcp/{ports['ip6' if host[2] == '6' else 'ip4']}/p2p/{first.peer_id}"
        dead = [
            f"/{d}/tcp/9/p2p/{PEER}" for d in ("ip6/2001:db8::1", "ip4/192.0.2.1", "dns4/no.such.invalid")
        ]
        try:
            await first.publish_run(sign_run(ORGANISER, "run", "the spec"))
            joiner = await Node.start(
                run_id="run", organiser=ORGANISER.public, initial_peers=[*dead, alive], client_mode=True
            )
            try:
                assert joiner.unreachable.keys() == set(dead)
                assert all(joiner.unreachable.values())
                assert (await joiner.fetch_run()).verify(ORGANISER.public) == "the spec"
            finally:
                await joiner.close()
        finally:
            await first.close()

    asyncio.run(body())


def test_a_node_that_comes_back_with_its_key_is_in_the_swarm_again(tmp_path: Path) -> None:
    """R9: the bootstrap node starts with an empty memory; those that knew it tell it who is there."""
    key = SigningKey.generate()
    ensure_libp2p_identity(tmp_path / "node.key")

    async def body() -> None:
        async def start_first(listen: str) -> Node:
            return await Node.start(
                run_id="run", organiser=ORGANISER.public, host_maddrs=[listen],
                identity_path=tmp_path / "node.key",
            )  # fmt: skip

        first = await start_first(LOOPBACK[0])
        (address,) = await first.maddrs()
        other = await Node.start(
            run_id="run", organiser=ORGANISER.public, initial_peers=[address], host_maddrs=LOOPBACK
        )

        async def tell_first() -> None:
            while set(await first.clusters()) != {key.cluster_id}:
                await asyncio.sleep(0.5)  # libp2p dials an address that was dead after some seconds again
                await other.reattach()
                await other.publish_presence(key, presence(key))

        try:
            await first.close()
            await other.publish_presence(key, presence(key))  # it sees that nobody is there, and forgets it
            await other.reattach()  # no harm
            first = await start_first(address.split("/p2p/")[0])
            assert await first.clusters() == {}
            await within(tell_first(), 60.0)
            assert await other.time_at(first.peer_id)
        finally:
            await other.close()
            await first.close()

    asyncio.run(body())
