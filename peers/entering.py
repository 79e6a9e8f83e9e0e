"""How a rank gets from its own state to the run's: wait, follow rounds, download a state. All ranks of a
cluster do the same, as rank 0 has planned."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from p2p_dilocox.averaging.catchup import read_result
from p2p_dilocox.averaging.company import CALL_FAILED
from p2p_dilocox.averaging.download import Donor, fetch_state
from p2p_dilocox.averaging.joining import Plan, make_plan
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.snapshot import snapshot_bytes
from p2p_dilocox.checkpoint.resume import load_stages
from p2p_dilocox.checkpoint.store import names_of_stages
from p2p_dilocox.errors import ClusterError, DilocoxError, NotTrustedError, UnreachableError
from p2p_dilocox.events import Warned
from p2p_dilocox.runspec import RunSpec, tokens_per_outer_step
from p2p_dilocox.swarm.loop import NetworkThread
from p2p_dilocox.swarm.messages import StateOffer, unpack
from p2p_dilocox.trainer import Rank, evaluate, inner_steps_of, take_outer_steps
from p2p_dilocox.wish import Stop, Wish

__all__ = ["enter_run"]

_NETWORK_S = 60.0
_ANNOUNCE_S = 15.0
_REST_S = 0.5  # between two looks whether a pause is over
_DOWNLOADS = 5
_STUCK = 16
_LOG = logging.getLogger(__name__)
Say = Callable[[str, str], None]


def enter_run(
    spec: RunSpec, rank: Rank, lead: Lead | None, network: NetworkThread, state: Path, say: Say
) -> None:
    """Wait for enough clusters, or come to where those are that are further; then the cluster counts as
    training. state: the state directory, for what is downloaded.

    Raises Stop, NotTrustedError, ClusterError after 5 downloads that were of no use.
    """
    waiting_since = time.monotonic()
    rank.progress.state = "joining"
    downloads = stuck = 0
    least_behind = math.inf
    avoid: set[str] = set()
    while True:
        plan = _next_plan(spec, rank, lead, network, avoid)
        match plan.action:
            case "wait":
                waited_s = time.monotonic() - waiting_since
                say("waiting", f"{plan.detail}, {waited_s:.0f} s")
                time.sleep(min(2.0, 0.5 + waited_s / 20))
                continue
            case "pause":
                _rest(spec, rank, plan, lead, network, say)
                continue
            case "leave":
                raise Stop(Wish.LEAVE_NOW)
            case "refused":
                raise NotTrustedError(plan.detail)
            case "start" if rank.progress.state == "training":
                break
            case "follow" if rank.progress.state == "training" and _almost_there(plan, rank):
                break
            case "rewind":
                raise _rewind(rank)
            case "follow":
                behind = plan.standing.committed_t - rank.outer.t if plan.standing else 0
                stuck = 0 if behind < least_behind else stuck + 1
                least_behind = min(behind, least_behind)
                if not _follow(spec, rank, plan, say):
                    avoid |= set(plan.donors)
                    continue
            case "download":
                downloads += 1
                _download(spec, rank, plan, network, state, say)
        if downloads >= _DOWNLOADS or stuck >= _STUCK:
            raise ClusterError(
                f"{downloads} downloads, and {stuck} times rounds to catch up with without coming nearer: "
                "is this link fast enough for the run?"
            )
        if plan.action != "download":
            rank.progress.state = "training"  # from here their rounds wait for us; look what began before
    _fall_in(spec, rank, plan)
    if rank.outer.t == 0:
        evaluate(spec, rank)


def _rewind(rank: Rank) -> ClusterError:
    """Our history has ended where most went on, and nobody has a state that we could take."""
    if rank.index == 0:
        aside = rank.checkpoints.set_aside()
        rank.report(Warned(rank=0, message=f"the checkpoints of a history that has ended are now in {aside}"))
    return ClusterError("the run went on elsewhere. The cluster begins at the start and follows all rounds.")


def _fall_in(spec: RunSpec, rank: Rank, plan: Plan) -> None:
    """Start where the others are, in the same outer step and about as far in it."""
    standing = plan.standing
    if standing is not None and standing.t >= rank.t - 1 + (rank.h > 0):
        behind = plan.action == "follow"
        rank.t = standing.t + 1
        rank.h = min(standing.h, inner_steps_of(spec, rank) - 1)
        over = standing.t
        if standing.in_flight > standing.t or behind:
            followed = max(standing.in_flight, standing.t)
            rank.pending, rank.t, over = rank.rounds.follow(followed), followed + 1, followed - 1
        rank.progress.move_to(over, rank.outer)  # we vote on outer steps near this one only
    rank.progress.h = rank.h


def _almost_there(plan: Plan, rank: Rank) -> bool:
    """The round that is under way brings us there: `land` follows it."""
    return plan.standing is not None and plan.standing.committed_t - rank.outer.t <= 2


def _next_plan(spec: RunSpec, rank: Rank, lead: Lead | None, network: NetworkThread, avoid: set[str]) -> Plan:
    packed = b""
    if lead is not None:
        if rank.wish.value >= Wish.LEAVE:
            plan = Plan(action="leave")
        elif rank.wish.value:
            plan = Plan(action="pause", detail=rank.wish.reason)
        else:
            needed = spec.run.quorum if rank.outer.t else spec.run.min_clusters
            plan = network.call(make_plan(lead.company, needed, avoid), _NETWORK_S)
        packed = plan.pack()
    return unpack(rank.pipeline.broadcast(packed), Plan)


def _rest(spec: RunSpec, rank: Rank, plan: Plan, lead: Lead | None, network: NetworkThread, say: Say) -> None:
    """Stay in memory and do nothing until the wish is another one; nobody's round waits for us."""
    rank.progress.state = "paused"
    if lead is not None:
        with contextlib.suppress(*CALL_FAILED, TimeoutError):
            network.call(lead.company.announce(), _ANNOUNCE_S)
    reason = None
    while plan.action == "pause":
        if plan.detail != reason:
            reason = plan.detail
            say("paused", reason)
        time.sleep(_REST_S)
        plan = _next_plan(spec, rank, lead, network, set())
    rank.progress.state = "joining"


