"""Few-bit codes in groups: n floats become 2 to 8 bits each plus one bfloat16 scale per group.

Symmetric absmax, round to nearest, as in the QSGD family (arXiv 1610.02132) without its random rounding,
which only adds variance here. What is special: coding is idempotent. The scale of a decoded group is the
scale it was decoded with, so encode(decode(encode(x))) == encode(x) byte for byte, and a message that was
rounded beforehand (`round_trip`) crosses the wire without loss. Error feedback rests on that: what a cluster
rounded is exactly what the others decode.

The bytes are written down in docs/wire.md.
"""

# n: values   k: values of one chunk   g: group, values that share a scale   q = 2^(bits-1) - 1: largest code

import math
import struct
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["BITS", "decode", "encode", "encoded_bytes", "round_trip"]

BITS: Final = (2, 3, 4, 8, 16, 32, 64)
"""What `bits` may be. 2, 3, 4, 8: codes with scales. 16, 32, 64: plain IEEE floats; the group is ignored."""

_FLOATS: Final = {16: torch.float16, 32: torch.float32, 64: torch.float64}
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max
_SMALLEST_SCALE: Final = 2.0**-126  # smallest normal float32: devices disagree about anything below
_SMALLEST_SCALE_BITS: Final = 0x0080  # the same as bfloat16
# float32 has a spacing of 1 here, so adding it rounds to the nearest integer, ties to even.
_ROUND: Final = 1.5 * 2.0**23
_JOINS: Final = {2: (2, 4), 4: (4,), 8: ()}  # widths at which neighbours become one, until a byte is full
_CHUNK_CPU: Final = 1 << 18  # values; fewer cost calls, many more cost cache misses (measured)
_CHUNK_OTHER: Final = 1 << 24  # values; an accelerator wants few launches


