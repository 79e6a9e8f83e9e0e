"""How a cluster comes in: fresh, from its checkpoint, or with
the state of a cluster that is further (rule V8)."""

import asyncio
import random
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from p2p_dilocox.averaging.company import Company, outranks
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.snapshot import Snapshot, read_snapshot, snapshot_bytes
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.outer import OuterState
from p2p_dilocox.swarm.messages import Ask, Message, RankAddress, Standing, peer_of_stage

__all__ = ["Plan", "download", "make_plan"]


class Plan(Message, frozen=True, kw_only=True):
    """What rank 0 tells its cluster to do next: wait for others,
    start from the state at hand, or download from a donor.

    standing: the donor's, or of a cluster with our lineage; None if we are the first.
    """

    action: Literal["wait", "start", "download", "pause", "leave", "refused"]
    donor: Annotated[list[RankAddress], msgspec.Meta(max_length=512)] = []
    standing: Standing | None = None
    detail: str = ""


async def make_plan(company: Company, outer: OuterState, needed: int) -> Plan:
    """Look at the swarm once. The cluster with the most committed outer steps decides where the run is, among
    those that prove it with the votes of more than half as many members as any other has.

    By looking we are seen: once our state is a recent one, the others' next round waits for us.
    needed: clusters to wait for.
    """
    standings = await company.greet()
    if company.progress.duplicate:
        return Plan(action="refused", detail=company.progress.duplicate)
    further = [c for c in standings if standings[c].committed_t > 0]
    votes = dict(
        zip(further, await asyncio.gather(*(company.voters(standings[c]) for c in further)), strict=True)
    )
    trusted = [c for c in further if 2 * votes[c] >= max(votes.values())]
    if trusted:
        furthest = max(trusted, key=lambda c: (standings[c].committed_t, c))
        standing = standings[furthest]
        best = random.choice([c for c in trusted if standings[c].lineage == standing.lineage])
        if standing.lineage == outer.lineage:
            return Plan(action="start", standing=standing)
        ahead = standing.committed_t > outer.t
        if ahead or outranks((votes[furthest], standing.committed_t), (len(outer.members), outer.t)):
            return Plan(action="download", donor=company.ranks_of(best), standing=standing, detail=best)
    others = [c for c in standings if standings[c].committed_t == 0 and standings[c].lineage != outer.lineage]
    if outer.t == 0 and 2 * len(others) > len(standings):  # half of all, ourselves included, or more
        where = ", ".join(sorted(others)[:3])
        return Plan(
            action="refused",
            detail=f"model.path has other weights here than on {where}: these clusters would train different "
            "models. Compare the files with the organiser's",
        )
    present = 1 + len(standings)
    if present < needed:
        return Plan(action="wait", detail=f"{present}/{needed} clusters")
    return Plan(action="start")


async def download(
    service: Service,
    outer: OuterState,
    names_of_stage: dict[int, list[str]],
    donor: list[RankAddress],
    progress: Callable[[float], None],
) -> list[Snapshot]:
    """Every stage we hold, from the donor's ranks, checked. Raises NotTrustedError, or what libp2p raises.

    progress: called with the fraction received. A donor may send no more than the state has.
    """
    limit = {stage: snapshot_bytes(outer, names) for stage, names in names_of_stage.items()}
    received, total = 0, sum(limit.values())
    snapshots = []
    for stage, names in names_of_stage.items():
        peer = peer_of_stage(donor, stage)
        if peer is None:
            raise NotTrustedError(f"the donor has nobody for stage {stage}")
        data = bytearray()
        async for piece in service.fetch(peer, "snapshot", Ask(stage=stage), limit[stage]):
            data += piece
            progress(min(1.0, (received + len(data)) / total))
        received += limit[stage]
        snapshots.append(await asyncio.to_thread(read_snapshot, bytes(data), outer, names))
    return snapshots
