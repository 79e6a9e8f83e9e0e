"""Top-k in chunks: what is kept, what comes back, how long it is, and what a stranger may not send."""

import math
import random

import pytest
import torch
from torch import Tensor

from p2p_dilocox.compression import chunk_bytes, pack_chunk, unpack_chunk
from p2p_dilocox.compression.topk import decode_top, encode_top, kept, top_bytes
from tests.unit.in_step import InStep
from tests.unit.ledger import spec_of

VALUES = torch.randn(9000, generator=torch.Generator().manual_seed(0))


def blocks(values: Tensor) -> list[Tensor]:
    return [values[start : start + 4096] for start in range(0, len(values), 4096)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("n", "top"), [(9000, 0.015625), (9000, 0.08), (4096, 0.5), (5, 0.3), (1, 0.01), (0, 0.1)]
)
def test_every_block_gives_its_largest_values_and_the_rest_is_zero(bits: int, n: int, top: float) -> None:
    values, said = VALUES[:n].clone(), torch.full((n,), 9.0)
    data = encode_top(values, bits, 64, top, decoded=said)
    assert len(data) == top_bytes(n, bits, 64, top)
    found = decode_top(data, n, bits, 64, top)
    assert torch.equal(found.float(), said)
    total = 0
    for block, out in zip(blocks(values), blocks(found), strict=True):
        k = -(-int(round(top * len(block) * 2**20)) // 2**20)
        least = block.abs().sort().values[-k]
        assert not out[block.abs() < least].any()
        if bits >= 8:
            large = block.abs() >= least
            torch.testing.assert_close(out[large].float(), block[large], rtol=0.02, atol=0.02)
        total += k
    assert kept(n, top) == total


def test_two_bits_are_the_means_of_four_bins() -> None:
    """SparseLoCo's levels: below -1.5 sigma, negative, positive, above 1.5 sigma of what is kept."""
    values = VALUES[:4096]
    found = decode_top(encode_top(values, 2, 64, 0.0625), 4096, 2, 64, 0.0625)
    places = found.nonzero().view(-1)
    assert len(places) == 256
    top, sigma = values[places], values[places].square().mean().sqrt()
    edge = 1.5 * float(sigma)
    edges = [-math.inf, -edge, 0.0, edge, math.inf]
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (top >= low) & (top < high)
        mean = top[inside].mean().expand(int(inside.sum()))
        torch.testing.assert_close(found[places][inside], mean, rtol=2**-8, atol=0)


def test_sparseloco_takes_a_hundredth_of_the_bytes() -> None:
    """64 of 4096: 12 + 2 bits each and a table of 8 bytes, in all 120 bytes where float32 has 16384."""
    assert top_bytes(4096, 2, 64, 0.015625) == 120


def test_a_chunk_with_top_crosses_the_wire_and_is_as_long_as_announced() -> None:
    data = pack_chunk(VALUES, 4, 128, 0.08)
    assert len(data) == chunk_bytes(9000, 4, 128, 0.08)
    assert torch.equal(
        unpack_chunk(data, n=9000, bits=4, group=128, top=0.08),
        decode_top(encode_top(VALUES, 4, 128, 0.08), 9000, 4, 128, 0.08),
    )


@pytest.mark.parametrize("bits", [2, 4])
def test_whatever_a_stranger_sends_is_finite_or_refused(bits: int) -> None:
    data, chance = bytearray(encode_top(VALUES, bits, 64, 0.01)), random.Random(1)
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 3, 40))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            assert torch.isfinite(decode_top(changed, 9000, bits, 64, 0.01)).all()
        except ValueError:
            refused += 1
    assert refused > 100
    for length in (0, 1, len(data) - 1, len(data) + 1):
        with pytest.raises(ValueError, match="expected"):
            decode_top(bytes(length), 9000, bits, 64, 0.01)
    with pytest.raises(ValueError, match="do not grow"):
        decode_top(bytes(len(data)), 9000, bits, 64, 0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_sent(bad: float) -> None:
    values = VALUES.clone()
    values[7] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode_top(values, 2, 64, 0.01)


def starts(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"0.a": torch.randn(64, 80, generator=generator), "1.b": torch.randn(100, generator=generator)}


def coded(vector: Tensor, bits: int, group: int, top: float) -> Tensor:
    return decode_top(encode_top(vector, bits, group, top), len(vector), bits, group, top)


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-6), (2, 0.02)])
def test_sparseloco_is_its_algorithm(bits: int, tolerance: float) -> None:
    """arXiv 2508.15706: e <- beta e + theta - theta_i; D = Q(TopK(e)); e <- e - D; theta -= mean D."""
    spec = spec_of("none", "local", gamma=0.95, bits=bits, more="top = 0.05\n")
    start = starts(0)
    swarm = InStep(spec, start, 3, 2)
    theta, errors = {n: p.clone() for n, p in start.items()}, [torch.zeros(5220) for _ in range(3)]
    for t in range(1, 9):
        moves = [starts(100 * t + number) for number in range(3)]

        def move(number: int, params: dict[str, Tensor], moves: list[dict[str, Tensor]] = moves) -> None:
            for name, step in moves[number].items():
                params[name] -= 0.1 * step

        swarm.move(move)
        said = []
        for number, error in enumerate(errors):
            error.mul_(0.95).add_(torch.cat([0.1 * m.view(-1) for m in moves[number].values()]))
            said.append(coded(error, bits, 64, 0.05))
            error -= said[-1]
        mean, at = torch.stack(said).mean(0), 0
        for p in theta.values():
            p -= mean[at : at + p.numel()].view(p.shape)
            at += p.numel()
        swarm.land(swarm.start(t))
        moved = sum(float((theta[n] - start[n]).square().sum()) for n in theta)
        apart = sum(float((swarm.outers[0].anchor[n] - theta[n]).square().sum()) for n in theta)
        # With 2 bits the error buffer is kept in bf16, and what is nearly as large is sent instead.
        assert apart < tolerance * moved


