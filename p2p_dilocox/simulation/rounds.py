"""A round of simulated clusters: the real averaging, its messages handed over instead of sent."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from p2p_dilocox.averaging.butterfly import Averaging
from p2p_dilocox.averaging.coded import CodedStage, StageLayouts, merged
from p2p_dilocox.averaging.division import PHASES, Division
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import OuterStep
from p2p_dilocox.averaging.rollcall import Roster
from p2p_dilocox.lineage import combined_digest, round_digest
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.swarm.messages import RankAddress, Ready

__all__ = ["Averaged", "Member", "average"]

_ANYWHERE = RankAddress(peer="simulated", maddrs=["simulated"], stages=[0])


@dataclass(frozen=True)
class Member:
    """What a cluster brings to a round. layouts: of every stage."""

    cluster_id: str
    outer: OuterState
    layouts: Mapping[int, StageLayouts]
    offer: Offer
    uplink_mbps: float


@dataclass(frozen=True)
class Averaged:
    """A committed round: per member its outer step, and the payload bytes that it has sent and received."""

    steps: list[OuterStep]
    sent: list[int]
    received: list[int]


def average(
    t: int, members: Sequence[Member], loop: asyncio.AbstractEventLoop, codec: Executor, *, weight_cap: float
) -> Averaged:
    """Average all stages. members: in the order of their ids. codec: one thread, as in `codec_thread`.

    loop: idle. asyncio.run makes one for each round, and while it installs its handler of Ctrl-C it prints
    every tensor here into the text of an error that nobody sees: more time than all the arithmetic.
    """
    return loop.run_until_complete(_average(t, members, codec, weight_cap))


async def _average(t: int, members: Sequence[Member], codec: Executor, weight_cap: float) -> Averaged:
    roster, outers = _roster(t, members), [m.outer for m in members]
    sent, received = [0] * len(members), [0] * len(members)
    averages: list[list[Average]] = [[] for _ in members]
    owns: list[list[Average]] = [[] for _ in members]
    digests: dict[int, str] = {}
    for stage, layouts in members[0].layouts.items():
        layout = layouts.at(t, *roster.lowrank[stage : stage + 1])
        coded = [CodedStage(outer, layout) for outer in outers]
        division = Division(layout, roster, outers[0].spec.compression.gather_up_to)
        p, q = ([division.averaging(phase, me, codec) for me in range(len(members))] for phase in PHASES)
        for code, mine in zip(coded, p, strict=True):
            mine.set_vector(await _compute(codec, code.vector_p))
        await _exchange(p, sent, received)
        for code, mine, average_p in zip(coded, q, (a.average for a in p), strict=True):
            mine.set_vector(await _compute(codec, partial(code.vector_q, average_p)))
        await _exchange(q, sent, received)
        for index, code in enumerate(coded):
            averages[index].append(code.decode(p[index].average, q[index].average))
            owns[index].append(code.decode(p[index].own, q[index].own))
        found = {
            round_digest([d for part in (*a.chunks, *b.chunks) for d in part])
            for a, b in zip(p, q, strict=True)
        }
        assert len(found) == 1, f"outer step {t}: the members of stage {stage} hold different bytes"
        digests[stage] = found.pop()
    steps = [
        OuterStep(
            t, roster.ids, roster.weights, roster.parent, combined_digest(digests), digests, merged(a),
            merged(o), roster.norms, weight_cap, roster.lowrank, roster.H,
        )
        for a, o in zip(averages, owns, strict=True)
    ]  # fmt: skip
    return Averaged(steps, sent, received)


async def _exchange(averagings: Sequence[Averaging], sent: list[int], received: list[int]) -> None:
    """Every message of one phase. `sent` and `received` count those between two members."""

    async def contributions(i: int, j: int) -> None:
        index = 0
        async for data in averagings[i].contributions(j):
            sent[i] += len(data)
            received[j] += len(data)
            await averagings[j].add(i, index, data)
            index += 1

    async def averages(i: int) -> None:
        index = 0
        async for data in averagings[i].averages():
            for j in [j for j in averagings[i].members if j != i]:
                sent[i] += len(data)
                received[j] += len(data)
                await averagings[j].receive(i, index, data)
            index += 1

    pairs = [(i, j) for i in range(len(averagings)) for j in range(len(averagings)) if i != j]
    await asyncio.gather(
        *(contributions(i, j) for i, j in pairs),
        *(averages(i) for i in range(len(averagings))),
        *(averaging.add_own() for averaging in averagings),
    )


def _roster(t: int, members: Sequence[Member]) -> Roster:
    ready = tuple(
        Ready(
            spec="", cluster_id=m.cluster_id, name=m.cluster_id, t=t, attempt=0, lineage=m.outer.lineage,
            weight=m.offer.weight, norm=m.offer.norm, fingerprint=list(m.offer.fingerprint),
            lowrank=list(m.offer.lowrank), H=m.offer.H,
            uplink_mbps=m.uplink_mbps, without=[], ranks=[_ANYWHERE],
        )
        for m in members
    )  # fmt: skip
    return Roster(t, 0, members[0].cluster_id, ready, "", 0.0)


async def _compute(codec: Executor, function: Callable[[], Tensor]) -> Tensor:
    return await asyncio.get_running_loop().run_in_executor(codec, function)
