"""Phase vectors: nothing lost, nothing twice, groups never mix directions, sizes known beforehand."""

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2p_dilocox.compression import BITS, Layout, Phase, Piece, decode, encode, encoded_bytes, round_trip
from p2p_dilocox.outer import OuterState
from p2p_dilocox.runspec import parse_run_as, read_run_text
from p2p_dilocox.settings import Compression
from p2p_dilocox.simulation.start import whole_model
from p2p_dilocox.traffic import model_tensors

SHAPES = {
    "model.layers.0.mlp.up_proj.weight": (100, 40),
    "model.layers.0.input_layernorm.weight": (40,),
    "model.embed_tokens.weight": (500, 40),
    "model.layers.0.conv.weight": (48, 8, 5),
    "model.scalar": (),
    "model.layers.0.narrow.weight": (300, 4),
}
EMBEDDINGS = frozenset({"model.embed_tokens.weight"})
PHASES = get_args(Phase)


def layout(
    lowrank: int = 8,
    group: int = 16,
    bits: int = 4,
    return_bits: int = 4,
    strong_bits: int = 4,
    strong_fraction: float = 0.25,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
) -> Layout:
    compression = Compression(
        bits=bits, return_bits=return_bits, strong_bits=strong_bits, strong_fraction=strong_fraction,
        gather_up_to=0,
        group=group, lowrank=lowrank, feedback="none", gamma=1.0,
    )  # fmt: skip
    return Layout(shapes, compression, dense_names=EMBEDDINGS)


def tensors(of: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Random P, dense, Q that fit the layout."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=of.dtype)

    p = {name: normal(SHAPES[name][0], of.lowrank) for name in of.lowrank_names}
    q = {name: normal(math.prod(SHAPES[name][1:]), of.lowrank) for name in of.lowrank_names}
    return p, {name: normal(*SHAPES[name]) for name in of.dense_names}, q


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_matrices_are_factored_and_the_rest_is_dense() -> None:
    assert layout().lowrank_names == ("model.layers.0.conv.weight", "model.layers.0.mlp.up_proj.weight")
    assert set(layout().lowrank_names) | set(layout().dense_names) == set(SHAPES)
    assert not set(layout().lowrank_names) & set(layout().dense_names)


@pytest.mark.parametrize("factored", [True, False])
def test_embeddings_are_matrices_like_others_unless_the_run_sends_them_whole(factored: bool) -> None:
    overrides = {"compression": {"lowrank": 24, "factor_embeddings": factored}}
    spec = parse_run_as(read_run_text("demo"), "dilocox", seed=0, inner_steps=40, overrides=overrides)
    tensors = model_tensors(spec)
    outer = OuterState(spec, whole_model(spec)[0].parameters, tensors.dense_names, "")
    sent = Layout(tensors.stages[0], spec.compression, dense_names=tensors.dense_names)
    assert ("model.embed_tokens.weight" in sent.lowrank_names) == factored
    assert outer.basis.keys() >= set(sent.lowrank_names)
    values = math.prod(tensors.stages[0]["model.embed_tokens.weight"])
    assert (sent.phase_numel("p") > values) == (not factored)


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (64, torch.float64)])
@pytest.mark.parametrize("lowrank", [0, 2, 8])
@pytest.mark.parametrize("group", [8, 16, 64, 1024])
def test_unpack_is_the_inverse_of_pack(lowrank: int, group: int, bits: int, dtype: torch.dtype) -> None:
    of = layout(lowrank, group, bits, strong_bits=bits)
    p, dense, q = tensors(of)
    p_vector, q_vector = of.pack_p(p, dense), of.pack_q(q)
    assert (p_vector.shape, p_vector.dtype) == ((of.phase_numel("p"),), dtype)
    assert (q_vector.shape, q_vector.dtype) == ((of.phase_numel("q"),), dtype)
    assert_equal(of.unpack_p(p_vector)[0], p)
    assert_equal(of.unpack_p(p_vector)[1], dense)
    assert_equal(of.unpack_q(q_vector), q)


def test_without_lowrank_phase_q_is_empty_and_p_holds_every_value_once() -> None:
    of = layout(lowrank=0)
    assert of.phase_numel("q") == 0
    assert of.phase_numel("p") == sum(math.prod(shape) for shape in SHAPES.values())
    assert len(of.pack_q({})) == 0
    assert of.unpack_q(of.pack_q({})) == {}
    assert of.cut_parts("q", [1.0, 1.0]) == [(0, 0), (0, 0)]
    assert of.chunks("q", 0, 0, 1024) == []


def test_a_stage_without_tensors_is_two_empty_vectors() -> None:
    of = layout(shapes={})
    assert len(of.pack_p({}, {})) == len(of.pack_q({})) == 0
    assert of.coded_bytes() == (0, 0)


