"""What a plan says a rank holds, against the tensors that a rank really has."""

import asyncio
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from p2p_dilocox.averaging.butterfly import Butterfly, Terms
from p2p_dilocox.averaging.coded import CodedStage, StageLayouts, chunk_ranges
from p2p_dilocox.averaging.division import PHASES
from p2p_dilocox.checkpoint.store import _copies
from p2p_dilocox.compression import Layout, orthonormalise, pack_chunk
from p2p_dilocox.gradient_sum import build_inner
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.local_outer import LocalOuter, build_local_outer
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.pipeline import Pipeline, Span, build_chunks, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.placement import place
from p2p_dilocox.plan.activations import (
    Activations,
    _LiveBytes,
    in_flight,
    measure_activations,
    step_bytes,
)
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.fit import largest, ways_to_fit
from p2p_dilocox.plan.memory import RankMemory, all_ranks, rank_memory
from p2p_dilocox.plan.model import PlannedModel
from p2p_dilocox.runspec import RunSpec, parse_run
from p2p_dilocox.traffic import model_tensors
from p2p_dilocox.trainer import Rank

TEXT = """
[run]
id = "plan"
outer_steps = 3
[model]
stages = 2
[model.config]
model_type = "{model}"
vocab_size = 2048
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 64
tie_word_embeddings = {tied}
bos_token_id = 0
eos_token_id = 0
[data]
seq_len = 64
[inner]
H = 4
batch_size = 8
microbatches = 4
lr = 1e-3
[local]
every = 2
[compression]
bits = {bits}
return_bits = {bits}
lowrank = 16
"""
CPU = torch.device("cpu")
ELSEWHERE = (
    "averaging: vectors", "averaging: factors", "averaging: factorising", "averaging: last round, kept",
    "at other moments", "libraries",
)  # fmt: skip
"""What a step beside a checkpoint does not hold."""


def spec_of(bits: int = 4, model: str = "llama", *, tied: bool = True, cut: tuple[int, ...] = ()) -> RunSpec:
    spec = parse_run(TEXT.format(bits=bits, model=model, tied=str(tied).lower()))
    return replace(spec, model=replace(spec.model, cut=cut))


def span_of(spec: RunSpec, rank: int, ranks: int, device: torch.device = CPU) -> Span:
    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    placement = place(spec.inner.schedule, spec.model.stages, ranks)
    (span,) = build_chunks(skeleton, placement, rank, cuts, seed=0, device=device)
    return span


def dense_of(spec: RunSpec, span: Span) -> frozenset[str]:
    return spec.compression.never_factored(span.embedding_names)


def row(memory: RankMemory, name: str) -> int:
    (found,) = (r.bytes for r in memory.rows if r.name == name)
    return found


