"""What a cluster's lead (rank 0) does for its cluster: heartbeats, roll call, votes, and the word to its own
ranks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from hivemind.p2p import P2PDaemonError, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.rollcall import RollCalls, Roster, coordinator_order, read_call
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.vote import Ballot
from p2p_dilocox.errors import ClusterError, NotTrustedError
from p2p_dilocox.lineage import combined_digest, next_lineage
from p2p_dilocox.outer import OuterState
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Decision,
    Envelope,
    Follow,
    Presence,
    RankAddress,
    Ready,
    Result,
    StageDone,
    Standing,
    Votes,
    open_sealed,
    seal,
)  # fmt: skip
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.records import RUN_LIFE_S
from p2p_dilocox.swarm.signed import SignedRun

__all__ = ["CALL_FAILED", "Lead", "Progress"]

CALL_FAILED = (
    P2PDaemonError,
    P2PHandlerError,
    ControlFailure,
    asyncio.TimeoutError,
    ConnectionError,
    NotTrustedError,
)
_HEARTBEAT_S = 3.0
_OTHERS_KEPT = 64
_BALLOTS_AHEAD = 3  # a cluster in step is never further ahead than the round in flight


@dataclass
class Progress:
    """What the training loop tells the swarm. Written by one thread, read by another; each field is one
    value."""

    t: int = 0  # the last outer step that is over, committed or dropped
    h: int = 0
    committed_t: int = 0
    lineage: str = ""
    members: list[str] = field(default_factory=list)
    in_flight: int = 0
    state: str = "joining"
    loss: float = 0.0
    tokens_per_s: float = 0.0
    tokens: int = 0

    def move_to(self, t: int, outer: OuterState) -> None:
        """Outer step t is over and left `outer` behind."""
        self.t, self.committed_t, self.lineage, self.members = t, outer.t, outer.lineage, outer.members


@dataclass
class _Attempt:
    """One attempt of our cluster in outer step t, from its roll call to the votes."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    reply: CallReply | None = None
    roster: Roster | None = None
    digests: dict[int, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    decision: asyncio.Future[Decision] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Lead:
    """Implements service.Desk. All of it runs in the network thread's event loop."""

    def __init__(
        self,
        *,
        node: Node,
        service: Service,
        key: SigningKey,
        name: str,
        ranks: list[RankAddress],
        signed: SignedRun,
        spec_digest: str,
        num_stages: int,
        min_clusters: int,
        timeouts: Timeouts,
        progress: Progress,
        result_after: Callable[[int], Result],
    ) -> None:
        self.node, self.service, self.key, self.name, self.ranks, self.signed = (
            node,
            service,
            key,
            name,
            ranks,
            signed,
        )
        self.spec_digest, self.num_stages, self.timeouts, self.progress = (
            spec_digest,
            num_stages,
            timeouts,
            progress,
        )
        self.result_after = result_after
        self.me = key.cluster_id
        self.present: dict[str, Presence] = {}
        self.rollcalls = RollCalls(
            me=self.me,
            run_id=node.run_id,
            spec_digest=spec_digest,
            timeouts=timeouts,
            coordinators=self.coordinators,
            expected=self.expected,
            alive=self.alive,
            min_clusters=lambda: 1 if progress.members else min_clusters,
        )
        self._leads: dict[str, str] = {}  # cluster id -> its lead's peer
        self._ranks: dict[str, list[RankAddress]] = {}
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._ballots: dict[tuple[int, int], Ballot] = {}
        self._followed: dict[int, asyncio.Future[Follow]] = {}
        self._heart: asyncio.Task[None] | None = None

    # --- who is there

    async def start(self) -> None:
        await self.refresh()
        self._heart = asyncio.create_task(self._beat())

    async def close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.gather(self._heart, return_exceptions=True)
        await self.rollcalls.close()
        self.progress.state = "left"
        await asyncio.wait_for(self.node.publish_presence(self.key, self.presence()), self.timeouts.reply_s)

    async def linger(self, t: int) -> None:
        """Stay until the clusters we averaged with are past outer step t as well: they may still need our
        votes."""
        deadline = Deadline(2 * self.timeouts.reply_s)
        others = [c for c in self.progress.members if c != self.me]
        while others and not deadline.passed:
            standings = [(c, await self.standing_of(c)) for c in others]
            others = [c for c, s in standings if s is not None and s.t < t]
            await deadline.sleep(0.2)

    def presence(self) -> Presence:
        p = self.progress
        return Presence(
            cluster_id=self.me, name=self.name, ranks=self.ranks, t=p.t, h=p.h, state=p.state,
            loss=p.loss, tokens_per_s=p.tokens_per_s, tokens=p.tokens,
        )  # fmt: skip

    async def refresh(self) -> None:
        """Tell the swarm that we are here and look who else is."""
        await self.node.publish_presence(self.key, self.presence())
        self.present = await self.node.clusters()
        for cluster, presence in self.present.items():
            if cluster != self.me:
                await self._meet(cluster, presence.ranks)

    def coordinators(self) -> list[str]:
        """The members of the last committed round, who therefore agree on this list; at the start all that
        are present."""
        return self.progress.members or sorted({*self.present, self.me})

    def expected(self) -> list[str]:
        """The clusters that the next outer step waits for: the last members, and those that train in step
        with us.

        A heartbeat is some seconds old, so "in step" leaves room for two outer steps.
        """
        in_step = {c for c, p in self.present.items() if p.state == "training" and p.t >= self.progress.t - 2}
        return sorted({*self.coordinators(), *in_step})

    async def alive(self, cluster: str) -> bool:
        return cluster == self.me or await self.standing_of(cluster) is not None

    async def standing_of(self, cluster: str) -> Standing | None:
        """Where another cluster stands; None if it does not answer in time."""
        peer = self._leads.get(cluster)
        if peer is None:
            return None
        try:
            stub = self.service.stub(peer)
            standing: Standing = await stub.rpc_standing(Ask(), timeout=self.timeouts.reply_s)
            return standing
        except CALL_FAILED:
            return None

    def ranks_of(self, cluster: str) -> list[RankAddress]:
        return self._ranks.get(cluster, [])

    async def greet(self) -> dict[str, Standing]:
        """Tell every other lead our presence now, and learn where each stands.

        A heartbeat in the DHT would reach them seconds later, when a round without us may have begun.
        """
        await self.refresh()
        sealed = seal(self.key, self.node.run_id, self.presence())
        others = [c for c in self.present if c != self.me]

        async def tell(cluster: str) -> Standing | None:
            try:
                stub = self.service.stub(self._leads[cluster])
                standing: Standing = await stub.rpc_hello(Envelope(body=sealed), timeout=self.timeouts.reply_s)
                return standing
            except (KeyError, *CALL_FAILED):
                return None

        answers = await asyncio.gather(*(tell(c) for c in others))
        return {c: s for c, s in zip(others, answers, strict=True) if s is not None}

    # --- our cluster in a round

    async def attend(self, t: int, attempt: int, weight: float, deadline: Deadline) -> CallReply:
        """Answer the roll call; the reply is a call (perhaps without us), `over`, or empty if there is none
        in time.

        Raises ClusterError if the coordinator refuses us: another protocol or run spec.
        """
        ready = Ready(
            spec=self.spec_digest, cluster_id=self.me, name=self.name, t=t, attempt=attempt,
            lineage=self.progress.lineage, weight=weight, ranks=self.ranks,
        )  # fmt: skip
        sealed = seal(self.key, self.node.run_id, ready)
        reply = CallReply()
        while not deadline.passed:
            for coordinator in coordinator_order(self.coordinators(), t):
                answer = await self._offer(coordinator, sealed)
                if answer is None:
                    continue
                if answer.redirect and answer.redirect != coordinator:
                    answer = await self._offer(answer.redirect, sealed) or CallReply()
                if answer.refused:
                    raise ClusterError(f"cluster {coordinator} refuses ours: {answer.refused}")
                reply = answer
                break
            if reply.call or reply.over:
                break
            await deadline.sleep(0.05)
        entry = self._attempt(t, attempt)
        if reply.call:
            entry.roster = read_call(reply.call, self.node.run_id)
            for member in entry.roster.members:
                if member.cluster_id != self.me:
                    await self._meet(member.cluster_id, member.ranks)
        entry.reply = reply
        entry.ready.set()
        return reply

    async def decide(self, t: int, attempt: int, deadline: Deadline) -> Decision:
        """Wait for our ranks' digests, vote for the cluster, and make the outcome known to our ranks."""
        entry = self._attempt(t, attempt)
        if entry.roster is None:
            raise ClusterError(f"no roll call for outer step {t}, attempt {attempt}: nothing to vote on")
        try:
            await asyncio.wait_for(entry.complete.wait(), max(0.01, deadline.remaining()))
            digest = combined_digest(entry.digests)
        except TimeoutError:
            digest = ""
            entry.reasons.append("a stage of this cluster was not averaged before the deadline")
        ballot = self._ballot(t, attempt)
        outcome = await ballot.decide(digest, entry.roster.ids, self._tell, self.timeouts, deadline)
        reason = "; ".join(dict.fromkeys([ballot.reason, *entry.reasons]))[:500]
        decision = Decision(outcome=outcome, digest=digest if outcome == "committed" else "", reason=reason)
        entry.decision.set_result(decision)
        self._forget(t)
        return decision

    def follow(self, t: int, deadline: Deadline) -> "asyncio.Future[Follow]":
        """Find the committed rounds from ours up to outer step t, which goes on without us, at a cluster
        that has them."""
        if t not in self._followed:
            self._followed[t] = asyncio.ensure_future(self._follow(t, deadline))
        return self._followed[t]

    async def _follow(self, t: int, deadline: Deadline) -> Follow:
        while not deadline.passed:
            for cluster, peer in list(self._leads.items()):
                standing = await self.standing_of(cluster)
                if standing is None or standing.t < t or cluster == self.me:
                    continue
                results: list[Result] = []
                at, parent = self.progress.committed_t, self.progress.lineage
                try:
                    while at < min(t, standing.committed_t):
                        result: Result = await self.service.stub(peer).rpc_result(
                            Ask(t=at), timeout=self.timeouts.reply_s
                        )
                        if result.t <= at or result.parent != parent:
                            raise NotTrustedError(
                                f"its outer step {result.t} does not follow from our lineage"
                            )
                        at, parent = (
                            result.t,
                            next_lineage(parent, result.t, result.members, _digest_of(result)),
                        )
                        results.append(result)
                except CALL_FAILED as error:
                    return Follow(failed=f"cluster {cluster} cannot tell outer step {t}: {error}"[:500])
                return Follow(results=results, donor=self._ranks[cluster], found=True)
            await deadline.sleep(self.timeouts.poll_s)
        return Follow(failed=f"nobody committed outer step {t} in time")

    # --- service.Desk

    async def on_hello(self, sealed: bytes) -> Standing:
        presence = open_sealed(sealed, self.node.run_id, Presence)
        if presence.cluster_id != self.me:
            self.present[presence.cluster_id] = presence
            await self._meet(presence.cluster_id, presence.ranks)
        return await self.on_standing()

    async def on_ready(self, sealed: bytes) -> CallReply:
        return await self.rollcalls.answer(sealed, last_t=self.progress.t)

    async def on_call(self, ask: Ask, peer: str) -> CallReply:
        self._require_own(peer)
        entry = self._attempt(ask.t, ask.attempt)
        try:
            await asyncio.wait_for(entry.ready.wait(), self.timeouts.poll_s)
        except TimeoutError:
            return CallReply()
        reply = entry.reply or CallReply()
        # "none in time" must not look like "not yet"
        return reply if reply.call or reply.over else CallReply(refused="no roll call in time")

    async def on_stage_done(self, done: StageDone, peer: str) -> Decision:
        self._require_own(peer)
        entry = self._attempt(done.t, done.attempt)
        self.enter_digests(done)
        await asyncio.wait({entry.decision}, timeout=self.timeouts.poll_s)
        return entry.decision.result() if entry.decision.done() else Decision(outcome="open")

    def enter_digests(self, done: StageDone) -> None:
        entry = self._attempt(done.t, done.attempt)
        entry.digests.update({int(stage): digest for stage, digest in done.digests.items()})
        if done.reason and done.reason not in entry.reasons:
            entry.reasons.append(done.reason)
        if len(entry.digests) == self.num_stages or not all(entry.digests.values()):
            entry.complete.set()

    def digests_of(self, t: int, attempt: int) -> dict[int, str]:
        return dict(sorted(self._attempt(t, attempt).digests.items()))

    async def on_votes(self, votes: Votes, peer: str) -> Votes:
        ballot = self._ballot(votes.t, votes.attempt)
        sender = next((c for c, p in self._leads.items() if p == peer), None)
        if sender is None:
            raise NotTrustedError(f"{peer} leads no cluster of this run")
        if abs(votes.t - self.progress.t) > _BALLOTS_AHEAD:
            raise NotTrustedError(f"votes on outer step {votes.t}, we are at {self.progress.t}")
        ballot.merge(sender, votes)
        return ballot.message()

    async def on_standing(self) -> Standing:
        p = self.progress
        return Standing(
            cluster_id=self.me, t=p.t, h=p.h, committed_t=p.committed_t, lineage=p.lineage, members=p.members,
            in_flight=p.in_flight,
        )  # fmt: skip

    async def on_result(self, ask: Ask) -> Result:
        return self.result_after(ask.t)

    async def on_follow(self, ask: Ask, peer: str) -> Follow:
        self._require_own(peer)
        following = self._followed.get(ask.t)
        if following is None:
            raise NotTrustedError(f"this cluster does not follow outer step {ask.t}")
        await asyncio.wait({following}, timeout=self.timeouts.poll_s)
        return following.result() if following.done() else Follow()

    # ---

    async def _beat(self) -> None:
        republish = Deadline(0)
        while True:
            try:
                await self.refresh()
                if republish.passed:  # the run can then be joined through any live peer
                    await self.node.publish_run(self.signed)
                    republish = Deadline(RUN_LIFE_S / 4)
            except CALL_FAILED:
                pass  # the next beat tries again; a lasting failure shows as an empty swarm in the view
            await asyncio.sleep(_HEARTBEAT_S)

    async def _meet(self, cluster: str, ranks: list[RankAddress]) -> None:
        """Remember a cluster's lead and tell p2pd where its ranks live."""
        if self._ranks.get(cluster) == ranks:
            return
        self._leads[cluster], self._ranks[cluster] = ranks[0].peer, ranks
        while len(self._leads) > _OTHERS_KEPT:
            oldest = next(iter(self._leads))
            del self._leads[oldest], self._ranks[oldest]
        await asyncio.gather(*(self.node.connect(r.peer, r.maddrs) for r in ranks))

    async def _offer(self, coordinator: str, sealed: bytes) -> CallReply | None:
        if coordinator == self.me:
            return await self.on_ready(sealed)
        peer = self._leads.get(coordinator)
        if peer is None:
            return None
        try:
            question = self.service.stub(peer).rpc_ready(
                Envelope(body=sealed), timeout=self.timeouts.poll_s + self.timeouts.reply_s
            )
            reply: CallReply = await question
            return reply
        except CALL_FAILED:
            return None

    async def _tell(self, member: str, votes: Votes) -> Votes | None:
        peer = self._leads.get(member)
        if peer is None:
            return None
        try:
            told: Votes = await self.service.stub(peer).rpc_votes(votes, timeout=self.timeouts.reply_s)
            return told
        except CALL_FAILED:
            return None

    def _require_own(self, peer: str) -> None:
        if peer not in {r.peer for r in self.ranks}:
            raise NotTrustedError(f"{peer} is no rank of cluster {self.me}")

    def _attempt(self, t: int, attempt: int) -> _Attempt:
        return self._attempts.setdefault((t, attempt), _Attempt())

    def _ballot(self, t: int, attempt: int) -> Ballot:
        return self._ballots.setdefault((t, attempt), Ballot(t, attempt, self.me))

    def _forget(self, t: int) -> None:
        for table in (self._attempts, self._ballots):
            for key in [k for k in table if k[0] < t - 8]:
                del table[key]


def _digest_of(result: Result) -> str:
    return combined_digest({int(stage): digest for stage, digest in result.stage_digests.items()})