def test_a_group_holds_one_direction_only() -> None:
    # Direction i of magnitude 10^i: were a group to hold two of them, the weaker would be rounded away.
    of = layout(lowrank=8, group=16)
    p, dense, q = tensors(of)
    sizes = torch.logspace(0, 7, 8)
    p_vector = of.pack_p({name: factor * sizes for name, factor in p.items()}, dense)
    q_vector = of.pack_q({name: factor * sizes for name, factor in q.items()})
    decoded_p, _ = of.unpack_p(round_trip(p_vector, 8, of.group))
    decoded_q = of.unpack_q(round_trip(q_vector, 8, of.group))
    for truth, decoded in ((p, decoded_p), (q, decoded_q)):
        for name in of.lowrank_names:
            error = (decoded[name] / sizes - truth[name]).norm(dim=0) / truth[name].norm(dim=0)
            assert float(error.max()) < 0.01


def test_the_order_of_the_dictionary_does_not_matter() -> None:
    p, dense, _ = tensors(layout())
    other = layout(shapes=dict(reversed(SHAPES.items())))
    assert torch.equal(
        layout().pack_p(p, dense), other.pack_p(dict(reversed(p.items())), dict(reversed(dense.items())))
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "weights",
    [[1.0], [1.0] * 3, [1.0] * 7, [3.0, 1.0], [0.0, 2.0, 0.0, 1.0], [1e-9, 1.0], [1.0] * 5_000],
)
def test_parts_cover_the_vector_once_in_whole_groups(phase: Phase, weights: list[float]) -> None:
    of = layout()
    parts = of.cut_parts(phase, weights)
    assert len(parts) == len(weights)
    assert parts[0][0] == 0
    assert parts[-1][1] == of.phase_numel(phase)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    assert all(start <= end and start % of.group == 0 for start, end in parts if start < end)


@pytest.mark.parametrize("phase", PHASES)
def test_parts_are_as_large_as_their_weights(phase: Phase) -> None:
    of, weights = layout(), [5.0, 1.0, 0.0, 2.5]
    numel = of.phase_numel(phase)
    for (start, end), weight in zip(of.cut_parts(phase, weights), weights, strict=True):
        assert abs((end - start) - numel * weight / 8.5) <= of.group
        assert weight > 0 or start == end


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("weights", [[1.0] * 4, [5.0, 1.0, 0.0, 2.5], [1.0] * 40])
def test_a_part_with_strong_directions_has_fewer_values(phase: Phase, weights: list[float]) -> None:
    of = layout(bits=2, return_bits=4, strong_bits=16)
    whole = of.chunks(phase, 0, of.phase_numel(phase), 10**9)
    total = sum((end - start) * (bits + back) for start, end, bits, back, *_ in whole)
    for (start, end), weight in zip(of.cut_parts(phase, weights), weights, strict=True):
        pieces = of.chunks(phase, start, end, 10**9)
        cost = sum((b - a) * (bits + back) for a, b, bits, back, *_ in pieces)
        assert abs(cost - total * weight / sum(weights)) <= of.group * 32
        assert weight > 0 or start == end


@pytest.mark.parametrize("members", [2, 3, 5, 16])
def test_equal_weights_give_parts_that_differ_by_a_group_at_most(members: int) -> None:
    of = layout()
    sizes = [math.ceil((end - start) / of.group) for start, end in of.cut_parts("p", [0.1] * members)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [1e308] * 2]
)
def test_weights_that_cannot_cut_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights = "):
        layout().cut_parts("p", weights)


def bits_of(of: Layout, phase: Phase, strong: int, weak: int) -> list[int]:
    """Bits that every value of a phase vector should have: by its direction, or `weak` if it has none."""

    # Each value of a marked factor is its direction, counted from 1; dense tensors are 0.
    def marked(rows: int) -> Tensor:
        return torch.arange(1.0, of.lowrank + 1).expand(rows, -1)

    p = {name: marked(SHAPES[name][0]) for name in of.lowrank_names}
    q = {name: marked(math.prod(SHAPES[name][1:])) for name in of.lowrank_names}
    dense = {name: torch.zeros(SHAPES[name]) for name in of.dense_names}
    vector = of.pack_p(p, dense) if phase == "p" else of.pack_q(q)
    return [0 if v == 0 else strong if v <= math.ceil(of.lowrank / 4) else weak for v in vector.tolist()]


@given(
    phase=st.sampled_from(PHASES),
    lowrank=st.integers(0, 20),
    group=st.sampled_from([8, 16, 64]),
    strong_bits=st.sampled_from([4, 8]),
    return_bits=st.sampled_from([3, 4, 16]),
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any),
    max_values=st.integers(64, 5_000),
)
def test_pieces_cover_the_vector_once_in_whole_groups_of_one_kind(
    phase: Phase, lowrank: int, group: int, strong_bits: int, return_bits: int, weights: list[float],
    max_values: int,
) -> None:  # fmt: skip
    of = layout(lowrank, group, 4, return_bits, strong_bits)
    pieces = [
        piece
        for start, end in of.cut_parts(phase, weights)
        for piece in of.chunks(phase, start, end, max_values)
    ]
    numel = of.phase_numel(phase)
    assert [start for start, *_ in pieces] + [numel] == [0, *(end for _, end, *_ in pieces)]
    assert all(start % group == 0 and 0 < end - start <= max_values for start, end, *_ in pieces)
    there, back = (
        bits_of(of, phase, strong_bits, 4),
        bits_of(of, phase, max(strong_bits, return_bits), return_bits),
    )
    for start, end, bits, bits_back, *_ in pieces:
        # 0 is a dense tensor, or the padding of a direction, which has the bits of its neighbours
        assert set(there[start:end]) <= {0, bits}
        assert set(back[start:end]) <= {0, bits_back}


