"""One chunk of a phase vector as bytes: a header that says how it is coded, then the code. See docs/wire.md.

The receiver knows what must come (it cut the vector itself); the header exists to turn a disagreement about
settings into a sentence instead of into wrong numbers.
"""

import struct
from typing import Final

import torch
from torch import Tensor

from p2p_dilocox.compression.intn import decode, encode, encoded_bytes
from p2p_dilocox.compression.topk import decode_top, encode_top, top_bytes

__all__ = ["HEADER_BYTES", "VERSION", "chunk_bytes", "code_bytes", "pack_chunk", "unpack_chunk"]

VERSION: Final = 3
"""Of the code, and of what stands where in a phase vector. docs/wire.md has what each version had."""
_HEADER: Final = struct.Struct("<BBHI")  # version, bits, group, n
HEADER_BYTES: Final = _HEADER.size


def code_bytes(n: int, bits: int, group: int, top: float = 1.0) -> int:
    """Exact length of a code of n values, in bytes."""
    return encoded_bytes(n, bits, group) if top == 1 else top_bytes(n, bits, group, top)


def chunk_bytes(n: int, bits: int, group: int, top: float = 1.0) -> int:
    """Exact length of pack_chunk() of n values, in bytes."""
    return HEADER_BYTES + code_bytes(n, bits, group, top)


def pack_chunk(
    values: Tensor, bits: int, group: int, top: float = 1.0, *, decoded: Tensor | None = None
) -> bytes:
    """Header and code of `values`, float [n]. n < 2^32, group < 2^16. Raises ValueError as encode() does.

    top: the part of the values that is sent, the largest of each block. decoded: if given, is filled with
    what unpack_chunk() will return.
    """
    if group >= 1 << 16 or len(values) >= 1 << 32:
        raise ValueError(f"group = {group}, n = {len(values)}: the header holds 16 and 32 bits of them")
    if top == 1:
        code = encode(values, bits, group, decoded=decoded)
    else:
        code = encode_top(values, bits, group, top, decoded=decoded)
    return _HEADER.pack(VERSION, bits, group, len(values)) + code


def unpack_chunk(
    data: bytes | bytearray | memoryview,
    *,
    n: int,
    bits: int,
    group: int,
    top: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The values of pack_chunk(), float32 [n] (float64 for bits 64). `data` may come from a stranger.

    n, bits, group, top: what the receiver expects. Raises ValueError, before memory is taken, if the header
    says anything else or the length does not fit, and as intn.decode() and topk.decode_top() do.
    """
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise ValueError(f"chunk of {len(view)} bytes, a header alone has {HEADER_BYTES}")
    found = dict(zip(("version", "bits", "group", "n"), _HEADER.unpack_from(view), strict=True))
    expected = {"version": VERSION, "bits": bits, "group": group, "n": n}
    for key, value in expected.items():
        if found[key] != value:
            raise ValueError(f"chunk has {key} = {found[key]}, expected {value}")
    if top < 1:
        return decode_top(view[HEADER_BYTES:], n, bits, group, top).to(device)
    return decode(view[HEADER_BYTES:], n, bits, group, device=device)
