"""One chunk of a phase vector as bytes: a header that says how it is coded, then the code. See docs/wire.md.

The receiver knows what must come (it cut the vector itself); the header exists to turn a disagreement about
settings into a sentence instead of into wrong numbers.
"""

import struct
from typing import Final

import torch
from torch import Tensor

from p2p_dilocox.compression.intn import decode, encode, encoded_bytes

__all__ = ["HEADER_BYTES", "VERSION", "chunk_bytes", "pack_chunk", "unpack_chunk"]

VERSION: Final = 2
"""Of the code, and of the order of values in a phase vector. 1: matrix by matrix, one width for all."""
_HEADER: Final = struct.Struct("<BBHI")  # version, bits, group, n
HEADER_BYTES: Final = _HEADER.size


def chunk_bytes(n: int, bits: int, group: int) -> int:
    """Exact length of pack_chunk() of n values, in bytes."""
    return HEADER_BYTES + encoded_bytes(n, bits, group)


def pack_chunk(values: Tensor, bits: int, group: int, *, decoded: Tensor | None = None) -> bytes:
    """Header and code of `values`, float [n]. n < 2^32, group < 2^16. Raises ValueError as encode() does.

    decoded: if given, is filled with what unpack_chunk() will return.
    """
    if group >= 1 << 16 or len(values) >= 1 << 32:
        raise ValueError(f"group = {group}, n = {len(values)}: the header holds 16 and 32 bits of them")
    code = encode(values, bits, group, decoded=decoded)
    return _HEADER.pack(VERSION, bits, group, len(values)) + code


def unpack_chunk(
    data: bytes | bytearray | memoryview, *, n: int, bits: int, group: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The values of pack_chunk(), float32 [n] (float64 for bits 64). `data` may come from a stranger.

    n, bits, group: what the receiver expects. Raises ValueError, before memory is taken, if the header says
    anything else or the length does not fit, and as intn.decode() does.
    """
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise ValueError(f"chunk of {len(view)} bytes, a header alone has {HEADER_BYTES}")
    found = dict(zip(("version", "bits", "group", "n"), _HEADER.unpack_from(view), strict=True))
    expected = {"version": VERSION, "bits": bits, "group": group, "n": n}
    for key, value in expected.items():
        if found[key] != value:
            raise ValueError(f"chunk has {key} = {found[key]}, expected {value}")
    return decode(view[HEADER_BYTES:], n, bits, group, device=device)
