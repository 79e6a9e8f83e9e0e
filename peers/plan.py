"""`dilocox-peer plan`: what a cluster of a run needs, and how fast the run would be."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from p2p_dilocox.errors import SpecError
from p2p_dilocox.placement import check_microbatches, place
from p2p_dilocox.plan import paper
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.fit import Way, ways_to_fit
from p2p_dilocox.plan.memory import RankMemory, all_ranks
from p2p_dilocox.plan.model import PlannedModel
from p2p_dilocox.plan.speed import ASSUMPTIONS, Compute, Link, Pace, codings, pace
from p2p_dilocox.runspec import RunSpec, load_run_file, total_inner_steps

from .devices import check_form, parse_devices

__all__ = ["DOES_NOT_FIT", "Choice", "Plan", "PlanOptions", "make_plan", "paper_record", "plan_record"]

DOES_NOT_FIT = 10
"""Exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """As on the command line; bytes, bits per second, operations per second."""

    devices: str | None = None
    ranks: int | None = None
    memory: float | None = None
    schedule: str | None = None
    microbatches: int | None = None
    adamw_bits: str | None = None
    offload: bool = False
    clusters: int | None = None
    uplink: float | None = None
    downlink: float | None = None
    flops: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A coding with the pace it gives; `lowrank` and `bits` are the settings."""

    name: str
    lowrank: int
    bits: int
    pace: Pace


@dataclass(frozen=True, slots=True)
class Plan:
    spec: RunSpec
    parameters: int
    cluster: Cluster
    clusters: int
    memory: list[RankMemory]
    limit: float | None
    ways: list[Way]
    pace: Pace | None
    choices: list[Choice]
    tokens: float

    @property
    def bottleneck(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.memory, key=lambda rank: rank.total(self.where))

    @property
    def where(self) -> str:
        return "device" if self.cluster.device == "cuda" else "host"

    @property
    def fits(self) -> bool | None:
        """None without a limit."""
        return None if self.limit is None else self.bottleneck.total(self.where) <= self.limit

    @property
    def recommended(self) -> tuple[Choice, int] | None:
        """The least lossy coding that H inner steps hide, else the smallest; and an H that is enough."""
        if not self.choices:
            return None
        H = self.spec.inner.H
        choice = next((c for c in self.choices if c.pace.enough_H <= H), self.choices[-1])
        return choice, max(H, choice.pace.enough_H)


def make_plan(run: str | Path, options: PlanOptions) -> Plan:
    """Raises SpecError, ModelError."""
    spec = load_run_file(run)
    schedule = options.schedule or spec.inner.schedule
    microbatches = options.microbatches or spec.inner.microbatches
    spec = replace(spec, inner=replace(spec.inner, schedule=schedule, microbatches=microbatches))
    cluster = _cluster(spec, options)
    check_microbatches(schedule, cluster.ranks, microbatches, spec.inner.batch_size)
    clusters = options.clusters or max(2, spec.run.min_clusters)
    compute, link = _rates(options)
    model = PlannedModel(spec)
    memory = all_ranks(spec, model, cluster, clusters)
    tokens = options.tokens or float(
        total_inner_steps(spec) * spec.inner.batch_size * spec.data.seq_len * clusters
    )
    plan = Plan(
        spec, model.tensors.num_parameters, cluster, clusters, memory, options.memory, [], None, [], tokens
    )
    if plan.fits is False and options.memory is not None:
        plan = replace(plan, ways=ways_to_fit(spec, model, cluster, clusters, options.memory))
    if compute is None or link is None:
        return plan
    choices = []
    for coding in codings(spec, model):
        changed = replace(spec, compression=coding.compression)
        rate = pace(changed, model, cluster, compute, link, clusters)
        choices.append(Choice(coding.name, coding.compression.lowrank, coding.compression.bits, rate))
    return replace(plan, pace=pace(spec, model, cluster, compute, link, clusters), choices=choices)


def plan_record(plan: Plan) -> dict[str, Any]:
    """What --json prints; docs/plan.md has its keys."""
    recommended = plan.recommended
    return {
        "run": plan.spec.run.id,
        "parameters": plan.parameters,
        "cluster": asdict(plan.cluster),
        "clusters": plan.clusters,
        "ranks": [
            {
                "rank": rank.rank,
                "stages": rank.stages,
                "parameters": rank.parameters,
                "bytes": [asdict(row) for row in rank.rows],
                "device_bytes": rank.total("device"),
                "host_bytes": rank.total("host"),
            }
            for rank in plan.memory
        ],
        "limit_bytes": plan.limit,
        "fits": plan.fits,
        "ways_to_fit": [asdict(way) for way in plan.ways],
        "tokens": plan.tokens,
        "pace": None if plan.pace is None else asdict(plan.pace) | {"days": days(plan, plan.pace)},
        "codings": [asdict(choice) for choice in plan.choices],
        "recommended": None
        if recommended is None
        else {"coding": recommended[0].name, "lowrank": recommended[0].lowrank, "bits": recommended[0].bits,
              "H": recommended[1]},
        "assumptions": list(ASSUMPTIONS),
    }  # fmt: skip


def days(plan: Plan, rate: Pace) -> float:
    return plan.tokens / rate.tokens_per_s / 86400


def paper_record() -> dict[str, Any]:
    """What --paper --json prints."""
    sent, hours = paper.sync_example()
    rates, fits = [], []
    for case in paper.CASES:
        rates += [asdict(rate) | {"deviation": rate.deviation} for rate in paper.speed(case)]
        fits += [asdict(fit) | {"fits": fit.fits} for fit in paper.memory(case)]
    return {
        "sync_bytes": sent, "sync_hours": hours, "speed": rates, "memory": fits,
        "gpu_bytes": paper.GPU_BYTES, "assumptions": list(paper.ASSUMPTIONS),
    }  # fmt: skip


def _cluster(spec: RunSpec, options: PlanOptions) -> Cluster:
    stages = spec.model.stages
    if options.devices is not None and options.ranks is not None:
        raise SpecError("give --devices or --ranks, not both")
    if options.devices is None:
        ranks, device = options.ranks or stages, "cuda"
    elif options.devices == "auto":
        found = parse_devices("auto", stages)
        ranks, device = len(found), found[0].partition(":")[0]
    else:
        check_form(options.devices)
        device, _, rest = options.devices.partition(":")
        ranks = len(rest.split(",")) if device == "cuda" else int(rest or 1)
    place(spec.inner.schedule, stages, ranks)
    offload = options.offload and device == "cuda"
    return Cluster(ranks, device, offload=offload, adamw_bits=int(options.adamw_bits or 32))


def _rates(options: PlanOptions) -> tuple[Compute | None, Link | None]:
    """Both or none: without the other one neither says anything."""
    if options.uplink is None:
        if any((options.downlink, options.flops, options.mfu, options.tokens_per_s, options.tokens)):
            raise SpecError("give --uplink as well, such as --uplink 100Mbps: the speed of a run hangs on it")
        return None, None
    if (options.flops is None) == (options.tokens_per_s is None):
        raise SpecError(
            "with --uplink give either --flops, the peak of one device (--flops 312TFLOPS), or "
            "--tokens-per-s, what a cluster was measured to train"
        )
    if options.mfu is not None and options.flops is None:
        raise SpecError("--mfu goes with --flops")
    link = Link(options.uplink, options.downlink or options.uplink)
    if options.tokens_per_s is not None:
        return Compute(tokens_per_s=options.tokens_per_s), link
    return Compute(flops=options.flops or 0.0, mfu=options.mfu or 0.4), link
