"""How long steps and rounds take, and what that makes of a run: utilisation, tokens per second, days, bytes.

Everything follows from sizes that the codec gives and from rates that the caller states; `ASSUMPTIONS` are
the rest, and are shown wherever a figure of this module is.
"""

import math
from dataclasses import dataclass, replace

from p2p_dilocox.compression import Layout
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.model import PlannedModel
from p2p_dilocox.recipe import recipes
from p2p_dilocox.settings import Compression, RunSpec
from p2p_dilocox.traffic import round_bytes

__all__ = [
    "Coding", "Compute", "Link", "Pace", "bubble_share", "codings", "flops_per_token", "pace", "step_seconds",
]  # fmt: skip

CODEC_VALUES_PER_S = 100e6
PRODUCT_PARAMETERS_PER_S = 170e6
AGREE_S = 0.3
BACKGROUND_BYTES_PER_S = 4500.0
SPARE = 1.25
WAITING = 0.05
MONTH_S = 30 * 86400.0

ASSUMPTIONS = (
    "all clusters are alike; a cluster's link carries what is stated in both directions at once",
    f"roll call and votes take {AGREE_S:g} s; each rank codes {CODEC_VALUES_PER_S / 1e6:.0f} million values "
    f"per second, and on a CPU multiplies {PRODUCT_PARAMETERS_PER_S / 1e6:.0f} million parameters per second "
    "with low-rank factors (benchmarks/codec.py)",
    f"an H is enough if a round takes at most 1/{SPARE:g} of the inner steps it hides behind; without "
    f"overlap, if clusters wait {WAITING:.0%} of the time",
    f"heartbeats and DHT: {BACKGROUND_BYTES_PER_S / 1e3:g} kB/s per rank (README, Traffic)",
)


@dataclass(frozen=True, slots=True)
class Link:
    """Of a cluster, shared by its ranks; bits per second."""

    up: float
    down: float


@dataclass(frozen=True, slots=True)
class Compute:
    """Either tokens_per_s, measured, of one cluster; or flops, the peak of one device, and mfu, the part of
    it that a busy device reaches. The pipeline's bubble comes on top of mfu."""

    tokens_per_s: float = 0.0
    flops: float = 0.0
    mfu: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a run in which all clusters take part in every round."""

    step_s: float
    sent_bytes: float
    """Per cluster and round; as much is received."""
    transfer_s: float
    round_s: float
    waits_s: float
    """Of an outer step, without training."""
    utilisation: float
    enough_H: int
    """Smallest H with which the clusters hardly wait (see ASSUMPTIONS)."""
    tokens_per_s: float
    """Of all clusters together."""
    month_bytes: float
    """Sent by a cluster in 30 days, heartbeats included."""


@dataclass(frozen=True, slots=True)
class Coding:
    """A way to code, from the least lossy on."""

    name: str
    compression: Compression


def bubble_share(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Part of an inner step in which a rank has nothing to do: (S - 1) / (m + S - 1) of GPipe and 1F1B
    (arXiv 1811.06965), with m times as many passes if a rank has several chunks (arXiv 2104.04473). Schedules
    without bubbles are taken by their name."""
    if schedule in ("interleaved-zero-bubble", "zbv"):
        return 0.0
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def flops_per_token(spec: RunSpec, model: PlannedModel) -> float:
    """Forward and backward: 6 per parameter that is multiplied with, and attention's 12 * layers * width * T
    (PaLM, arXiv 2204.02311, appendix B). Recomputation is not counted."""
    attention = 12 * model.tensors.num_layers * int(model.config.hidden_size) * spec.data.seq_len
    return 6.0 * model.multiplications + attention


def step_seconds(spec: RunSpec, model: PlannedModel, cluster: Cluster, compute: Compute) -> float:
    """One inner step of a cluster."""
    tokens = spec.inner.batch_size * spec.data.seq_len
    if compute.tokens_per_s:
        return tokens / compute.tokens_per_s
    busy_s = tokens * flops_per_token(spec, model) / (cluster.ranks * compute.flops * compute.mfu)
    inner, chunks = spec.inner, len(cluster.placement(spec).chunks_of(0))
    return busy_s / (1.0 - bubble_share(inner.schedule, cluster.ranks, inner.microbatches, chunks))


def pace(
    spec: RunSpec, model: PlannedModel, cluster: Cluster, compute: Compute, link: Link, clusters: int
) -> Pace:
    """clusters: members of every round, 2 or more."""
    step_s = step_seconds(spec, model, cluster, compute)
    sent = round_bytes(spec, model.tensors, clusters)
    transfer_s = 8 * sent / min(link.up, link.down)
    round_s = AGREE_S + transfer_s + _coding_s(spec, model, cluster)
    training_s = spec.inner.H * step_s
    overlap = Overlap(spec.overlap.mode)
    if overlap.waits_at_start or overlap is Overlap.DELAY:  # behind a fixed number of inner steps, or none
        steps = spec.overlap.delay if overlap is Overlap.DELAY else 0
        waits_s = max(0.0, round_s - steps * step_s)
        enough_s = waits_s * (1 - WAITING) / WAITING
    else:
        waits_s, enough_s = max(0.0, round_s - training_s), round_s * SPARE
    outer_s = training_s + waits_s
    tokens = clusters * spec.inner.H * spec.inner.batch_size * spec.data.seq_len
    return Pace(
        step_s=step_s,
        sent_bytes=sent,
        transfer_s=transfer_s,
        round_s=round_s,
        waits_s=waits_s,
        utilisation=training_s / outer_s,
        enough_H=max(1, math.ceil(enough_s / step_s)),
        tokens_per_s=tokens / outer_s,
        month_bytes=MONTH_S * (sent / outer_s + BACKGROUND_BYTES_PER_S * cluster.ranks),
    )


def codings(spec: RunSpec, model: PlannedModel) -> list[Coding]:
    """What might be sent instead, the least lossy first: docs/recipes.md says what each costs in loss."""
    known, width = recipes(), int(model.config.hidden_size)
    found = [Coding("4 bits, lowrank 0", known["dilocox-dense"].compression)]
    for part in (4, 8, 16):
        if lowrank := width // part:
            low = replace(known["dilocox"].compression, lowrank=lowrank)
            found.append(Coding(f"4-8 bits, lowrank {lowrank}", low))
    return found


def _coding_s(spec: RunSpec, model: PlannedModel, cluster: Cluster) -> float:
    """Of the rank that has most to code; its stages one after the other in one thread."""
    seconds = 0.0
    for rank in range(cluster.ranks):
        values = parameters = 0
        for stage in cluster.placement(spec).stages_of(rank):
            layout = Layout(
                model.tensors.stages[stage], spec.compression, dense_names=model.tensors.dense_names
            )
            values += layout.phase_numel("p") + layout.phase_numel("q")
            parameters += sum(math.prod(layout.shapes[name]) for name in layout.lowrank_names)
        multiplied = parameters / PRODUCT_PARAMETERS_PER_S if cluster.device == "cpu" else 0.0
        seconds = max(seconds, values / CODEC_VALUES_PER_S + multiplied)
    return seconds
