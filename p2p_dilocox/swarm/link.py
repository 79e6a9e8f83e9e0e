"""The join link: all a volunteer needs to find a run and to know that it is the organiser's."""

import base64
import binascii
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

from p2p_dilocox.errors import LinkError
from p2p_dilocox.settings import RUN_ID
from p2p_dilocox.swarm.maddr import check_maddr

__all__ = ["JoinLink"]

_GOOD_LINK = "dilocox://my-run?key=<43 characters>&peer=/ip4/203.0.113.5/tcp/31337/p2p/<peer id>"


@dataclass(frozen=True)
class JoinLink:
    """`organiser`: the 32-byte ed25519 public key that signed the run
    spec. `peers`: full multiaddresses, any suffices."""

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
        shown = repr(text if len(text) <= 80 else f"{text[:80]}...")
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise LinkError(f"{shown} is not a join link ({error}). One looks like {_GOOD_LINK}") from error
        if parts.scheme != "dilocox":
            raise LinkError(
                f"{shown} is not a join link: it must start with dilocox://. One looks like {_GOOD_LINK}"
            )
        if not RUN_ID.fullmatch(parts.netloc):
            raise LinkError(f"run id {parts.netloc!r} in the join link: must be 1 to 32 of a-z, 0-9 and '-'")
        if parts.path or parts.fragment:
            raise LinkError(
                f"join link has {parts.path or '#' + parts.fragment!r} in it, which belongs to no link. "
                f"One looks like {_GOOD_LINK}"
            )
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
