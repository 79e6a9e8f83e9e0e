"""Multiaddresses as people write them, checked without hivemind: loading it takes seconds, a typo should not.

    address = host transport [ "/p2p/" peer id ]
    host = ("/ip4/" | "/ip6/") address | ("/dns/" | "/dns4/" | "/dns6/" | "/dnsaddr/") name
    transport = "/tcp/" port [ "/ws" | "/wss" ] | "/udp/" port ("/quic" | "/quic-v1")

These are the forms that p2pd can listen on or dial (https://github.com/multiformats/multiaddr).
"""

import ipaddress
import re

from p2p_dilocox.errors import LinkError

__all__ = ["check_maddr", "is_loopback"]

_GOOD = "/ip4/203.0.113.5/tcp/31337"
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_TRANSPORTS = {"tcp": ("", "ws", "wss"), "udp": ("quic", "quic-v1")}
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_MAX_CHARACTERS = 200  # as in messages.Maddr


def check_maddr(text: str, *, peer: bool = False, announce: bool = False) -> str:
    """The multiaddress `text`, or LinkError that names the wrong part.

    peer: another peer's, which must end in /p2p/<peer id>; ours must not. announce: it must have a real port.
    """
    example = f"A good one: {_GOOD}{'/p2p/<peer id>' if peer else ''}"
    if not text or any(c.isspace() or not c.isprintable() for c in text):
        raise LinkError(f"address {text!r} is empty or has white space in it. {example}")
    if len(text) > _MAX_CHARACTERS:
        raise LinkError(
            f"address {text[:40]!r}... has {len(text)} characters, may have {_MAX_CHARACTERS}. {example}"
        )
    problem = _problem(text, peer=peer, announce=announce)
    if problem:
        raise LinkError(f"address {text!r} {problem}. {example}")
    return text


def is_loopback(maddr: str) -> bool:
    return maddr.startswith(("/ip4/127.", "/ip6/::1/"))


def _problem(text: str, *, peer: bool, announce: bool) -> str:
    """What follows "address '...' "; "" if nothing is wrong."""
    start, *parts = text.split("/")
    if start or not parts:
        return "is not a multiaddress: it must start with '/'"
    if "" in parts:
        return "is not a multiaddress: it has a '/' too many"
    parts += [""] * (6 - len(parts))
    host_kind, host, transport, port = parts[:4]
    if host_kind not in _HOSTS:
        return f"starts with protocol {host_kind}, must start with one of {', '.join(_HOSTS)}"
    if not _is_host(host_kind, host):
        return f"has {host!r} after /{host_kind}, which is not such a host"
    if transport not in _TRANSPORTS:
        return "has no /tcp/<port> after the host"
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        return f"has {port!r} as its {transport} port, must be a number from 0 to 65535"
    rest = 5 if parts[4] in _TRANSPORTS[transport] and parts[4] else 4
    if rest == 4 and "" not in _TRANSPORTS[transport]:
        return f"must have /{' or /'.join(_TRANSPORTS[transport])} after the {transport} port"
    left = [part for part in parts[rest:] if part]
    if left and (left[0] != "p2p" or len(left) > 2):
        return f"has {left[0] if left[0] != 'p2p' else left[2]!r} where only /p2p/<peer id> may follow"
    if left and not _is_peer_id(left[1] if len(left) == 2 else ""):
        return f"has {''.join(left[1:])!r} after /p2p, which is not a peer id: copy the whole address"
    if left and not peer:
        return "must leave out /p2p/...: the node adds its own peer id"
    if peer and not left:
        return "does not end in /p2p/<peer id>"
    if announce and int(port) == 0:
        return "announces port 0, which nobody can dial. Give the real port"
    return ""


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("ip"):
        try:
            return str(ipaddress.ip_address(host).version) == kind[-1] and "%" not in host
        except ValueError:
            return False
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))


def _is_peer_id(text: str) -> bool:
    """A multihash in base58: sha256 of an RSA key (Qm...), or a small key itself (12D3Koo...)."""
    if not 20 <= len(text) <= 80 or not set(text) <= set(_BASE58):
        return False
    number = 0
    for character in text:
        number = 58 * number + _BASE58.index(character)
    leading_zeros = len(text) - len(text.lstrip("1"))
    raw = bytes(leading_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    return (raw[0] == 0x12 and len(raw) == 34 or raw[0] == 0x00) and len(raw) == 2 + raw[1]