def test_without_more_bits_for_strong_directions_pieces_are_as_few_as_can_be() -> None:
    of = layout(bits=4, return_bits=8, strong_bits=4)
    numel = of.phase_numel("p")
    # strong_bits = 4 back means at least the 8 of all others
    assert of.chunks("p", 0, numel, 10**9) == [Piece(0, numel, 4, 8)]


def test_a_quarter_of_the_directions_rounded_up_is_strong() -> None:
    of = layout(lowrank=9, group=64, bits=2, return_bits=4, strong_bits=8)
    # rows of 100 and 48 values are padded to 128 and 64; 3 of 9 are strong
    assert of.chunks("p", 0, of.phase_numel("p"), 10**9)[0] == Piece(0, 3 * 192, 8, 8)
    assert of.chunks("q", 0, of.phase_numel("q"), 10**9) == [
        Piece(0, 3 * 128, 8, 8), Piece(3 * 128, 9 * 128, 2, 4)
    ]  # fmt: skip
    exact = layout(lowrank=30, group=64, strong_bits=8, strong_fraction=0.1, shapes={"w": (128, 128)})
    assert exact.chunks("q", 0, exact.phase_numel("q"), 10**9)[0].end == 3 * 128


def test_chunks_that_would_split_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="start = 8"):
        layout().chunks("p", 8, 100, 64)
    with pytest.raises(ValueError, match="max_values = 15"):
        layout().chunks("p", 0, 100, 15)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("strong_bits", [4, 8, 64])
def test_coded_bytes_are_what_parts_and_chunks_add_up_to(bits: int, strong_bits: int) -> None:
    of = layout(8, 8, bits, 32, strong_bits)
    p, dense, q = tensors(of)
    vectors: dict[Phase, Tensor] = {"p": of.pack_p(p, dense), "q": of.pack_q(q)}
    there = back = 0
    for phase in PHASES:
        for start, end in of.cut_parts(phase, [1.0, 2.0, 4.0]):
            for piece in of.chunks(phase, start, end, 1_000):
                values = vectors[phase][piece.start : piece.end]
                there += len(encode(values, piece.bits, of.group))
                back += len(encode(values, piece.return_bits, of.group))
    assert of.coded_bytes() == (there, back)


def test_a_vector_rounded_beforehand_crosses_the_wire_in_chunks_without_loss() -> None:
    of = layout()
    p, dense, _ = tensors(of)
    rounded = round_trip(of.pack_p(p, dense), 4, of.group)
    for start, end in of.cut_parts("p", [1.0, 1.5, 0.3]):
        for a, b, bits, *_ in of.chunks("p", start, end, 500):
            data = encode(rounded[a:b], bits, of.group)
            assert len(data) == encoded_bytes(b - a, bits, of.group)
            assert torch.equal(decode(data, b - a, bits, of.group), rounded[a:b])


def test_unpacked_tensors_are_views_of_the_vector() -> None:
    of = layout()
    p, dense, _ = tensors(of)
    vector = of.pack_p(p, dense)
    factors, rest = of.unpack_p(vector)
    for tensor in (*factors.values(), *rest.values()):
        tensor.zero_()
    assert not bool(vector.any())


@pytest.mark.parametrize("group", [0, -8, 4, 12])
def test_groups_that_are_not_whole_bytes_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group = {group}, must be a multiple of 8"):
        layout(group=group)


def test_names_and_shapes_that_do_not_fit_are_named() -> None:
    of = layout()
    p, dense, q = tensors(of)
    name = "model.layers.0.conv.weight"
    without = {key: value for key, value in p.items() if key != name}
    with pytest.raises(ValueError, match=rf"factors P do not fit the layout: missing \['{name}'\]"):
        of.pack_p(without, dense)
    with pytest.raises(ValueError, match=r"dense tensors .* not expected \['stranger'\]"):
        of.pack_p(p, dense | {"stranger": torch.zeros(1)})
    with pytest.raises(ValueError, match=rf"factor of {name} is \[8, 40\], expected \[40, 8\]"):
        of.pack_q(q | {name: q[name].T})
    with pytest.raises(ValueError, match=r"model.scalar is \[1\], expected \[\]"):
        of.pack_p(p, dense | {"model.scalar": torch.zeros(1)})
    for wrong in (torch.zeros(of.phase_numel("p") - 1), torch.zeros(1, of.phase_numel("p"))):
        with pytest.raises(ValueError, match="phase p vector is"):
            of.unpack_p(wrong)
    with pytest.raises(ValueError, match="phase q vector is"):
        of.unpack_q(torch.zeros(of.phase_numel("q") + 1))
