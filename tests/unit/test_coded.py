"""A pseudo-gradient through both phases: against float64, and what more bits for few directions buy."""

import asyncio
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from p2p_dilocox.averaging.butterfly import Butterfly, Terms
from p2p_dilocox.averaging.coded import CodedStage, StageLayouts, chunk_ranges
from p2p_dilocox.averaging.fault import MemberFault
from p2p_dilocox.compression import Layout, Phase, Piece, pack_chunk, unpack_chunk
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.recipe import recipes
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.settings import Compression

SHAPES = {"w": (96, 160), "conv": (80, 8, 9), "norm": (96,), "embedding": (200, 96)}
EMBEDDINGS = frozenset({"embedding"})
CLUSTERS = 3
SPEC = parse_run(
    '[run]\nid = "coded"\nouter_steps = 1\n[model.config]\nmodel_type = "llama"\nvocab_size = 2048\n'
    "hidden_size = 64\nnum_hidden_layers = 1\nnum_attention_heads = 1\n"
    "[inner]\nH = 1\nbatch_size = 1\nlr = 1e-3\n"
)


def pseudo_gradients() -> list[dict[str, Tensor]]:
    """One per cluster: what all have in common has a spectrum that falls, the rest is noise."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    common = {}
    for name, shape in SHAPES.items():
        m, n = shape[0], normal(*shape).numel() // shape[0]
        strengths = 0.8 ** torch.arange(min(m, n))
        common[name] = (normal(m, min(m, n)) * strengths @ normal(min(m, n), n)).view(shape)
    return [{n: c + 0.02 * normal(*c.shape) for n, c in common.items()} for _ in range(CLUSTERS)]


def states(compression: Compression, deltas: list[dict[str, Tensor]]) -> list[OuterState]:
    spec = replace(SPEC, compression=compression)
    found = []
    for delta in deltas:
        parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        outer = OuterState(spec, parameters, EMBEDDINGS, "")
        for name, undelivered in outer.undelivered.items():
            undelivered.copy_(delta[name])
        found.append(outer)
    return found


def averaged(layout: Layout, phase: Phase, vectors: list[Tensor], shares: list[float]) -> Tensor:
    average = torch.empty_like(vectors[0])
    for start, end, bits, return_bits, *_ in (
        p for part in chunk_ranges(layout, phase, shares) for p in part
    ):
        n, group = end - start, layout.group
        data = [pack_chunk(vector[start:end], bits, group) for vector in vectors]
        mean = torch.stack([unpack_chunk(d, n=n, bits=bits, group=group) for d in data]).mean(0)
        average[start:end] = unpack_chunk(
            pack_chunk(mean, return_bits, group), n=n, bits=return_bits, group=group
        )
    return average


def rounds(compression: Compression, count: int, shares: list[float]) -> tuple[Average, int]:
    """The average after `count` rounds of the same pseudo-gradients, and the bytes of a contribution."""
    outers = states(compression, pseudo_gradients())
    layout = StageLayouts(outers[0], list(SHAPES), EMBEDDINGS, 1).at(1)
    average = Average()
    for t in range(count):
        stages = [CodedStage(outer, layout) for outer in outers]
        p = averaged(layout, "p", [stage.vector_p() for stage in stages], shares)
        q = averaged(layout, "q", [stage.vector_q(p) for stage in stages], shares)
        average = stages[0].decode(p, q)
        for outer in outers:
            for name, (_, factor) in average.factors.items():
                outer.basis[name].copy_(factor)
            outer.t = t + 1
    return average, layout.coded_bytes().contribution


def as_tensors(average: Average) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    average.add_to_(zeros, 1.0)
    return zeros


def error(average: Average) -> float:
    exact = {n: torch.stack([d[n] for d in pseudo_gradients()]).double().mean(0) for n in ("w", "conv")}
    found = as_tensors(average)
    missed = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return math.sqrt(missed / sum(float(value.square().sum()) for value in exact.values()))


def compression(**changes: object) -> Compression:
    base = replace(recipes()["dilocox"].compression, bits=4, return_bits=4, strong_bits=4, lowrank=16)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_in_32_bits_a_round_is_powersgd_on_the_mean() -> None:
    outers = states(compression(bits=32), pseudo_gradients())
    basis = {name: q.double() for name, q in outers[0].basis.items()}
    average, _ = rounds(compression(bits=32, return_bits=32, strong_bits=32), 1, [1.0] * CLUSTERS)
    found = as_tensors(average)
    for name, shape in SHAPES.items():
        exact = torch.stack([d[name] for d in pseudo_gradients()]).double().mean(0)
        if name in basis:
            matrix = exact.view(shape[0], -1)
            p, _ = torch.linalg.qr(matrix @ basis[name])
            exact = (p @ (p.T @ matrix)).view(shape)
        torch.testing.assert_close(found[name], exact, rtol=0, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("shares", [[1.0, 1.0, 1.0], [5.0, 0.0, 1.0]])
def test_more_bits_for_the_strongest_eighth_take_most_of_the_error(shares: list[float]) -> None:
    plain, plain_bytes = rounds(compression(), 4, shares)
    strong, strong_bytes = rounds(compression(strong_bits=8, strong_fraction=0.125), 4, shares)
    exact, _ = rounds(compression(bits=32, return_bits=32, strong_bits=32), 4, shares)
    assert strong_bytes < 1.13 * plain_bytes
    lost, lost_strong = (error(a) ** 2 - error(exact) ** 2 for a in (plain, strong))
    assert lost_strong < 0.6 * lost


def test_the_first_directions_of_an_average_are_the_strongest() -> None:
    average, _ = rounds(compression(), 5, [1.0] * CLUSTERS)
    for name, (p_hat, q) in average.factors.items():
        exact = torch.stack([d[name] for d in pseudo_gradients()]).double().mean(0).view(SHAPES[name][0], -1)
        truth = torch.linalg.svdvals(exact)[:16]
        norms = q.double().norm(dim=0)
        assert torch.allclose(norms[:4], truth[:4], rtol=0.1)
        assert float((norms[:-1] / norms[1:]).min()) > 0.8
        assert torch.allclose(p_hat.T @ p_hat, torch.eye(16), atol=1e-5)


def test_an_average_has_the_same_bits_in_whatever_order_its_shares_come() -> None:
    """In float32 (a + b) + c is not a + (b + c)."""
    n, weights = 512, [3.0, 5.0, 7.0, 1.0]
    piece = Piece(0, n, 32, 32)
    generator = torch.Generator().manual_seed(0)
    shares = [torch.randn(n, generator=generator) for _ in weights]
    coded = [pack_chunk(share, 32, 64) for share in shares]

    async def averaged_in(order: tuple[int, ...], codec: ThreadPoolExecutor) -> Tensor:
        terms = Terms(torch.float32, weights, [1e3] * 4, 0, 64, codec)
        averaging = Butterfly([[piece], [], [], []], terms)
        averaging.set_vector(shares[0])
        for member in order:
            await averaging.add(member, 0, coded[member])
            with pytest.raises(MemberFault, match="twice"):
                await averaging.add(member, 0, coded[member])
        return averaging.average

    with ThreadPoolExecutor(1) as codec:
        found = [asyncio.run(averaged_in(order, codec)) for order in itertools.permutations(range(4))]
    exact = sum(w * s.double() for w, s in zip(weights, shares, strict=True)) / sum(weights)
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(average, found[0]) for average in found)
