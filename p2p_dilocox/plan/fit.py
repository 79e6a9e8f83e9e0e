"""Whether ranks fit into the memory they are given, and what would make them fit: tried by calculating."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from p2p_dilocox.errors import SpecError
from p2p_dilocox.placement import check_microbatches, place
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.memory import all_ranks
from p2p_dilocox.plan.model import PlannedModel
from p2p_dilocox.settings import RunSpec

__all__ = ["Way", "largest", "ways_to_fit"]

Plan = tuple[RunSpec, Cluster]


@dataclass(frozen=True, slots=True)
class Way:
    """changes: what to set, together. largest: bytes of the fullest rank then."""

    changes: tuple[str, ...]
    largest: int


@dataclass(frozen=True, slots=True)
class _Change:
    """kind: of several changes of a kind the first that is enough will do."""

    kind: str

    name: str
    make: Callable[[RunSpec, Cluster], Plan]


def largest(spec: RunSpec, model: PlannedModel, cluster: Cluster, clusters: int) -> int:
    """Bytes of the rank that needs most, of a GPU's memory, or of main memory where CPUs train."""
    where = "device" if cluster.device == "cuda" else "host"
    return max(rank.total(where) for rank in all_ranks(spec, model, cluster, clusters))


def ways_to_fit(
    spec: RunSpec, model: PlannedModel, cluster: Cluster, clusters: int, limit: float
) -> list[Way]:
    """Changes with which every rank takes `limit` bytes or less, the cheapest first.

    First single changes, one of a kind. If none is enough, they are added up in the order of their cost; if
    all together are not enough either, that is what is returned, and its `largest` is above the limit.
    """
    ways: dict[str, Way] = {}
    for change in _changes(spec, cluster):
        if change.kind not in ways:
            changed = change.make(spec, cluster)
            size = largest(changed[0], model, changed[1], clusters)
            if size <= limit:
                ways[change.kind] = Way((change.name,), size)
    if ways:
        return list(ways.values())
    names: dict[str, str] = {}
    plan = spec, cluster
    before = largest(spec, model, cluster, clusters)
    for change in _changes(spec, cluster):
        changed = change.make(*plan)
        size = largest(changed[0], model, changed[1], clusters)
        if size < before:
            plan, before = changed, size
            names[change.kind] = change.name
        if size <= limit:
            break
    return [Way(tuple(names.values()), before)] if names else []


def _changes(spec: RunSpec, cluster: Cluster) -> Iterator[_Change]:
    """The cheapest first: what costs nothing or little time, then time, then machines. What a cluster may
    choose is not changed in the run."""
    inner, stages = spec.inner, spec.model.stages
    for microbatches in range(inner.microbatches + 1, inner.batch_size + 1):
        if _possible(spec, cluster.ranks, microbatches):
            yield _Change("microbatches", f"--microbatches {microbatches}", _with_microbatches(microbatches))
    if cluster.device == "cuda" and not cluster.offload:
        yield _Change("offload", "--offload", lambda s, c: (s, replace(c, offload=True)))
    if cluster.adamw_bits == 32:
        yield _Change("adamw", "--adamw-bits 8", lambda s, c: (s, replace(c, adamw_bits=8)))
    if not inner.checkpointing:
        yield _Change("checkpointing", "inner.checkpointing = true", _with_checkpointing)
    ranks = cluster.ranks
    while ranks < stages:
        ranks = min(2 * ranks, stages)
        if _possible(spec, ranks, inner.microbatches):
            yield _Change("ranks", f"{ranks} ranks", _with_ranks(ranks))


def _possible(spec: RunSpec, ranks: int, microbatches: int) -> bool:
    try:
        place(spec.inner.schedule, spec.model.stages, ranks)
        check_microbatches(spec.inner.schedule, ranks, microbatches, spec.inner.batch_size)
    except SpecError:
        return False
    return True


def _with_microbatches(microbatches: int) -> Callable[[RunSpec, Cluster], Plan]:
    return lambda spec, cluster: (
        replace(spec, inner=replace(spec.inner, microbatches=microbatches)),
        cluster,
    )


def _with_checkpointing(spec: RunSpec, cluster: Cluster) -> Plan:
    return replace(spec, inner=replace(spec.inner, checkpointing=True)), cluster


def _with_ranks(ranks: int) -> Callable[[RunSpec, Cluster], Plan]:
    return lambda spec, cluster: (spec, replace(cluster, ranks=ranks))