def total(tensors: Iterable[Tensor]) -> int:
    """Bytes of storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("bits", "rank", "ranks", "adamw_bits", "cut"),
    [
        (4, 0, 1, 32, ()),
        (32, 0, 2, 32, ()),
        (64, 1, 2, 32, ()),
        (4, 1, 2, 8, ()),
        (4, 0, 2, 32, (0, 4)),
        (4, 1, 2, 32, (4, 0)),
    ],
)
def test_state_is_what_the_real_objects_hold(
    bits: int, rank: int, ranks: int, adamw_bits: int, cut: tuple[int, ...]
) -> None:
    if adamw_bits == 8:
        pytest.importorskip("bitsandbytes")
    spec, cluster = spec_of(bits, cut=cut), Cluster(ranks, "cpu", adamw_bits=adamw_bits)
    planned = rank_memory(spec, PlannedModel(spec), cluster, rank, clusters=4)
    span = span_of(spec, rank, ranks)
    owned = {n: p for parameters in span.stage_parameters.values() for n, p in parameters.items()}
    held = [*owned.values(), *([span.tied_copy] if span.tied_copy is not None else [])]
    assert (span.tied_copy is not None) == (rank == 1), "the copy of the embedding must count"
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    inner = InnerOptimizer(held, spec.inner, 10, bits=adamw_bits)
    inner.step(0)
    outer = OuterState(spec, owned, dense_of(spec, span), "")
    local = LocalOuter(spec.local, owned)

    assert planned.parameters == sum(p.numel() for p in owned.values())
    assert row(planned, "parameters") == total(held)
    assert row(planned, "gradients") == total(p.grad for p in held if p.grad is not None)
    assert row(planned, "inner optimizer") == total(
        t for name, t in inner.state().items() if not name.endswith(("/step", "/qmap1", "/qmap2"))
    )
    assert row(planned, "anchor") == total(outer.anchor.values())
    assert row(planned, "outer momentum") == total(outer.momentum.values())
    assert row(planned, "undelivered") == total(outer.undelivered.values())
    assert row(planned, "counted") == total(outer.counted.values())
    assert row(planned, "local outer optimizer") == total(local.tensors().values())
    assert row(planned, "averaging: basis") == total(outer.basis.values())


@pytest.mark.parametrize(("mode", "average"), [("eager", "pseudo-gradient"), ("none", "gradient")])
def test_every_tensor_of_the_outer_state_is_planned(mode: str, average: str) -> None:
    spec = spec_of(32)
    overlap = replace(spec.overlap, mode=mode, keep=0.0)
    spec = replace(spec, overlap=overlap, outer=replace(spec.outer, average=average))
    planned = rank_memory(spec, PlannedModel(spec), Cluster(1, "cpu"), 0, clusters=4)
    span = span_of(spec, 0, 1)
    owned = {n: p for parameters in span.stage_parameters.values() for n, p in parameters.items()}
    outer = OuterState(spec, owned, dense_of(spec, span), "")
    real = [t for part in vars(outer).values() if isinstance(part, dict) for t in part.values()]
    names = ("anchor", "outer momentum", "momentum of own shares", "second moment", "undelivered", "counted")
    assert total(real) == sum(row(planned, name) for name in (*names, "averaging: basis"))
    assert (row(planned, "inner optimizer") == 0) == (average == "gradient")


@pytest.mark.parametrize("bits", [4, 64])
def test_averaging_is_what_a_reducer_holds(bits: int) -> None:
    """Vectors, sums, factors and coded averages of a real round's objects, one of four members."""
    spec = spec_of(bits)
    planned = rank_memory(spec, PlannedModel(spec), Cluster(1, "cpu"), 0, clusters=4)
    span = span_of(spec, 0, 1)
    owned = {n: p.detach() for parameters in span.stage_parameters.values() for n, p in parameters.items()}
    outer = OuterState(spec, owned, dense_of(spec, span), "")
    vectors: list[Tensor] = []
    coded = 0

    async def hold(executor: ThreadPoolExecutor) -> None:
        nonlocal coded
        for parameters in span.stage_parameters.values():
            layout = StageLayouts(outer, list(parameters), dense_of(spec, span), 4).at(1)
            code = CodedStage(outer, layout)
            p = code.vector_p()
            q = code.vector_q(p)
            factors.extend(code._p_hat.values())
            for phase, vector in zip(PHASES, (p, q), strict=True):
                parts = chunk_ranges(layout, phase, [1.0] * 4)
                terms = Terms(layout.dtype, [1.0] * 4, [1.0] * 4, 1, layout.group, executor)
                averaging = Butterfly(parts, terms)
                vectors.extend([vector, averaging.own, averaging.average, *averaging._sums])
                for start, end, _, return_bits, *_ in (piece for part in parts for piece in part):
                    coded += len(pack_chunk(vector[start:end], return_bits, layout.group))

    factors: list[Tensor] = []
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(hold(executor))
    # Parts are whole groups, so one member's is a little more than its quarter.
    assert row(planned, "averaging: vectors") == pytest.approx(total(vectors), rel=0.01)
    assert row(planned, "averaging: factors") == total(factors)
    assert row(planned, "averaging: last round, kept") == pytest.approx(coded, rel=0.01)


