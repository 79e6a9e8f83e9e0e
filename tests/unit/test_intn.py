"""Few-bit codes against independent truth: numpy and Python integers that share no code with the library."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from p2p_dilocox.compression import BITS, decode, encode, encoded_bytes, round_trip

CODED = (2, 3, 4, 8)
FLOAT32_MAX = torch.finfo(torch.float32).max
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def nasty() -> dict[str, Tensor]:
    """Float32 vectors that break careless quantisers."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randint(-(2**31), 2**31, (20_000,), generator=generator, dtype=torch.int64)
    every_exponent = patterns.to(torch.int32).view(torch.float32)
    return {
        "normal": normal(5_003),
        "every exponent": every_exponent[every_exponent.isfinite()],
        "zeros": torch.zeros(130),
        "negative zeros": torch.full((130,), -0.0),
        "one outlier": torch.cat([torch.full((63,), 1e-30), torch.tensor([3e38])]).repeat(5),
        "largest floats": torch.tensor([FLOAT32_MAX, -FLOAT32_MAX, 1.0] * 50),
        "subnormals": torch.linspace(-1e-39, 1e-39, 301),
        "around the smallest normal": 2.0**-126 * torch.linspace(-300, 300, 1_201),
        "ties": torch.arange(-127, 128).repeat(4) / 2,
        "one value": torch.tensor([-0.3]),
        "wide and narrow": normal(4_097) * torch.logspace(-44, 37, 4_097),
        "empty": torch.zeros(0),
    }


def bits_of(values: Tensor) -> bytes:
    return bytes(values.numpy().tobytes())


