"""Chunks on the wire: the header turns a disagreement into a sentence."""

import random
import struct

import pytest
import torch

from p2p_dilocox.compression import BITS, HEADER_BYTES, chunk_bytes, decode, encode, pack_chunk, unpack_chunk

VALUES = torch.randn(203, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", BITS)
def test_a_chunk_is_the_header_and_the_code(bits: int) -> None:
    data = pack_chunk(VALUES, bits, 64)
    assert data == struct.pack("<BBHI", 1, bits, 64, 203) + encode(VALUES, bits, 64)
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
    data[0] = 2
    with pytest.raises(ValueError, match="version = 2, expected 1"):
        unpack_chunk(data, n=203, bits=4, group=64)


def test_random_bytes_are_refused() -> None:
    chance = random.Random(0)
    for length in [*range(40), *(chunk_bytes(203, 4, 64) for _ in range(100))]:
        with pytest.raises(ValueError, match=r"chunk|bytes"):
            unpack_chunk(b"\x02" + chance.randbytes(length), n=203, bits=4, group=64)


def test_what_the_header_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="group = 65536"):
        pack_chunk(VALUES, 4, 65_536)