def test_the_largest_factorisation_is_planned() -> None:
    """Of the tensors that a round makes of one matrix, the most that live at a time."""
    spec = spec_of()
    tensors, r = model_tensors(spec), spec.compression.lowrank
    most = 0
    for shapes in tensors.stages.values():
        for name in Layout(shapes, spec.compression, dense_names=tensors.dense_names).lowrank_names:
            factor, live = torch.randn(shapes[name][0], r), _LiveBytes()
            with live:
                orthonormalise(factor)
            most = max(most, live.peak, 4 * math.prod(shapes[name]))
    planned = rank_memory(spec, PlannedModel(spec), Cluster(1, "cpu"), 0, clusters=4)
    assert row(planned, "averaging: factorising") == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize(
    ("model", "rank", "ranks", "bf16", "cut"),
    [
        ("llama", 0, 2, False, ()),
        ("llama", 1, 2, True, ()),
        ("llama", 0, 1, True, ()),
        ("mixtral", 0, 2, False, ()),
        ("llama", 0, 2, False, (0, 4)),
        ("llama", 1, 2, True, (4, 0)),
    ],
)
def test_activations_are_what_autograd_saves(
    model: str, rank: int, ranks: int, bf16: bool, cut: tuple[int, ...]
) -> None:
    """Counted without values, against the storages that a real forward leaves for its backward, and the
    output, which torch's schedules keep."""
    spec = spec_of(model=model, tied=False, cut=cut)
    dtype = torch.bfloat16 if bf16 else None
    counted = span_of(spec, rank, ranks, torch.device("meta"))
    counted.module.autocast_dtype = dtype
    found = measure_activations(counted, 4, 64)

    span = span_of(spec, rank, ranks)
    span.module.autocast_dtype = dtype
    known = {t.untyped_storage().data_ptr() for t in (*span.module.parameters(), *span.module.buffers())}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = torch.zeros(4, 64, dtype=torch.long) if rank == 0 else torch.randn(4, 64, 64, requires_grad=True)
    known.add(inputs.untyped_storage().data_ptr())
    # The second of two microbatches: they share what the first has cast to bf16.
    with torch.autocast("cpu", enabled=False), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        before = span.module(inputs)
        known |= saved.keys() | {before.untyped_storage().data_ptr()}
        output = span.module(inputs)
        if span.is_last:
            targets = torch.zeros(4 * 64, dtype=torch.long)
            loss = functional.cross_entropy(output.float().flatten(0, 1), targets)
            output = output if ranks > 1 else loss
    kept = total([output, *(t for key, t in saved.items() if key not in known)])
    assert found.kept == pytest.approx(kept, rel=0.1)
    assert found.hidden == (0 if span.is_last else 4 * 64 * 64 * 4)
    assert found.first > found.kept
    assert found.later > found.kept - 1


def test_the_parameters_of_another_rank_do_not_count_as_activations() -> None:
    spec = spec_of(tied=False)
    numel = sum(p.numel() for p in span_of(spec, 0, 1).module.parameters())
    found = measure_activations(span_of(spec, 0, 1, torch.device("meta")), 1, 8)
    assert 4 * numel < found.first < 4 * numel + found.kept + 4 * 8 * 2048 * 4


@pytest.mark.parametrize("average", ["pseudo-gradient", "gradient"])
def test_steps_and_a_checkpoint_hold_together_what_is_planned(average: str) -> None:
    """Every storage that lives is counted, through an inner step, an outer step, and the inner step that goes
    on while a checkpoint is written. No round: what it holds is above."""
    spec = spec_of()
    spec = replace(
        spec, overlap=replace(spec.overlap, mode="none", keep=0.0), outer=replace(spec.outer, average=average)
    )
    planned = rank_memory(spec, PlannedModel(spec), Cluster(1, "cpu"), 0, clusters=2)
    expected = sum(r.bytes for r in planned.rows if r.name not in ELSEWHERE)
    live = _LiveBytes()
    with live:
        span = span_of(spec, 0, 1)
        pipeline = Pipeline(spec, [span], 0, 1, CPU)
        outer = OuterState(spec, pipeline.parameters, dense_of(spec, span), "")
        inner, local = build_inner(spec, pipeline, outer), build_local_outer(spec.local, pipeline.parameters)
        rank = cast(Rank, SimpleNamespace(pipeline=pipeline, outer=outer, inner=inner, local=local, index=0))

        def inner_step() -> None:
            pipeline.forward_backward(torch.zeros(8, 65, dtype=torch.long))
            pipeline.clip_()
            inner.step(0)

        inner_step()
        outer.contribute(pipeline.parameters)
        average_ = Average(dense={name: r.clone() for name, r in outer.residual.items()})
        outer.commit(average_, average_)
        with outer.restart_(pipeline.parameters, 0.0):
            outer.step(average_, 1, ["me"], "", lr=0.1 if average == "gradient" else None)
        del average_
        assert live.peak < expected
        copies = _copies(rank)
        inner_step()
    assert copies and live.peak == pytest.approx(expected, rel=0.02)


