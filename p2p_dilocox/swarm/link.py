"""The join link: all a volunteer needs to find a run and to know that it is the organiser's."""

import base64
import binascii
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from p2p_dilocox.errors import LinkError

__all__ = ["RUN_ID", "JoinLink", "check_maddr", "is_loopback"]

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_GOOD_LINK = "dilocox://my-run?key=<43 characters>&peer=/ip4/203.0.113.5/tcp/31337/p2p/<peer id>"
_GOOD_MADDR = "/ip4/203.0.113.5/tcp/31337"


@dataclass(frozen=True)
class JoinLink:
    """`organiser`: the 32-byte ed25519 public key that signed the run spec. `peers`: full multiaddresses,
    any suffices."""

    run_id: str
    organiser: bytes
    peers: tuple[str, ...]

    def __str__(self) -> str:
        key = base64.urlsafe_b64encode(self.organiser).decode().rstrip("=")
        peers = "".join(f"&peer={quote(peer, safe='/:.')}" for peer in self.peers)
        return f"dilocox://{self.run_id}?key={key}{peers}"

    @classmethod
    def parse(cls, text: str) -> "JoinLink":
        """Raises LinkError that names what is wrong with which part."""
        text = text.strip()
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise LinkError(f"{text!r} is not a join link ({error}). One looks like {_GOOD_LINK}") from error
        if parts.scheme != "dilocox":
            raise LinkError(
                f"{text!r} is not a join link: it must start with dilocox://. One looks like {_GOOD_LINK}"
            )
        if not RUN_ID.fullmatch(parts.netloc):
            raise LinkError(f"run id {parts.netloc!r} in the join link: must be 1 to 32 of a-z, 0-9 and '-'")
        query = parse_qsl(parts.query, keep_blank_values=True)
        unknown = {name for name, _ in query} - {"key", "peer"}
        if unknown:
            raise LinkError(f"join link has an unknown part {min(unknown)!r}; known are key and peer")
        keys = [value for name, value in query if name == "key"]
        if len(keys) != 1:
            raise LinkError(f"join link has {len(keys)} keys, must have one. One looks like {_GOOD_LINK}")
        try:
            organiser = base64.b64decode(keys[0] + "=" * (-len(keys[0]) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise LinkError(
                f"key {keys[0]!r} in the join link is not base64url: copy the whole link"
            ) from error
        if len(organiser) != 32:
            raise LinkError(
                f"key {keys[0]!r} in the join link has {len(organiser)} bytes, must have 32: copy it whole"
            )
        peers = tuple(check_maddr(value, peer=True) for name, value in query if name == "peer")
        if not peers:
            raise LinkError(f"join link names no peer to start from. One looks like {_GOOD_LINK}")
        return cls(parts.netloc, organiser, peers)


def check_maddr(text: str, *, peer: bool = False, announce: bool = False) -> str:
    """The multiaddress `text`, or LinkError. `peer`: must end in /p2p/<id>. `announce`: must have a real
    port."""
    example = f"A good one: {_GOOD_MADDR}{'/p2p/<peer id>' if peer else ''}"
    if not text or text != text.strip() or any(c.isspace() for c in text):
        raise LinkError(f"address {text!r} is empty or has white space in it. {example}")
    try:
        maddr = Multiaddr(text)
        protocols = [protocol.name for protocol in maddr.protocols()]
    except (MultiaddrError, ValueError, KeyError) as error:
        raise LinkError(f"address {text!r} is not a multiaddress ({error}). {example}") from error
    if not protocols or protocols[0] not in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"):
        raise LinkError(
            f"address {text!r} starts with {(protocols or ['nothing'])[0]!r}, not a host. {example}"
        )
    if not {"tcp", "udp"} & set(protocols):
        raise LinkError(f"address {text!r} has no /tcp/<port>. {example}")
    if peer and "p2p" not in protocols:
        raise LinkError(f"address {text!r} does not end in /p2p/<peer id>. {example}")
    if announce and "0" in (_value(maddr, "tcp"), _value(maddr, "udp")):
        raise LinkError(
            f"address {text!r} announces port 0, which nobody can dial. Give the real port. {example}"
        )
    return text


def is_loopback(maddr: str) -> bool:
    return maddr.startswith(("/ip4/127.", "/ip6/::1/"))


def _value(maddr: Multiaddr, protocol: str) -> str | None:
    try:
        return str(maddr[protocol])
    except (MultiaddrError, LookupError):
        return None