def _follow(spec: RunSpec, rank: Rank, plan: Plan, say: Say) -> bool:
    """Apply the next rounds; all ranks, or none. Whether they were applied."""
    last = plan.standing.committed_t if plan.standing else plan.results[-1].call.t
    (donor,) = plan.donors.values()
    say("catching up", f"outer step {rank.outer.t} of {last}")
    outcome = rank.rounds.adopt(plan.results, donor, 20 * spec.deadlines.round_s).wait(
        lambda: rank.wish.value == Wish.LEAVE_NOW
    )
    if outcome is not None and outcome.failed:
        rank.report(Warned(rank=rank.index, message=f"catching up from {plan.detail}: {outcome.reason}"))
    good = outcome is not None and not outcome.failed
    if rank.pipeline.sum([float(good)])[0] != rank.pipeline.num_ranks or outcome is None:
        return False
    take_outer_steps(spec, rank, outcome)
    rank.pipeline.sync_tied_()
    rank.progress.move_to(rank.outer.t, rank.outer)
    rank.history.write(outcome, rank.outer.lineage)
    if rank.t <= rank.outer.t:
        rank.t, rank.h, rank.unsent_tokens = rank.outer.t + 1, 0, 0
    return True


def _download(spec: RunSpec, rank: Rank, plan: Plan, network: NetworkThread, state: Path, say: Say) -> None:
    """Fetch the offered state from all that have it. All ranks take it, or none does."""
    assert plan.offer is not None
    offer, shown, began = plan.offer, [-1.0], time.monotonic()
    donors = [Donor(name, ranks) for name, ranks in plan.donors.items()]
    if plan.doubt and rank.index == 0:
        message = (
            f"{plan.signers} members sign the state of outer step {offer.t} that is fetched, {plan.doubt} "
            "another one: their machines round differently, or somebody lies"
        )
        rank.report(Warned(rank=0, message=message))

    def show(received: int, total: int) -> None:
        if rank.wish.value >= Wish.LEAVE:
            raise UnreachableError("told to leave")
        if (part := received / total) - shown[0] > 0.05 or part == 1.0:
            shown[0] = part
            where = f"{len(donors)} donors" if len(donors) > 1 else donors[0].name
            say("downloading", f"{part:.0%} of {total / 1e6:.1f} MB, {plan.detail}, from {where}")

    names = names_of_stages(rank.pipeline.stage_of)
    limits = {stage: snapshot_bytes(rank.outer, names[stage]) for stage in names}
    folder, files = state / "incoming", {}
    try:
        body = fetch_state(rank.rounds.service, offer, donors, limits, folder, show)
        files = network.call(body, 3600.0 + 20 * spec.deadlines.round_s)
    except (DilocoxError, *CALL_FAILED, OSError, asyncio.CancelledError) as error:
        _LOG.warning("download of outer step %d failed: %s", offer.t, error)
        rank.report(Warned(rank=rank.index, message=f"download of outer step {offer.t}: {error}"))
    for donor in donors:
        if donor.trouble:
            rank.report(Warned(rank=rank.index, message=f"from cluster {donor.name}: {donor.trouble}"))
    if rank.pipeline.sum([float(bool(files))])[0] == rank.pipeline.num_ranks:
        say("verifying", f"outer step {offer.t}, fetched in {time.monotonic() - began:.1f} s")
        load_stages(files, rank)
        if rank.adapting:
            gate, weight_cap = rank.rounds.service.gate, float(tokens_per_outer_step(spec))
            roster = read_result(offer.result, spec.run.id, gate, weight_cap).roster
            rank.adapting.recall(roster.lowrank, roster.H)
        _put_on_disk(rank, offer)
        rank.progress.move_to(rank.outer.t, rank.outer)
        for path in files.values():
            path.unlink(missing_ok=True)


def _put_on_disk(rank: Rank, offer: StateOffer) -> None:
    """Before a round follows from it. Who is killed earlier comes back to the state before, with its rounds;
    without either it would take outer steps again that it has taken (rule V3)."""
    kept = rank.rounds.kept
    try:
        kept.remember(offer.t, offer.result, {})
    except OSError as error:
        message = f"the proof of outer step {offer.t} is not on disk: {error.strerror}"
        rank.report(Warned(rank=rank.index, message=message))
    rank.checkpoints.wait()
    rank.checkpoints.save(rank)
    rank.checkpoints.wait()
    kept.forget_but(offer.t)