def encoded_bytes(n: int, bits: int, group: int) -> int:
    """Exact length of encode() of n values, in bytes. Raises ValueError if an argument is out of range."""
    if bits not in BITS:
        raise ValueError(f"bits = {bits}, must be one of {', '.join(map(str, BITS))}")
    if group < 1:
        raise ValueError(f"group = {group}, must be at least 1 (values that share a scale); take 64")
    if n < 0:
        raise ValueError(f"n = {n}, the number of values cannot be negative")
    if bits in _FLOATS:
        return n * bits // 8
    return 2 * -(-n // group) + -(-n * bits // 8)


def encode(values: Tensor, bits: int, group: int, *, decoded: Tensor | None = None) -> bytes:
    """n values as encoded_bytes(n, bits, group) bytes.

    values: any float dtype [n], any device; computed in float32 (float64 for bits 64).
    decoded: [n] on the same device; is given what decode() will make of the bytes, for half of its price. May
    be `values` itself.
    With bits <= 8 and scale s of its group, each value comes back within s/2 * (1 + 2^-7). A group whose
    scale would be subnormal (all |x| below about q * 2^-126) comes back as zeros.
    Raises ValueError on NaN or infinity, also where a narrower float would overflow.
    """
    n = _length(values)
    out = bytearray(encoded_bytes(n, bits, group))
    if n == 0:
        return b""
    if decoded is not None and decoded.shape != values.shape:
        raise ValueError(f"decoded is {list(decoded.shape)}, values are {list(values.shape)}")
    if bits in _FLOATS:
        floats = _as_floats(values, bits)
        torch.frombuffer(out, dtype=_FLOATS[bits]).copy_(floats)
        if decoded is not None:
            decoded.copy_(floats)
        return bytes(out)
    groups = -(-n // group)
    scales_out = torch.frombuffer(out, dtype=torch.bfloat16, count=groups)
    codes_out = torch.frombuffer(out, dtype=torch.uint8, offset=2 * groups)
    step = _chunk_length(group, values.device)
    for start in range(0, n, step):
        k = min(step, n - start)
        scales, shifted = _quantise(values[start : start + k], bits, group)
        # The low byte of the bit pattern of (_ROUND + an integer) is that integer: nothing to convert.
        packed = _pack(shifted.view(torch.int32).to(torch.uint8).view(-1)[:k], bits)
        first = start // group
        scales_out[first : first + len(scales)] = scales
        codes_out[start * bits // 8 : start * bits // 8 + len(packed)] = packed
        if decoded is not None:
            decoded[start : start + k] = _dequantise(scales, shifted, bits)[:k]
    return bytes(out)


def decode(
    data: bytes | bytearray | memoryview, n: int, bits: int, group: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """The n values of encode(), float32 [n] on `device` (float64 for bits 64).

    data: may come from a stranger. What is returned is finite.
    Raises ValueError, before any memory is taken, if the length is not encoded_bytes(n, bits, group); then on
    scales that are negative, subnormal, non-finite or would overflow, on codes outside [-q, q], on padding
    that is not zero, and on non-finite floats.
    """
    expected = encoded_bytes(n, bits, group)
    view = memoryview(data).cast("B")
    if len(view) != expected:
        what = f"{n} values of {bits} bits in groups of {group}"
        raise ValueError(f"{len(view)} bytes for {what}, expected {expected}")
    device = torch.device(device)
    if bits in _FLOATS:
        floats = _tensor(view, _FLOATS[bits]).to(device)
        _require_finite(floats, "a coded value")
        return floats if bits == 64 else floats.to(torch.float32)
    groups = -(-n // group)
    scales = _checked_scales(_tensor(view[: 2 * groups], torch.int16), bits).to(device)
    packed = view[2 * groups :]
    out = torch.empty(n, dtype=torch.float32, device=device)
    step = _chunk_length(group, device)
    for start in range(0, n, step):
        k = min(step, n - start)
        chunk = packed[start * bits // 8 : -(-(start + k) * bits // 8)]
        codes = _unpack(_tensor(chunk, torch.uint8).to(device), bits)
        if int(codes[:k].amin()) == 0:
            q = _largest_code(bits)
            raise ValueError(f"a code is {-q - 1}, codes of {bits} bits are from {-q} to {q}")
        if len(codes) > k and int(codes[k:].amax()) != 0:
            raise ValueError("the padding after the last code is not zero")
        rows = _rows(codes[:k].to(torch.float32).sub_(1 << (bits - 1)), group)
        first = start // group
        rows.mul_(scales[first : first + len(rows), None])
        out[start : start + k] = rows.view(-1)[:k]
    return out


def round_trip(values: Tensor, bits: int, group: int) -> Tensor:
    """decode(encode(values)) without the bytes, bit for bit: what the others will see of these values.

    values: any float dtype [n]. Returns a new tensor [n] on the same device, float32 (float64 for bits 64).
    Raises ValueError as encode() does.
    """
    n = _length(values)
    encoded_bytes(n, bits, group)
    if bits in _FLOATS:
        floats = _as_floats(values, bits)
        return floats.clone() if bits == 64 else floats.to(torch.float32, copy=True)
    out = torch.empty(n, dtype=torch.float32, device=values.device)
    step = _chunk_length(group, values.device)
    for start in range(0, n, step):
        k = min(step, n - start)
        scales, shifted = _quantise(values[start : start + k], bits, group)
        out[start : start + k] = _dequantise(scales, shifted, bits)[:k]
    return out


def _quantise(values: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """(scales bfloat16 [groups], shifted float32 [groups, g]); shifted = _ROUND + 2^(bits-1) + code, exactly.

    Codes cannot leave [-q, q]: the scale is absmax/q within a factor 1 +- 2^-8, and q * 2^-8 < 1/2. Where the
    scale is capped (so that q * scale stays finite) the largest
    quotient still rounds to q; a test walks that edge.
    """
    q = _largest_code(bits)
    rows = _rows(values.detach().to(torch.float32), group)
    absmax = rows.abs().amax(1)
    _require_finite(absmax, "a value to encode")
    scales = absmax.div_(q).clamp_(max=_largest_scale(bits)).to(torch.bfloat16)
    scales.masked_fill_(scales < _SMALLEST_SCALE, 0.0)
    # Division, not multiplication by 1 / scale, which is subnormal or infinite at the ends of the range.
    divisors = scales.to(torch.float32).masked_fill_(scales == 0, 1.0)
    return scales, (rows / divisors[:, None]).add_(_ROUND + (1 << (bits - 1)))


def _dequantise(scales: Tensor, shifted: Tensor, bits: int) -> Tensor:
    """The values of _quantise's result as decode() makes them, float32 [groups * g]. Overwrites `shifted`."""
    # (_ROUND + offset) - (_ROUND + offset) is +0.0 also for negative values, as in decode.
    return shifted.sub_(_ROUND + (1 << (bits - 1))).mul_(scales.to(torch.float32)[:, None]).view(-1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [k] codes, each below 2^bits -> uint8 [ceil(k * bits / 8)]. Overwrites `codes`.

    Code i takes the bits from i * bits on, counted from the lowest bit of the first byte. Where two codes fit
    into a byte, neighbours are joined until they fill it. Else eight codes are one int64; three shifts close
    the gaps between neighbours, pairs and fours.
    """
    k = len(codes)
    codes = pad(codes, (0, -k % 8)) if k % 8 and bits < 8 else codes
    if bits != 3:
        for width in _JOINS[bits]:
            pairs = codes.view(torch.int16)
            codes = pairs.bitwise_or_(pairs >> (8 - width)).to(torch.uint8)  # the low byte of each
        return codes[: -(-k * bits // 8)]
    words = codes.view(torch.int64)
    for width in (1, 2, 4):  # neighbours to be joined, each `width * bits` wide in lanes of `8 * width` bits
        words.bitwise_or_(words >> width * (8 - bits)).bitwise_and_(_lanes(16 * width, 2 * width * bits))
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: -(-k * bits // 8)]


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of _pack: uint8 [ceil(k * bits / 8)] -> uint8 [k, or up to 7 more]."""
    if bits != 3:
        for width in reversed(_JOINS[bits]):
            pairs = packed.to(torch.int16)
            pairs.bitwise_or_(pairs << (8 - width)).bitwise_and_(_lanes(8, width) & 0xFFFF)
            packed = pairs.view(torch.uint8)
        return packed
    eights = pad(packed, (0, -len(packed) % bits)).view(-1, bits)
    words = pad(eights, (0, 8 - bits)).view(torch.int64)
    for width in (4, 2, 1):
        words.bitwise_or_(words << width * (8 - bits)).bitwise_and_(_lanes(8 * width, width * bits))
    return words.view(-1).view(torch.uint8)


def _lanes(lane: int, ones: int) -> int:
    """64-bit mask with the low `ones` bits of every `lane` bits set."""
    return sum(((1 << ones) - 1) << shift for shift in range(0, 64, lane))


def _checked_scales(patterns: Tensor, bits: int) -> Tensor:
    """bfloat16 bit patterns as int16 [groups] -> float32 [groups], or ValueError."""
    # Positive bfloat16 sort like their patterns; infinity and NaN are above all, negative ones below 0.
    largest = struct.unpack("<I", struct.pack("<f", _largest_scale(bits)))[0] >> 16
    good = (patterns == 0) | ((patterns >= _SMALLEST_SCALE_BITS) & (patterns <= largest))
    if not bool(good.all()):
        found = float(patterns[~good][0].view(torch.bfloat16))
        limits = f"{_SMALLEST_SCALE:.4g} to {_largest_scale(bits):.4g}"
        raise ValueError(f"a scale is {found}, must be 0 or from {limits} for {bits} bits")
    return patterns.view(torch.bfloat16).to(torch.float32)


def _largest_code(bits: int) -> int:
    return int((1 << (bits - 1)) - 1)


def _largest_scale(bits: int) -> float:
    """The largest bfloat16 s for which q * s is a finite float32."""
    pattern = struct.unpack("<I", struct.pack("<f", _FLOAT32_MAX / _largest_code(bits)))[0] & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])


def _chunk_length(group: int, device: torch.device) -> int:
    """Values per chunk: whole groups and whole bytes."""
    step = math.lcm(group, 8)
    return step * max(1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK_OTHER) // step)


def _rows(values: Tensor, group: int) -> Tensor:
    """[k] -> [ceil(k / g), g], padded with zeros, which never raise the largest absolute value."""
    missing = -len(values) % group
    return (pad(values, (0, missing)) if missing else values).reshape(-1, group)


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A copy of the bytes: torch warns about tensors on read-only memory."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def _as_floats(values: Tensor, bits: int) -> Tensor:
    floats = values.detach().to(_FLOATS[bits])
    _require_finite(floats, f"a value to encode as float{bits}")
    return floats


def _require_finite(values: Tensor, what: str) -> None:
    step = _chunk_length(1, values.device)
    for start in range(0, len(values), step):
        if not math.isfinite(float(values[start : start + step].abs().amax())):
            raise ValueError(f"{what} is not finite")


def _length(values: Tensor) -> int:
    if values.dim() != 1 or not values.is_floating_point():
        raise ValueError(f"values are {values.dtype} {list(values.shape)}, must be floats [n]")
    return len(values)