def replay(order: str, of_one: Activations, gradients: int) -> int:
    """The most bytes at once, if F and B run in this order."""
    flying = most = 0
    there = 0
    for letter in order:
        if letter == "F":
            flying += 1
            most = max(most, there + flying * of_one.kept)
        else:
            top = of_one.first if there == 0 else gradients + of_one.later
            most = max(most, (flying - 1) * of_one.kept + top)
            there, flying = gradients, flying - 1
    return most


@pytest.mark.parametrize(
    ("order", "schedule", "rank", "ranks"),
    [
        ("FBFBFBFB", "1f1b", 0, 1),
        ("FFFBFBBB", "1f1b", 0, 3),
        ("FFBFBFBB", "1f1b", 1, 3),
        ("FBFBFBFB", "1f1b", 2, 3),
        ("FFFFBBBB", "gpipe", 1, 2),
        ("FFFFBBBB", "1f1b", 0, 4),
        ("FFFFBBBB", "1f1b", 0, 6),
    ],
)
def test_a_step_takes_what_its_order_of_microbatches_takes(
    order: str, schedule: str, rank: int, ranks: int
) -> None:
    for kept, first, later in ((100, 160, 130), (10, 160, 200), (100, 900, 101)):
        of_one = Activations(kept=kept, first=first, later=later, hidden=0)
        flying = in_flight(schedule, 4, rank, ranks)
        assert step_bytes(of_one, 500, 4, flying) == replay(order, of_one, 500)


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches", "counted"),
    [
        ("interleaved-1f1b", 2, 8, [11, 9, 7, 5]),
        ("interleaved-1f1b", 4, 8, [19, 17, 15, 13]),
        ("interleaved-zero-bubble", 2, 8, [8, 8, 8, 8]),
        ("interleaved-zero-bubble", 4, 16, [16, 16, 16, 16]),
        ("zbv", 2, 16, [8, 8, 8, 8]),
    ],
)
def test_several_chunks_keep_as_much_as_torch_s_orders(
    schedule: str, chunks: int, microbatches: int, counted: list[int]
) -> None:
    """counted: forwards without their backward, for weights too, along the operations of torch 2.13."""
    assert [in_flight(schedule, microbatches, rank, 4, chunks) for rank in range(4)] == counted


def test_a_way_to_fit_fits_when_it_is_planned_as_it_says() -> None:
    spec, clusters = spec_of(tied=False), 2
    spec = replace(spec, inner=replace(spec.inner, microbatches=2))
    model, cluster = PlannedModel(spec), Cluster(1, "cuda")
    now = largest(spec, model, cluster, clusters)
    assert now == max(rank.total("device") for rank in all_ranks(spec, model, cluster, clusters))
    finer = replace(spec, inner=replace(spec.inner, microbatches=4))
    limit = largest(finer, model, cluster, clusters)
    assert limit < now
    ways = ways_to_fit(spec, model, cluster, clusters, limit)
    assert ways[0].changes == ("--microbatches 4",) and ways[0].largest == limit
    assert len({way.changes[0].split()[0] for way in ways}) == len(ways), "one of a kind"
    best = ways_to_fit(spec, model, cluster, clusters, limit=1.0)
    assert len(best) == 1 and len(best[0].changes) > 1 and best[0].largest > 1.0
    finest = replace(spec, inner=replace(spec.inner, microbatches=8))
    least = largest(finest, model, Cluster(2, "cuda", offload=True, adamw_bits=8), clusters)
    assert best[0].largest == least, "all changes together"
    (together,) = ways_to_fit(spec, model, cluster, clusters, limit=least)
    assert together.largest == least


def test_offloaded_state_is_in_main_memory_and_nowhere_else() -> None:
    spec = spec_of()
    model = PlannedModel(spec)
    here, there = (
        rank_memory(spec, model, Cluster(1, "cuda", offload=offload), 0, 2) for offload in (False, True)
    )
    moved = 12 * here.parameters
    assert here.total("device") - there.total("device") == moved
    assert there.total("host") - here.total("host") == moved
    on_cpu = rank_memory(spec, model, Cluster(1, "cpu"), 0, 2)
    assert on_cpu.total("device") == 0
