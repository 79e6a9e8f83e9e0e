"""Keys of a cluster, of an organiser and of a libp2p peer: made
once, kept in files that only their owner can read."""

import base64
import hashlib
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from p2p_dilocox.errors import NotTrustedError, StateError

__all__ = ["SigningKey", "cluster_id_of", "ensure_libp2p_identity", "is_signed_by"]


class SigningKey:
    """An ed25519 key. Whoever holds it speaks for a cluster or, as organiser, for a run."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def cluster_id(self) -> str:
        return cluster_id_of(self.public)

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)

    @classmethod
    def generate(cls) -> "SigningKey":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "SigningKey":
        """The key in `path` (32 raw bytes, mode 0600), made at the first call.

        Raises NotTrustedError if others may read the file, StateError if it is not such a key.
        """
        if not path.exists():
            key = cls.generate()
            raw = key._private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
            _write_private(path, raw)
            return key
        raw = _read_private(path)
        if len(raw) != 32:
            raise StateError(
                f"{path} has {len(raw)} bytes, an ed25519 key has 32. Move the file away to get a new key."
            )
        return cls(Ed25519PrivateKey.from_private_bytes(raw))


def cluster_id_of(public: bytes) -> str:
    """16 characters [a-z2-7] that name the holder of a public
    key: base32 of the first 10 bytes of its sha256."""
    return base64.b32encode(hashlib.sha256(public).digest()[:10]).decode().lower()


def is_signed_by(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def ensure_libp2p_identity(path: Path) -> bool:
    """Make the RSA key that gives a libp2p peer its id, in the file format hivemind reads. True if it is new.

    hivemind would make it too, but with the umask's mode for a moment (field report I4).
    """
    if path.exists():
        _read_private(path)
        return False
    private = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
    _write_private(path, private.SerializeToString())
    return True


def _write_private(path: Path, content: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except BaseException:
            path.unlink(missing_ok=True)  # half a key would be refused for ever
            raise
    except OSError as error:
        raise StateError(
            f"cannot write the key {path}: {error.strerror}. Choose a writable directory that is not full."
        ) from error


def _read_private(path: Path) -> bytes:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise NotTrustedError(
                f"{path} has mode {mode:04o}: others may read this key. Run `chmod 600 {path}` if it "
                "never left this machine, or delete it to get a new identity."
            )
        return path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read the key {path}: {error.strerror}") from error
