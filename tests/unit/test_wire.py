"""Chunks on the wire: the header turns a disagreement into a sentence."""

import math
import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_dilocox.compression import BITS, HEADER_BYTES, chunk_bytes, decode, encode, pack_chunk, unpack_chunk

VALUES = torch.randn(203, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", BITS)
def test_a_chunk_is_the_header_and_the_code(bits: int) -> None:
    data = pack_chunk(VALUES, bits, 64)
    assert data == struct.pack("<BBHI", 3, bits, 64, 203) + encode(VALUES, bits, 64)
    assert len(data) == chunk_bytes(203, bits, 64)
    truth = decode(data[HEADER_BYTES:], 203, bits, 64)
    assert torch.equal(unpack_chunk(data, n=203, bits=bits, group=64), truth)
    assert torch.equal(unpack_chunk(memoryview(data), n=203, bits=bits, group=64), truth)


def test_every_truncated_prefix_is_refused() -> None:
    data = pack_chunk(VALUES, 4, 64)
    for k in range(len(data)):
        with pytest.raises(ValueError, match="bytes"):
            unpack_chunk(data[:k], n=203, bits=4, group=64)


@pytest.mark.parametrize(
    ("n", "bits", "group", "message"),
    [
        (204, 4, 64, "n = 203, expected 204"),
        (203, 8, 64, "bits = 4, expected 8"),
        (203, 4, 128, "group = 64, expected 128"),
    ],
)
def test_a_chunk_of_other_settings_is_refused_with_both_values(
    n: int, bits: int, group: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_chunk(pack_chunk(VALUES, 4, 64), n=n, bits=bits, group=group)


def test_another_version_is_refused() -> None:
    data = bytearray(pack_chunk(VALUES, 4, 64))
    data[0] = 1
    with pytest.raises(ValueError, match="version = 1, expected 3"):
        unpack_chunk(data, n=203, bits=4, group=64)


def test_random_bytes_are_refused() -> None:
    chance = random.Random(0)
    for length in [*range(40), *(chunk_bytes(203, 4, 64) for _ in range(100))]:
        with pytest.raises(ValueError, match=r"chunk|bytes"):
            unpack_chunk(b"\x03" + chance.randbytes(length), n=203, bits=4, group=64)


@given(
    values=st.lists(st.floats(-60_000, 60_000, width=16), max_size=300),
    bits=st.sampled_from(BITS),
    group=st.sampled_from([1, 8, 64, 65_528]),
)
def test_whatever_is_packed_comes_back(values: list[float], bits: int, group: int) -> None:
    data = pack_chunk(torch.tensor(values), bits, group)
    found = unpack_chunk(data, n=len(values), bits=bits, group=group).tolist()
    assert len(data) == chunk_bytes(len(values), bits, group)
    for start in range(0, len(values), group):
        largest = max(map(abs, values[start : start + group]))
        step = largest / (2 ** (bits - 1) - 1) * (1 + 2**-8) if bits <= 8 else 0.0
        for value, back in zip(values[start : start + group], found[start : start + group], strict=True):
            assert abs(value - back) <= step / 2 * (1 + 2**-6)
    assert pack_chunk(torch.tensor(found), bits, group) == data


@st.composite
def almost_chunks(draw: st.DrawFn) -> tuple[bytes, int, int, int]:
    """Noise, or a good chunk with a few bytes changed or missing; and the n, bits, group expected."""
    n, bits, group = draw(st.integers(0, 200)), draw(st.sampled_from(BITS)), draw(st.sampled_from([8, 64]))
    if draw(st.booleans()):
        header = struct.pack("<BBHI", 3, bits, group, n)
        size = chunk_bytes(n, bits, group) - HEADER_BYTES
        return (
            header + draw(st.binary(min_size=size, max_size=size + draw(st.integers(0, 1)))),
            n,
            bits,
            group,
        )
    data = bytearray(pack_chunk(VALUES[:1].expand(n).clone(), bits, group))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data), n, bits, group


@given(almost_chunks())
def test_bytes_of_a_stranger_are_refused_in_a_sentence_or_finite(chunk: tuple[bytes, int, int, int]) -> None:
    data, n, bits, group = chunk
    try:
        values = unpack_chunk(data, n=n, bits=bits, group=group)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    assert values.shape == (n,)
    assert all(map(math.isfinite, values.tolist()))


@given(st.binary(min_size=8, max_size=64), st.integers(1 << 33, 1 << 40), st.sampled_from(BITS))
def test_no_announced_size_takes_memory(data: bytes, n: int, bits: int) -> None:
    """A terabyte would not fit: the sizes are compared first, whoever names them."""
    with pytest.raises(ValueError, match=r"chunk has|bytes for"):
        unpack_chunk(data, n=n, bits=bits, group=64)
    with pytest.raises(ValueError, match=r"chunk has"):
        unpack_chunk(struct.pack("<BBHI", 3, bits, 64, 0xFFFFFFFF) + data, n=64, bits=bits, group=64)


def test_what_the_header_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="group = 65536"):
        pack_chunk(VALUES, 4, 65_536)
