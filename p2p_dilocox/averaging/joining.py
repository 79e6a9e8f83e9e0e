"""How a cluster comes in: fresh, from its checkpoint, or with what clusters that are further have (rule V8).

theta_0 follows from the run spec, a state from its donors, and every round after either from the encoded
averages that members keep. A state is older than the rounds by some outer steps; rounds are small, so that
even a slow link catches up with them.
"""

import asyncio
import random
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from p2p_dilocox.averaging.company import Company, Progress, outranks
from p2p_dilocox.averaging.states import best_state, check_offer
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.messages import Ask, Message, RankAddress, Result, Standing, StateOffer

__all__ = ["Plan", "ask_offer", "make_plan"]

_MOST_ROUNDS = 8  # fetched before they are applied: so many averages are in memory
Address = Annotated[list[RankAddress], msgspec.Meta(max_length=512)]


class Plan(Message, frozen=True, kw_only=True):
    """What rank 0 tells its cluster to do next: wait for others, start from the state at hand, follow the
    rounds that come after it, download a state, or begin at theta_0 again and follow all rounds.

    standing: of the cluster that is furthest. donors: by cluster, who has `results` or `offer`. doubt: how
    many members sign another state for the outer step of the offer.
    """

    action: Literal["wait", "start", "follow", "download", "rewind", "pause", "leave", "refused"]
    donors: dict[str, Address] = {}
    standing: Standing | None = None
    results: list[Result] = []
    offer: StateOffer | None = None
    signers: int = 0
    doubt: int = 0
    detail: str = ""


async def make_plan(company: Company, needed: int, avoid: Collection[str] = ()) -> Plan:
    """Look at the swarm once. The cluster with the most committed outer steps decides where the run is, among
    those that prove it with the votes of half as many members as any other has that is not behind us.

    By looking we are seen: once our state is a recent one, the others' next round waits for us.
    needed: clusters to wait for. avoid: who did not have the rounds that it proved.
    """
    standings = await company.greet()
    if company.progress.duplicate:
        return Plan(action="refused", detail=company.progress.duplicate)
    known, ours = {**await company.archives(), **standings}, company.progress
    further = [c for c in known if known[c].committed_t > 0]
    votes = dict(
        zip(further, await asyncio.gather(*(company.voters(known[c]) for c in further)), strict=True)
    )
    # How many were in a round that we have been past says nothing about those who went on without us.
    past = [c for c in further if _is_behind(known[c], ours)]
    most = max((votes[c] for c in further if c not in past), default=0)
    trusted = [c for c in further if votes[c] and 2 * votes[c] >= most]
    if trusted:
        # Of those that are equally far a cluster that trains: it says where it is in its outer step.
        furthest = max(trusted, key=lambda c: (known[c].committed_t, c in standings, c))
        standing = known[furthest]
        if standing.lineage == ours.lineage:
            return _once_enough(company, standings, needed, standing)
        if _is_behind(standing, ours):  # it follows us
            return _once_enough(company, standings, needed)
        ahead = standing.committed_t > ours.committed_t
        theirs = votes[furthest], standing.committed_t
        if ahead or outranks(theirs, (len(ours.members), ours.committed_t)):
            same = [c for c in trusted if known[c].lineage == standing.lineage]
            helpful = [c for c in same if c not in avoid]
            plan = None
            if ahead:
                plan = await _rounds_after(company, standing, helpful, ours.committed_t, ours.lineage)
            parted = not ahead or await _parted(company, same)
            plan = plan or await _state(company, standing, known, 0 if parted else ours.committed_t)
            if plan is None and parted and ours.committed_t:
                start = company.genesis
                if await _rounds_after(company, standing, helpful, 0, start):
                    return Plan(action="rewind", standing=standing, detail="the others keep all rounds")
            return plan or Plan(
                action="wait",
                detail=f"{votes[furthest]} clusters committed outer step {standing.committed_t}, and nobody "
                "is here who has the state: it goes on when one of them is back",
            )
    others = [c for c in standings if standings[c].committed_t == 0 and standings[c].lineage != ours.lineage]
    if ours.committed_t == 0 and 2 * len(others) > len(standings):  # half of all, ourselves included, or more
        where = ", ".join(sorted(others)[:3])
        return Plan(
            action="refused",
            detail=f"model.path has other weights here than on {where}: these clusters would train different "
            "models. Compare the files with the organiser's",
        )
    return _once_enough(company, standings, needed)


def _once_enough(
    company: Company, standings: Collection[str], needed: int, standing: Standing | None = None
) -> Plan:
    """standings: of the other clusters. Those that pause do not count, and archives, which train nothing."""
    away = [c for c, presence in company.present.items() if presence.state in ("left", "paused")]
    present = 1 + len([c for c in standings if c not in away])
    if present < needed:
        return Plan(action="wait", detail=f"{present}/{needed} clusters")
    return Plan(action="start", standing=standing)


def _is_behind(standing: Standing, ours: Progress) -> bool:
    """On our own way."""
    t = standing.committed_t
    return t < ours.committed_t and ours.lineages.get(t) == standing.lineage


async def _parted(company: Company, sources: list[str]) -> bool:
    """Whether the round after our last one does not follow from ours."""
    ours = company.progress
    parents = await asyncio.gather(*(company.parent_of(c, ours.committed_t + 1) for c in sources))
    return any(parent not in ("", ours.lineage) for parent in parents)


async def _rounds_after(
    company: Company, standing: Standing, sources: list[str], t: int, lineage: str
) -> Plan | None:
    """The next rounds from (t, lineage) on; None if nobody keeps them or has another history."""
    for cluster in random.sample(sources, len(sources)):
        try:
            results = await company.results_from(cluster, t, lineage, standing.committed_t, _MOST_ROUNDS)
        except NotTrustedError:
            continue
        if results:
            donors = {cluster: company.ranks_of(cluster)}
            return Plan(action="follow", results=results, donors=donors, standing=standing, detail=cluster)
    return None


async def _state(
    company: Company, standing: Standing, sources: Collection[str], newer_than: int
) -> Plan | None:
    """The state that most members sign, and all that have it; None if there is none that helps us."""
    offers = [o for o in await asyncio.gather(*(ask_offer(company, c) for c in sources)) if o is not None]
    state = best_state(o for o in offers if o[1].t > newer_than)
    if state is None:
        return None
    return Plan(
        action="download", offer=state.offer, signers=len(state.signers), doubt=state.others,
        donors={c: company.ranks_of(c) for c in state.donors}, standing=standing,
        detail=f"outer step {state.offer.t}, signed by {len(state.signers)}",
    )  # fmt: skip


async def ask_offer(company: Company, cluster: str) -> tuple[str, StateOffer, set[str]] | None:
    """The newest state of a cluster or an archive, with the members that sign it; None if it has none that
    is proven."""
    shown, timeout = Ask(shown=company.gate.own), company.timeouts.reply_s
    offer = await company.ask(cluster, lambda stub: stub.rpc_state(shown, timeout=timeout))
    if offer is None:
        return None
    try:
        signers = await asyncio.to_thread(
            check_offer, offer, company.node.run_id, company.gate, company.weight_cap
        )
    except NotTrustedError:
        return None
    return cluster, offer, signers
