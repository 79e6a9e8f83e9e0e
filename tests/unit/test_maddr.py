"""Multiaddresses, checked without hivemind, against hivemind's own parser."""

from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from p2p_dilocox.errors import LinkError
from p2p_dilocox.swarm.identity import ensure_libp2p_identity
from p2p_dilocox.swarm.maddr import check_maddr, is_loopback

RSA_PEER = "QmSoLnSGccFuZQJzRadHn95W2CrSFmZuTdDWP8HXaHca9z"
ED25519_PEER = "12D3KooWPvMmSxNy3BuGrzJ9N2CWrkPCbSA1i1UwLPvsmhWgyv1x"


@pytest.mark.parametrize("peer", ["", f"/p2p/{RSA_PEER}", f"/p2p/{ED25519_PEER}"])
@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.5/tcp/31337",
        "/ip4/0.0.0.0/tcp/0",
        "/ip6/2001:db8::1/tcp/65535",
        "/ip6/::/udp/4001/quic",
        "/ip4/127.0.0.1/udp/4001/quic-v1",
        "/dns/bootstrap.example.org/tcp/443/wss",
        "/dns4/localhost/tcp/31337/ws",
        "/dns6/a-b.example/tcp/1",
        "/dnsaddr/example.org/tcp/1",
    ],
)
def test_what_is_accepted_means_the_same_to_hivemind(address: str, peer: str) -> None:
    assert check_maddr(address + peer, peer=bool(peer)) == address + peer
    assert str(Multiaddr(address + peer)) == address + peer


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "is empty"),
        (" /ip4/127.0.0.1/tcp/1", "white space"),
        ("/ip4/127.0.0.1/tcp/1\n", "white space"),
        ("/ip4/127.0.0.1/tcp/1\x00", "white space"),
        ("127.0.0.1:31337", "must start with '/'"),
        ("ip4/127.0.0.1/tcp/1", "must start with '/'"),
        ("/", "too many"),
        ("//ip4/127.0.0.1/tcp/1", "too many"),
        ("/ip4/127.0.0.1/tcp/1/", "too many"),
        ("/ip/127.0.0.1/tcp/1", "protocol ip,"),
        ("/unix/tmp/socket", "protocol unix,"),
        ("/ip4/300.0.0.1/tcp/1", "'300.0.0.1'"),
        ("/ip4/::1/tcp/1", "'::1'"),
        ("/ip4/127.0.0.01/tcp/1", "'127.0.0.01'"),
        ("/ip6/127.0.0.1/tcp/1", "'127.0.0.1'"),
        ("/ip6/fe80::1%eth0/tcp/1", "'fe80::1%eth0'"),
        ("/dns4/-x/tcp/1", "'-x'"),
        ("/dns4/a..b/tcp/1", "'a..b'"),
        (f"/dns4/{'a' * 64}/tcp/1", "not such a host"),
        ("/ip4/127.0.0.1", "no /tcp/<port>"),
        ("/ip4/127.0.0.1/sctp/1", "no /tcp/<port>"),
        ("/ip4/127.0.0.1/tcp", "'' as its tcp port"),
        ("/ip4/127.0.0.1/tcp/65536", "'65536'"),
        ("/ip4/127.0.0.1/tcp/-1", "'-1'"),
        ("/ip4/127.0.0.1/tcp/\N{SUPERSCRIPT ONE}", "port"),
        ("/ip4/127.0.0.1/udp/1", "/quic or /quic-v1"),
        ("/ip4/127.0.0.1/tcp/1/quic", "'quic'"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{RSA_PEER}/p2p-circuit", "'p2p-circuit'"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{RSA_PEER[:-1]}", "not a peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{RSA_PEER}1", "not a peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{'1' * 40}", "not a peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{'0' * 46}", "not a peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{RSA_PEER}", "must leave out /p2p/"),
        ("/ip4/127.0.0.1/tcp/1" + "/ws" * 100, "320 characters"),
    ],
)
def test_what_is_refused_is_named_and_a_good_one_shown(address: str, words: str) -> None:
    with pytest.raises(LinkError, match="A good one: /ip4/203.0.113.5/tcp/31337") as caught:
        check_maddr(address)
    assert words in str(caught.value)


def test_a_peer_of_a_link_needs_its_id_and_an_announced_address_its_port() -> None:
    with pytest.raises(LinkError, match="does not end in /p2p/<peer id>"):
        check_maddr("/ip4/127.0.0.1/tcp/1", peer=True)
    for address in ("/ip4/192.0.2.1/tcp/0", "/ip4/192.0.2.1/udp/00/quic"):
        assert check_maddr(address) == address
        with pytest.raises(LinkError, match="announces port 0"):
            check_maddr(address, announce=True)


def test_the_id_that_hivemind_makes_of_our_key_is_accepted(tmp_path: Path) -> None:
    ensure_libp2p_identity(tmp_path / "key")
    peer = PeerID.from_identity((tmp_path / "key").read_bytes()).to_base58()
    check_maddr(f"/ip4/127.0.0.1/tcp/1/p2p/{peer}", peer=True)


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/1", "/ip4/127.9.9.9/tcp/1", "/ip6/::1/tcp/1"])
def test_loopback_is_known(address: str) -> None:
    assert is_loopback(address)
    assert not is_loopback("/ip4/12.7.0.1/tcp/1")
