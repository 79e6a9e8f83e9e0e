"""A file as pieces, each with its sha256: what a checkpoint's manifest says of its files, and how a joiner
fetches one from several donors at once and finds the one that lies."""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

__all__ = ["FileDigest", "PieceHasher", "digest_file", "piece_bytes", "read_piece"]

_LEAST_BYTES = 1 << 20
_MOST_PIECES = 512
MAX_FILE_BYTES = 1 << 44

PieceDigest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def piece_bytes(size: int) -> int:
    """How long each piece but the last of a file of `size` bytes is: 1 MiB, more if there were over 512."""
    return max(_LEAST_BYTES, -(-size // _MOST_PIECES))


class FileDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """size: of the file in bytes. pieces: the sha256 of each. `root` stands for all of it."""

    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILE_BYTES)]
    pieces: Annotated[list[PieceDigest], msgspec.Meta(min_length=1, max_length=_MOST_PIECES)]

    @property
    def root(self) -> str:
        return hashlib.sha256(self.size.to_bytes(8, "little") + b"".join(self.pieces)).hexdigest()

    @property
    def whole(self) -> bool:
        """Whether there are as many pieces as the size asks for."""
        return len(self.pieces) == -(-self.size // piece_bytes(self.size))

    def length(self, piece: int) -> int:
        """Of piece number `piece`, in bytes."""
        return min(piece_bytes(self.size), self.size - piece * piece_bytes(self.size))

    def fits(self, piece: int, content: bytes | bytearray) -> bool:
        return hashlib.sha256(content).digest() == self.pieces[piece]


class PieceHasher:
    """The digest of a file of known size while it is written."""

    def __init__(self, size: int) -> None:
        self._size, self._pieces = size, list[bytes]()
        self._sha, self._left = hashlib.sha256(), piece_bytes(size)

    def update(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            part, view = view[: self._left], view[self._left :]
            self._sha.update(part)
            self._left -= len(part)
            if not self._left:
                self._end_piece()

    def digest(self) -> FileDigest:
        if self._left < piece_bytes(self._size):
            self._end_piece()
        return FileDigest(size=self._size, pieces=self._pieces)

    def _end_piece(self) -> None:
        self._pieces.append(self._sha.digest())
        self._sha, self._left = hashlib.sha256(), piece_bytes(self._size)


def digest_file(path: Path) -> FileDigest:
    """Raises OSError; ValueError for an empty file."""
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty")
    hasher = PieceHasher(size)
    with path.open("rb") as file:
        while part := file.read(_LEAST_BYTES):
            hasher.update(part)
    return hasher.digest()


def read_piece(path: Path, piece: int) -> bytes:
    """Raises OSError; ValueError if the file has no such piece."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        length = piece_bytes(size)
        if not 0 <= piece * length < size:
            raise ValueError(f"{path.name} has no piece {piece}")
        file.seek(piece * length)
        return file.read(length)
