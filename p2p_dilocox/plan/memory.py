"""What a rank holds, in bytes, counted as the code allocates it: pipeline, inner.py, outer.py, averaging.

docs/architecture.md, "Memory", says the same in words. A row is in a GPU's memory ("device") or in main
memory ("host"); where a CPU trains all rows are "host".
"""

import math
from dataclasses import dataclass

from p2p_dilocox.compression import Layout, is_lowrank, matrix_shape
from p2p_dilocox.plan.activations import in_flight, step_bytes
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.model import PlannedModel, Shapes
from p2p_dilocox.settings import RunSpec

__all__ = ["RankMemory", "Row", "all_ranks", "rank_memory"]

_FRAMEWORK = {("cpu", "host"): 0.45e9, ("cuda", "host"): 2.0e9, ("cuda", "device"): 0.6e9}
"""Interpreter, torch, transformers, hivemind; on a GPU also CUDA's context and libraries. The CPU's figure is
measured, with a model of almost nothing; those of CUDA are assumed."""
_LEAD = 0.06e9
"""More of it on rank 0, measured: it encodes the text, writes for TensorBoard, and speaks for its cluster."""

_SLICE_VALUES = 1 << 20
"""How much of a tensor an outer step works at, in up to 16 float32 copies."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    bytes: int
    where: str


@dataclass(frozen=True, slots=True)
class RankMemory:
    """`rows` in the order in which they are shown; together the most that the rank holds at once."""

    rank: int
    stages: list[int]
    parameters: int
    rows: tuple[Row, ...]

    def total(self, where: str) -> int:
        return sum(row.bytes for row in self.rows if row.where == where)


def all_ranks(spec: RunSpec, model: PlannedModel, cluster: Cluster, clusters: int) -> list[RankMemory]:
    return [rank_memory(spec, model, cluster, rank, clusters) for rank in range(cluster.ranks)]


def rank_memory(spec: RunSpec, model: PlannedModel, cluster: Cluster, rank: int, clusters: int) -> RankMemory:
    """clusters: members of a round. Raises SpecError, ModelError."""
    shapes = model.shapes(spec, cluster, rank)
    owned = sum(math.prod(shape) for shape in shapes.values())
    copy = model.tied_copy(spec, cluster, rank)
    held = owned + (math.prod(copy) if copy else 0)
    gradients_averaged = spec.outer.average == "gradient"  # then AdamW is the outer optimizer
    moments = (
        0
        if gradients_averaged
        else sum(_moment_bytes(s, cluster.adamw_bits) for s in (*shapes.values(), *([copy] if copy else [])))
    )
    largest = 4 * max(math.prod(shape) for shape in shapes.values())
    own = {32: 4, 64: 8}.get(spec.compression.bits, 2)
    device = "device" if cluster.device == "cuda" else "host"
    outer = "host" if cluster.offload else device
    step = _step_bytes(spec, model, cluster, rank, 4 * held)
    # AdamW on a CPU makes two tensors like the one it is at; an outer step one or two, and slices.
    other = max(2 * largest, largest + 16 * min(largest, 4 * _SLICE_VALUES))
    state = [
        Row("parameters", 4 * held, device),
        Row("inner optimizer", moments, device),
        Row("local outer optimizer", 8 * owned if spec.local.every else 0, device),
        Row("anchor", 4 * owned, outer),
        Row("outer momentum", 4 * owned, outer),
        Row("momentum of own shares", own * owned if spec.overlap.mode == "eager" else 0, outer),
        Row("second moment", 4 * owned if gradients_averaged else 0, outer),
        Row("undelivered", own * owned, outer),
        Row("counted", own * owned, outer),
    ]
    rows = [
        *state,
        Row("gradients", 4 * held, device),
        Row("activations", step, device),
        Row("at other moments", max(0, round(other) - step), device),
        *_round_rows(spec, model, cluster, rank, shapes, clusters, device),
        Row("anchors to average", 4 * owned * spec.eval.average if spec.eval.average > 1 else 0, "host"),
        # All that is kept, while it is written.
        Row("checkpoint", sum(row.bytes for row in state) - 4 * (held - owned), "host"),
    ]
    for where in ("device", "host"):
        if size := _FRAMEWORK.get((cluster.device, where)):
            rows.append(Row("libraries", round(size + _LEAD * (rank == 0 and where == "host")), where))
    return RankMemory(rank, cluster.placement(spec).stages_of(rank), owned, tuple(rows))


def _moment_bytes(shape: tuple[int, ...], bits: int) -> int:
    """AdamW's two of a parameter; in 8 bits, if it has 4096 values, with a scale for 256 (inner.py)."""
    values = math.prod(shape)
    return 8 * values if bits == 32 or values < 4096 else 2 * (values + 4 * -(-values // 256))


def _step_bytes(spec: RunSpec, model: PlannedModel, cluster: Cluster, rank: int, gradients: int) -> int:
    """What an inner step takes beyond gradients: activations, and what comes in from the chunks before and
    after, for which torch has buffers for all microbatches."""
    placement, microbatches = cluster.placement(spec), spec.inner.microbatches
    chunks = placement.chunks_of(rank)
    flying = in_flight(spec.inner.schedule, microbatches, rank, cluster.ranks, len(chunks))
    activations = model.activations(spec, cluster, rank)
    buffers = sum((chunk > 0) + (chunk < len(placement.chunks) - 1) for chunk in chunks)
    step = step_bytes(activations, gradients, microbatches * len(chunks), flying)
    return step - gradients + buffers * microbatches * model.hidden_bytes(spec)


def _round_rows(
    spec: RunSpec,
    model: PlannedModel,
    cluster: Cluster,
    rank: int,
    shapes: Shapes,
    clusters: int,
    device: str,
) -> list[Row]:
    """What averaging takes: see averaging/butterfly.py and coded.py."""
    compression, tensors = spec.compression, model.tensors
    stages = cluster.placement(spec).stages_of(rank)
    layouts = [Layout(tensors.stages[s], compression, dense_names=tensors.dense_names) for s in stages]
    values = sum(layout.phase_numel("p") + layout.phase_numel("q") for layout in layouts)
    size = 8 if compression.bits == 64 else 4
    gathers = clusters <= max(1, compression.gather_up_to)
    coded = [layout.coded_bytes() for layout in layouts]
    average = sum(clusters * c.contribution if gathers else c.average for c in coded)
    matrices = [
        matrix_shape(shape)
        for name, shape in shapes.items()
        if is_lowrank(name, shape, compression.lowrank, tensors.dense_names)
    ]
    r = compression.lowrank
    return [
        # Ours, what others decode of it, the average; as reducer the sums of our part.
        Row("averaging: vectors", size * (3 * values + (0 if gathers else values // clusters)), "host"),
        Row("averaging: factors", size * r * sum(m for m, _ in matrices), device),
        # One matrix at a time: a copy of what is undelivered; then, of its P, Q and Q with signs in float64
        # and the result, five times P.
        Row("averaging: factorising", max((4 * m * max(n, 5 * r) for m, n in matrices), default=0), device),
        Row("averaging: basis", 4 * r * sum(n for _, n in matrices), "host"),
        Row("averaging: last round, kept", average, "host"),
    ]