def test_cocktailsgd_leaves_what_it_did_not_say_in_the_parameters() -> None:
    """d = theta_i - theta on the drawn values; theta_i <- theta_i - C(d) + mean; theta <- theta + mean."""
    spec = spec_of("none", "parameters", bits=4, schedule="fraction = 0.5", more="top = 0.08\ngroup = 128\n")
    start = {n: p.double() for n, p in starts(0).items()}
    swarm = InStep(spec, start, 2, 2)
    for t in range(1, 9):
        moves = [starts(100 * t + number) for number in range(2)]

        def move(number: int, params: dict[str, Tensor], moves: list[dict[str, Tensor]] = moves) -> None:
            for name, step in moves[number].items():
                params[name] -= 0.1 * step

        swarm.move(move)
        before = [{n: p.clone() for n, p in theta.items()} for theta in swarm.theta]
        anchor = {n: p.clone() for n, p in swarm.outers[0].anchor.items()}
        steps = swarm.start(t)
        swarm.land(steps)
        for number, step in enumerate(steps):
            assert step.own is not None
            said = sum(int(values.count_nonzero()) for values in step.own.dense.values())
            assert 100 < said <= kept(sum(map(len, step.own.dense.values())), 0.08)
            for name in start:
                own, mean = torch.zeros_like(start[name]), torch.zeros_like(start[name])
                step.own.add_one_(name, own, 1.0)
                step.average.add_one_(name, mean, 1.0)
                ours = swarm.theta[number][name]
                torch.testing.assert_close(ours, before[number][name] + own - mean, rtol=0, atol=1e-4)
                torch.testing.assert_close(
                    swarm.outers[number].anchor[name], anchor[name] - mean, rtol=0, atol=1e-12
                )
