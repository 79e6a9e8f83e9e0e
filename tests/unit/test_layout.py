"""Phase vectors: nothing lost, nothing twice, groups never mix directions, sizes known beforehand."""

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from p2p_dilocox.compression import Layout, Phase, decode, encode, encoded_bytes, round_trip

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


def layout(lowrank: int = 8, group: int = 16, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(SHAPES, lowrank=lowrank, group=group, dense_names=EMBEDDINGS, dtype=dtype)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lowrank", [0, 2, 8])
@pytest.mark.parametrize("group", [8, 16, 64, 1024])
def test_unpack_is_the_inverse_of_pack(lowrank: int, group: int, dtype: torch.dtype) -> None:
    of = layout(lowrank, group, dtype)
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
    assert of.chunks(0, 0, 1024) == []


def test_a_stage_without_tensors_is_two_empty_vectors() -> None:
    of = Layout({}, lowrank=8, group=16)
    assert len(of.pack_p({}, {})) == len(of.pack_q({})) == 0
    assert of.coded_bytes(4, 8) == (0, 0)


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
    other = Layout(dict(reversed(SHAPES.items())), lowrank=8, group=16, dense_names=EMBEDDINGS)
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


@pytest.mark.parametrize("max_values", [16, 100, 4_096, 10**9])
def test_chunks_cover_a_part_once_in_whole_groups(max_values: int) -> None:
    of = layout()
    for start, end in of.cut_parts("p", [1.0, 2.0, 1.0]):
        chunks = of.chunks(start, end, max_values)
        assert (chunks[0][0], chunks[-1][1]) == (start, end)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(chunks))
        assert all(a % of.group == 0 and a < b <= a + max_values for a, b in chunks)


def test_chunks_that_would_split_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="start = 8"):
        layout().chunks(8, 100, 64)
    with pytest.raises(ValueError, match="max_values = 15"):
        layout().chunks(0, 100, 15)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 32, 64])
def test_coded_bytes_are_what_parts_and_chunks_add_up_to(bits: int) -> None:
    of = layout(group=8)
    p, dense, q = tensors(of)
    vectors: dict[Phase, Tensor] = {"p": of.pack_p(p, dense), "q": of.pack_q(q)}
    sent = sum(
        len(encode(vectors[phase][a:b], bits, of.group))
        for phase in PHASES
        for start, end in of.cut_parts(phase, [1.0, 2.0, 4.0])
        for a, b in of.chunks(start, end, 1_000)
    )
    assert of.coded_bytes(bits, 32).contribution == sent
    assert of.coded_bytes(32, bits).average == sent


def test_a_vector_rounded_beforehand_crosses_the_wire_in_chunks_without_loss() -> None:
    of = layout()
    p, dense, _ = tensors(of)
    rounded = round_trip(of.pack_p(p, dense), 4, of.group)
    for start, end in of.cut_parts("p", [1.0, 1.5, 0.3]):
        for a, b in of.chunks(start, end, 500):
            data = encode(rounded[a:b], 4, of.group)
            assert len(data) == encoded_bytes(b - a, 4, of.group)
            assert torch.equal(decode(data, b - a, 4, of.group), rounded[a:b])


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