def numpy_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, kept as float32."""
    patterns = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (patterns + 0x7FFF + ((patterns >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def test_int4_bytes_equal_a_numpy_reference() -> None:
    n, group = 64 * 40, 64
    values = normal(n).numpy()
    rows = values.reshape(-1, group)
    scales = numpy_bfloat16(np.abs(rows).max(1) / np.float32(7))
    codes = np.rint(rows / scales[:, None]).astype(np.int64) + 8
    low, high = codes.reshape(-1, 2).T
    packed = (low | high << 4).astype("u1").tobytes()
    expected = (scales.view(np.uint32) >> 16).astype("<u2").tobytes() + packed
    assert encode(torch.from_numpy(values), 4, group) == expected


@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize("n", [1, 5, 8, 21, 64, 203])
def test_codes_are_one_little_endian_bit_string(bits: int, n: int) -> None:
    q = 2 ** (bits - 1) - 1
    codes = [q, *random.Random(n).choices(range(-q, q + 1), k=n - 1)]
    data = encode(torch.tensor(codes, dtype=torch.float32), bits, n)  # one group, scale 1
    string = sum((code + q + 1) << (bits * i) for i, code in enumerate(codes))
    assert data == b"\x80\x3f" + string.to_bytes(math.ceil(n * bits / 8), "little")


@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize("group", [1, 7, 64, 128])
@pytest.mark.parametrize("name", nasty())
def test_every_value_comes_back_within_half_a_step(name: str, bits: int, group: int) -> None:
    values = nasty()[name]
    coded = encode(values, bits, group)
    groups = math.ceil(len(values) / group)
    scales = np.frombuffer(coded[: 2 * groups], "<u2").astype(np.uint32) << 16
    step = scales.view(np.float32).astype(np.float64).repeat(group)[: len(values)]
    error = np.abs(values.double().numpy() - decode(coded, len(values), bits, group).double().numpy())
    flushed = (2 ** (bits - 1) - 1) * 2.0**-126
    assert (error <= np.where(step > 0, step / 2 * (1 + 2**-7), flushed)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [1, 7, 64, 128])
@pytest.mark.parametrize("name", nasty())
def test_coding_is_idempotent_byte_for_byte(name: str, bits: int, group: int) -> None:
    values = nasty()[name]
    values = values.clamp(-65504, 65504) if bits == 16 else values
    once = encode(values, bits, group)
    assert encode(decode(once, len(values), bits, group), bits, group) == once


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [1, 7, 64, 128])
@pytest.mark.parametrize("name", nasty())
def test_round_trip_is_decode_of_encode_bit_for_bit(name: str, bits: int, group: int) -> None:
    values = nasty()[name]
    values = values.clamp(-65504, 65504) if bits == 16 else values
    result = round_trip(values, bits, group)
    truth = decode(encode(values, bits, group), len(values), bits, group)
    assert (result.dtype, bits_of(result)) == (truth.dtype, bits_of(truth))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["normal", "every exponent", "one value", "empty"])
def test_encode_tells_what_decode_will_make_of_it(name: str, bits: int) -> None:
    values = nasty()[name]
    if bits == 16:
        values = values.clamp(-65_000, 65_000)
    values = values.double() if bits == 64 else values
    decoded = torch.full_like(values, 7.0)
    data = encode(values, bits, 64, decoded=decoded)
    assert data == encode(values, bits, 64)
    assert bits_of(decoded) == bits_of(decode(data, len(values), bits, 64))
    assert encode(values, bits, 64, decoded=values) == data
    assert torch.equal(values, decoded)
    with pytest.raises(ValueError, match=r"decoded is \[1, 3\]"):
        encode(torch.zeros(3), bits, 64, decoded=torch.zeros(1, 3))


@pytest.mark.parametrize("bits", CODED)
def test_the_largest_value_of_a_group_gets_the_largest_code_at_every_scale(bits: int) -> None:
    # Every positive bfloat16 and the points half way to its neighbours, where a scale is rounded most.
    q = 2 ** (bits - 1) - 1
    patterns = torch.arange(0x0080 << 1, 0x7F80 << 1, dtype=torch.int32) << 15
    grid = patterns.view(torch.float32)
    below, above = (grid.nextafter(torch.tensor(end)) for end in (0.0, math.inf))
    values = torch.cat([grid, below, above]) * q
    values = torch.cat([values[values.isfinite()], torch.tensor([FLOAT32_MAX])])
    coded = encode(values, bits, 1)
    packed = np.frombuffer(coded[2 * len(values) :], np.uint8)
    string = np.unpackbits(packed, bitorder="little")[: bits * len(values)].reshape(-1, bits)
    codes = (string * 2 ** np.arange(bits)).sum(1) - (q + 1)
    nonzero = np.frombuffer(coded[: 2 * len(values)], "<u2") > 0
    assert nonzero.sum() > 180_000
    assert (codes[nonzero] == q).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_ties_go_to_the_even_code_at_every_scale(bits: int) -> None:
    # Fails for value * (1 / scale), whose product is a little off a half where 1 / scale is rounded.
    q = 2 ** (bits - 1) - 1
    scales = (torch.arange(0x3F80, 0x4000, dtype=torch.int32) << 16).view(torch.float32)
    for half in range(q):
        rows = torch.tensor([q, half + 0.5, -half - 0.5]) * scales[:, None]
        even = half + half % 2
        decoded = round_trip(rows.view(-1), bits, 3).view(-1, 3) / scales[:, None]
        assert torch.equal(decoded, torch.tensor([q, even, -even]).expand_as(decoded))


@pytest.mark.parametrize("bits", BITS)
def test_float64_is_lossless_and_the_rest_is_float32(bits: int) -> None:
    values = normal(100).double() / 3
    result = decode(encode(values, bits, 64), 100, bits, 64)
    assert result.dtype == (torch.float64 if bits == 64 else torch.float32)
    if bits >= 32:
        assert torch.equal(result, values.to(result.dtype))


@pytest.mark.parametrize("bits", BITS)
def test_encoded_bytes_is_the_length(bits: int) -> None:
    for n in [*range(70), 1_000, 70_001]:
        for group in (1, 3, 8, 64, 100, 65_536):
            assert len(encode(torch.ones(n), bits, group)) == encoded_bytes(n, bits, group)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [24, 64, 100])
def test_parts_of_whole_groups_decode_to_the_same_values_as_the_whole(bits: int, group: int) -> None:
    values = normal(400_000)  # several chunks, so chunk borders are crossed
    cuts = [0, 10 * group, 11 * group, 1_000 * group, 400_000]
    parts = [round_trip(values[a:b], bits, group) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    whole = decode(encode(values, bits, group), len(values), bits, group)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("device", DEVICES)
def test_strides_dtypes_and_devices_do_not_change_the_bytes(bits: int, device: str) -> None:
    values = normal(1_001).to(torch.bfloat16)
    truth = encode(values.float(), bits, 64)
    assert encode(values.to(device), bits, 64) == truth
    assert encode(values.float().repeat_interleave(2).to(device)[::2], bits, 64) == truth
    there = decode(truth, 1_001, bits, 64, device=device)
    assert bits_of(there.cpu()) == bits_of(decode(truth, 1_001, bits, 64))


@pytest.mark.parametrize("bits", BITS)
def test_input_is_left_as_it_was_and_results_own_their_memory(bits: int) -> None:
    values = normal(1_000).to(torch.float64 if bits == 64 else torch.float32)
    before = values.clone()
    encode(values, bits, 64)
    round_trip(values, bits, 64).zero_()
    data = bytearray(encode(values, bits, 64))
    decode(data, 1_000, bits, 64).zero_()
    assert torch.equal(values, before)
    assert data == encode(values, bits, 64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 99, 300_000])
def test_non_finite_input_is_refused(bits: int, bad: float, at: int) -> None:
    values = torch.zeros(300_001)
    values[at] = bad
    for refuse in (encode, round_trip):
        with pytest.raises(ValueError, match="not finite"):
            refuse(values, bits, 64)


def test_what_a_narrow_float_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="float16 is not finite"):
        encode(torch.tensor([70_000.0]), 16, 64)
    with pytest.raises(ValueError, match="not finite"):
        encode(torch.tensor([1e300], dtype=torch.float64), 4, 64)


@pytest.mark.parametrize("bits", BITS)
def test_every_truncated_prefix_and_a_longer_message_are_refused(bits: int) -> None:
    data = encode(normal(203), bits, 64)
    for wrong in [*(data[:k] for k in range(len(data))), data + b"\x00"]:
        with pytest.raises(ValueError, match=f"{len(wrong)} bytes for 203 values .* expected {len(data)}"):
            decode(wrong, 203, bits, 64)


@pytest.mark.parametrize("bits", BITS)
def test_a_huge_announced_size_is_refused_before_memory_is_taken(bits: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode(b"\x00" * 100, 10**15, bits, 64)


@pytest.mark.parametrize("bits", BITS)
def test_a_corrupted_byte_is_refused_or_decodes_to_finite_values_in_range(bits: int) -> None:
    n, chance = 203, random.Random(bits)
    data = encode(normal(n), bits, 64)
    refused = 0
    for _ in range(200):
        broken = bytearray(data)
        broken[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        try:
            values = decode(broken, n, bits, 64)
        except ValueError:
            refused += 1
            continue
        assert bool(values.isfinite().all())
        if bits in CODED:  # a decoded value is one of 2q+1 multiples of its scale
            scales = np.frombuffer(broken[:8], "<u2").astype(np.uint32) << 16
            limit = scales.view(np.float32).astype(np.float64).repeat(64)[:n] * (2 ** (bits - 1) - 1)
            assert (np.abs(values.double().numpy()) <= limit).all()
    assert refused < 200


@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize(
    "pattern",
    [0x8000, 0x8001, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0x0001, 0x007F],
    ids=["-0", "-tiny", "-1", "inf", "-inf", "nan", "-nan", "snan", "subnormal", "largest subnormal"],
)
def test_scales_that_encode_never_writes_are_refused(bits: int, pattern: int) -> None:
    data = bytearray(encode(torch.ones(130), bits, 64))
    data[2:4] = pattern.to_bytes(2, "little")
    with pytest.raises(ValueError, match="a scale is"):
        decode(data, 130, bits, 64)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_scale_whose_largest_product_overflows_is_refused(bits: int) -> None:
    data = bytearray(encode(torch.ones(64), bits, 64))
    data[0:2] = (0x7F7F).to_bytes(2, "little")
    with pytest.raises(ValueError, match="a scale is 3.38953"):
        decode(data, 64, bits, 64)


@pytest.mark.parametrize("bits", CODED)
def test_the_code_outside_the_symmetric_range_is_refused_wherever_it_stands(bits: int) -> None:
    n = 21
    good = encode(torch.ones(n), bits, n)
    for i in range(n):
        string = int.from_bytes(good[2:], "little") & ~((2**bits - 1) << (bits * i))
        with pytest.raises(ValueError, match=f"a code is {-(2 ** (bits - 1))}"):
            decode(good[:2] + string.to_bytes(len(good) - 2, "little"), n, bits, n)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_padding_that_is_not_zero_is_refused(bits: int) -> None:
    data = bytearray(encode(torch.ones(5), bits, 64))
    data[-1] |= 0x80
    with pytest.raises(ValueError, match="padding"):
        decode(data, 5, bits, 64)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_floats_that_are_not_finite_are_refused(bits: int) -> None:
    for bad in (math.nan, math.inf):
        dtype = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
        with pytest.raises(ValueError, match="not finite"):
            decode(np.array([0.0, bad, 1.0], dtype).tobytes(), 3, bits, 64)


@pytest.mark.parametrize(
    ("n", "bits", "group", "message"),
    [(1, 5, 64, "bits = 5"), (1, 0, 64, "bits = 0"), (1, 4, 0, "group = 0"), (-1, 4, 64, "n = -1")],
)
def test_settings_out_of_range_are_named(n: int, bits: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded_bytes(n, bits, group)
    with pytest.raises(ValueError, match=message):
        decode(b"", n, bits, group)


def test_only_float_vectors_are_taken() -> None:
    with pytest.raises(ValueError, match=r"torch.int64 \[3\], must be floats"):
        encode(torch.arange(3), 4, 64)
    with pytest.raises(ValueError, match=r"torch.float32 \[2, 2\], must be floats \[n\]"):
        round_trip(torch.zeros(2, 2), 4, 64)
