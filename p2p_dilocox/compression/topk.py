"""The largest values of every block of 4096, with their places: top-k in chunks, as in SparseLoCo.

A fraction `top` of each block is kept; everything else decodes to zero. The places are 12 bits each. The
values kept are coded as intn.py codes any; at 2 bits, where its three levels would send half of them as zero,
with a table of four per block (SparseLoCo): the means of what is below -1.5 sigma, negative, positive, and
above 1.5 sigma, sigma the root mean square of what was kept.
"""

# n: values   B: blocks of _BLOCK, the last may be shorter   k: values kept

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from p2p_dilocox.compression.intn import decode, encode, encoded_bytes

__all__ = ["decode_top", "encode_top", "kept", "top_bytes"]

_BLOCK = 4096
_LEVELS = 4


def kept(n: int, top: float) -> int:
    """How many of n values are sent: of each block top times its length, rounded up."""
    return sum(count for _, _, count in _blocks(n, top))


def top_bytes(n: int, bits: int, group: int, top: float) -> int:
    """Exact length of encode_top() of n values, in bytes."""
    k = kept(n, top)
    places = 3 * ((k + 1) // 2)
    if bits == 2:
        return places + 2 * _LEVELS * -(-n // _BLOCK) + -(-k // 4)
    return places + encoded_bytes(k, bits, group)


def encode_top(values: Tensor, bits: int, group: int, top: float, *, decoded: Tensor | None = None) -> bytes:
    """n values as top_bytes(n, bits, group, top) bytes: places, then (2 bits) tables and codes, or an intn
    code of the values.

    values: any float dtype [n], on the CPU. decoded: [n], is given what decode_top() will make of the bytes;
    may be `values` itself. Raises ValueError as intn.encode().
    """
    values = values.detach()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("a value to encode is not finite")
    none = torch.empty(0, dtype=torch.int64)
    chosen = [(start, _largest(values[start:end], k)) for start, end, k in _blocks(len(values), top)]
    places = torch.cat([none, *(places for _, places in chosen)])
    flat = torch.cat([none, *(start + places for start, places in chosen)])
    picked = values[flat]
    if bits == 2:
        code, said = _encode_levels(picked.float(), len(values), top)
    else:
        said = torch.empty_like(picked)
        code = encode(picked, bits, group, decoded=said)
    if decoded is not None:
        decoded.zero_()
        decoded[flat] = said.to(decoded.dtype)
    return _pack_places(places) + code


def decode_top(data: bytes | bytearray | memoryview, n: int, bits: int, group: int, top: float) -> Tensor:
    """The n values of encode_top(), float32 [n] (float64 for bits 64), finite.

    data: may come from a stranger. Raises ValueError on a wrong length, places that do not grow within their
    block or lie outside of it, padding that is not zero, tables that are not finite, and as intn.decode().
    """
    view, k, expected = memoryview(data).cast("B"), kept(n, top), top_bytes(n, bits, group, top)
    if len(view) != expected:
        raise ValueError(f"{len(view)} bytes for {k} of {n} values, expected {expected}")
    cut = 3 * ((k + 1) // 2)
    places, at = _unpack_places(view[:cut], k), 0
    for start, end, count in _blocks(n, top):
        block = places[at : at + count]
        if bool((block.diff() <= 0).any()) or int(block[-1]) >= end - start:
            raise ValueError("the places of a block do not grow, or lie outside of it")
        block += start
        at += count
    values = _decode_levels(view[cut:], k, n, top) if bits == 2 else decode(view[cut:], k, bits, group)
    out = torch.zeros(n, dtype=values.dtype)
    out[places] = values
    return out


def _blocks(n: int, top: float) -> Iterator[tuple[int, int, int]]:
    """(start, end, values kept) of every block."""
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        yield start, start + length, min(length, math.ceil(top * length - 1e-9))


def _largest(block: Tensor, k: int) -> Tensor:
    """int64 [k], ascending places of the k largest absolute values."""
    return block.abs().topk(k, sorted=False).indices.sort().values


def _pack_places(places: Tensor) -> bytes:
    """Two places of 12 bits are three bytes, the first one lowest."""
    pairs = torch.nn.functional.pad(places, (0, len(places) % 2)).view(-1, 2)
    words = pairs[:, 0] | pairs[:, 1] << 12
    parts = torch.stack([words & 255, words >> 8 & 255, words >> 16], 1)
    return parts.to(torch.uint8).numpy().tobytes()


def _unpack_places(data: memoryview, k: int) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3).long()
    words = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
    places = torch.stack([words & 4095, words >> 12], 1).view(-1)
    if len(places) > k and int(places[k]):
        raise ValueError("the padding after the last place is not zero")
    return places[:k].clone()


def _encode_levels(picked: Tensor, n: int, top: float) -> tuple[bytes, Tensor]:
    """Tables [B, 4] of bfloat16, then 2 bits per value; and what they say, float32 [k]."""
    tables, codes, at = [], [], 0
    for _, _, count in _blocks(n, top):
        values = picked[at : at + count]
        at += count
        edge = 1.5 * values.double().square().mean().sqrt().float()
        code = (values >= -edge).long() + (values >= 0).long() + (values >= edge).long()
        sums = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, code, values.double())
        table = sums / torch.bincount(code, minlength=_LEVELS).clamp(min=1)
        tables.append(table.to(torch.bfloat16))
        codes.append(code)
    if not codes:
        return b"", picked
    table, code = torch.stack(tables), torch.cat(codes)
    quads = torch.nn.functional.pad(code, (0, -len(code) % 4)).view(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    said = torch.cat([t.float()[c] for t, c in zip(tables, codes, strict=True)])
    return table.view(torch.uint8).numpy().tobytes() + packed.to(torch.uint8).numpy().tobytes(), said


def _decode_levels(data: memoryview, k: int, n: int, top: float) -> Tensor:
    if k == 0:
        return torch.empty(0)
    cut = 2 * _LEVELS * -(-n // _BLOCK)
    tables = torch.frombuffer(bytearray(data[:cut]), dtype=torch.bfloat16).float().view(-1, _LEVELS)
    if not bool(torch.isfinite(tables).all()):
        raise ValueError("a table has a value that is not finite")
    packed = torch.frombuffer(bytearray(data[cut:]), dtype=torch.uint8).long()
    codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(-1)
    if int(codes[k:].sum()):
        raise ValueError("the padding after the last code is not zero")
    counts = torch.tensor([count for _, _, count in _blocks(n, top)])
    return tables[torch.arange(len(counts)).repeat_interleave(counts), codes[:k]]
