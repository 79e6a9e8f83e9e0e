"""The run spec with the organiser's signature: what the DHT carries and every joiner checks."""

import hashlib
from typing import Annotated

import msgspec

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.identity import SigningKey, is_signed_by
from p2p_dilocox.swarm.messages import Message, unpack

__all__ = ["SignedRun", "sign_run", "spec_digest"]

MAX_SPEC_BYTES = 64 * 1024


class SignedRun(Message, frozen=True, kw_only=True):
    """`text`: the bytes of run.toml. The signature covers them and the run id."""

    run_id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\Z")]
    text: Annotated[str, msgspec.Meta(max_length=MAX_SPEC_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    def verify(self, organiser: bytes) -> str:
        """The text of run.toml, or NotTrustedError if the holder of
        `organiser` (ed25519 public key) did not sign it."""
        if not is_signed_by(organiser, self.signature, _signed_part(self.run_id, self.text)):
            raise NotTrustedError(
                f"the run spec of {self.run_id!r} is not signed by the key in the join link. "
                "Ask the organiser for a new link."
            )
        return self.text

    @classmethod
    def from_bytes(cls, data: bytes) -> "SignedRun":
        return unpack(data, cls)


def sign_run(key: SigningKey, run_id: str, text: str) -> SignedRun:
    return SignedRun(run_id=run_id, text=text, signature=key.sign(_signed_part(run_id, text)))


def spec_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _signed_part(run_id: str, text: str) -> bytes:
    return b"\0".join((b"dilocox", b"run", run_id.encode(), text.encode()))
