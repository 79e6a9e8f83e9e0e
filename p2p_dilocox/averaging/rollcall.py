"""The roll call of an outer step: one member list for all stages of all clusters (rule V2).

The clusters of the last committed round know each other, so they agree, without asking, on an order of
coordinators for an attempt of outer step t. Each offers its signed `Ready` to the first that answers. The
coordinator waits until all it expects are there, never longer than its deadline, and closes the call.
Clusters that are dead are not waited for; but where those that are there are a minority, silence is no death
before the deadline. Those that stand out, or that others refuse to average with, are left out and told why.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.exclusion import left_out as settle_quarrels
from p2p_dilocox.averaging.shares import shares
from p2p_dilocox.controller import agreed
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.outer import same_anchor
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.messages import PROTOCOL, Call, CallReply, Ready, Standing, open_sealed
from p2p_dilocox.swarm.patience import within

__all__ = ["RollCalls", "Roster", "coordinator_order", "read_call"]

_FIRST_LOOK_S = 0.2  # whether who is missing is dead; then less and less often
_KEPT = 16  # calls remembered, to tell latecomers
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Roster:
    """A call that was checked: the members in the order of their ids;
    `key` names the list in every message of the round."""

    t: int
    attempt: int
    coordinator: str
    members: tuple[Ready, ...]
    key: str
    remaining_s: float

    @property
    def ids(self) -> list[str]:
        return [m.cluster_id for m in self.members]

    @property
    def parent(self) -> str:
        """The lineage that all members share before this round."""
        return self.members[0].lineage

    @property
    def weights(self) -> list[float]:
        return [m.weight for m in self.members]

    @property
    def norms(self) -> list[float]:
        return [m.norm for m in self.members]

    @property
    def lowrank(self) -> list[int]:
        """The rank of each stage in this round, 0 where nobody has a wish: the run spec's."""
        stages = max(len(m.lowrank) for m in self.members)
        return [agreed([m.lowrank[s] for m in self.members if len(m.lowrank) > s]) for s in range(stages)]

    @property
    def H(self) -> int:  # noqa: N802 (its name everywhere)
        """Inner steps of the outer steps that follow, 0 as above."""
        return agreed([m.H for m in self.members])

    @property
    def clients(self) -> list[str]:
        return [m.cluster_id for m in self.members if m.client]

    @property
    def teller(self) -> str:
        """The member that collects the votes."""
        dialable = [m.cluster_id for m in self.members if not m.client] or self.ids
        return coordinator_order(dialable, self.t, self.attempt)[0]

    def shares(self) -> list[float]:
        """How large a part each member averages."""
        return shares([m.uplink_mbps for m in self.members], [not m.client for m in self.members])

    def dials(self, me: int) -> list[bool | None]:
        """Per member whether we open the stream (True), it does, or there is none (None). Clients dial."""
        mine = self.members[me].client
        return [
            None if i == me or (mine and other.client) else mine if mine != other.client else me < i
            for i, other in enumerate(self.members)
        ]

    def index_of(self, cluster_id: str) -> int | None:
        return next((i for i, m in enumerate(self.members) if m.cluster_id == cluster_id), None)

    def peers_of_stage(self, stage: int) -> list[str]:
        """The peer that holds `stage` in each member. Raises NotTrustedError if a member has none."""
        peers = [m.peer_of_stage(stage) for m in self.members]
        if None in peers:
            raise NotTrustedError(f"cluster {self.ids[peers.index(None)]} has nobody for stage {stage}")
        return [p for p in peers if p is not None]


def read_call(call: Call, run_id: str, gate: Gate, weight_cap: float) -> Roster:
    """Check every signature and weight, and that the members agree on the outer step and on history.

    Raises NotTrustedError.
    """
    members = sorted((open_sealed(r, run_id, Ready) for r in call.ready), key=lambda m: m.cluster_id)
    if len({m.cluster_id for m in members}) != len(members):
        raise NotTrustedError(f"the roll call of outer step {call.t} lists a cluster twice")
    for member in members:
        gate.require(member.cluster_id)
        if (member.t, member.attempt) != (call.t, call.attempt):
            raise NotTrustedError(
                f"the roll call of outer step {call.t} lists {member.cluster_id} for step {member.t}"
            )
        if member.lineage != members[0].lineage:
            raise NotTrustedError(f"the roll call of outer step {call.t} mixes lineages")
        if member.weight > weight_cap:
            raise NotTrustedError(
                f"the roll call of outer step {call.t} lists {member.cluster_id} with {member.weight:.4g} "
                f"tokens, at most {weight_cap:.4g} are possible"
            )
    if not sum(m.weight for m in members) > 0:
        raise NotTrustedError(f"the roll call of outer step {call.t} has nothing to average")
    key = hashlib.sha256(b"".join(m.pack() for m in members)).hexdigest()
    return Roster(call.t, call.attempt, call.coordinator, tuple(members), key, call.remaining_s)


def coordinator_order(clusters: Iterable[str], t: int, attempt: int = 0) -> list[str]:
    """The same on every cluster, and another one each outer step and attempt."""
    return sorted(clusters, key=lambda c: hashlib.sha256(f"{t} {attempt} {c}".encode()).digest())


@dataclass
class _Roll:
    deadline: Deadline
    sealed: dict[str, bytes] = field(default_factory=dict)
    ready: dict[str, Ready] = field(default_factory=dict)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    call: Call | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # cluster -> why
    drifted: list[str] = field(default_factory=list)
    over: bool = False
    dropped: str = ""  # why there is no call


class RollCalls:
    """The coordinator's side; every cluster's lead has one.

    coordinators: whose lead may hold the roll call. expected: the clusters to wait for. standing_of: where a
    cluster stands, None if it does not answer; True: asked even if it did not a moment ago. quorum: no fewer
    take an outer step. parent_of: the lineage that the round of an outer step follows
    from, as a cluster proves it, "" if it cannot. norm_cap: of pseudo-gradients this long. weight_cap: tokens
    that a cluster can have trained in an outer step.
    """

    def __init__(
        self,
        *,
        me: str,
        run_id: str,
        spec_digest: str,
        timeouts: Timeouts,
        coordinators: Callable[[], Sequence[str]],
        expected: Callable[[], Sequence[str]],
        standing_of: Callable[[str, bool], Awaitable[Standing | None]],
        min_clusters: Callable[[], int],
        quorum: int,
        parent_of: Callable[[str, int], Awaitable[str]],
        gate: Gate,
        norm_cap: Callable[[Sequence[float]], float],
        weight_cap: float,
    ) -> None:
        self.me, self.run_id, self.spec_digest, self.timeouts = me, run_id, spec_digest, timeouts
        self.parent_of = parent_of
        self.gate, self.norm_cap, self.weight_cap = gate, norm_cap, weight_cap
        self.coordinators, self.expected = coordinators, expected
        self.standing_of, self.min_clusters, self.quorum = standing_of, min_clusters, quorum
        self._rolls: dict[tuple[int, int], _Roll] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: dict[
            str, int
        ] = {}  # the last outer step for which a cluster came to us, in time or late

    async def answer(self, sealed: bytes, *, last_t: int) -> CallReply:
        """Enter a cluster that is ready. Replies within Timeouts.poll_s, "not yet" if the call is still open.

        last_t: our own last outer step; a call for it or an earlier one is over.
        """
        ready = open_sealed(sealed, self.run_id, Ready)
        if ready.protocol != PROTOCOL:
            return CallReply(refused=f"protocol {ready.protocol} here, {PROTOCOL} there: update dilocox-peer")
        if ready.spec != self.spec_digest:
            specs = f"{ready.spec[:12]} there, {self.spec_digest[:12]} here"
            return CallReply(refused=f"another run spec ({specs}): fetch it with a fresh --state-dir")
        self.gate.require(ready.cluster_id)
        if ready.weight > self.weight_cap:
            most = f"{self.weight_cap:.4g} at most are possible"
            return CallReply(refused=f"{ready.weight:.4g} tokens in one outer step, {most}")
        self._callers[ready.cluster_id] = ready.t
        key = (ready.t, ready.attempt)
        roll = self._rolls.get(key)
        if roll is None:
            if ready.t <= last_t:
                return CallReply(over=True)
            for cluster in coordinator_order(self.coordinators(), ready.t, ready.attempt):
                if cluster == self.me:
                    break
                if cluster in ready.without:
                    continue
                if await self.standing_of(cluster, False) is not None:
                    return CallReply(redirect=cluster)
            roll = self._rolls.setdefault(key, _Roll(Deadline(self.timeouts.roll_call_s)))
            if not roll.ready:
                task = asyncio.create_task(self._close_when_complete(key, roll))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if roll.over:
            return CallReply(over=True)
        if roll.call is None:
            roll.sealed[ready.cluster_id], roll.ready[ready.cluster_id] = sealed, ready
            roll.arrived.set()
            try:
                await within(roll.closed.wait(), self.timeouts.poll_s)
            except TimeoutError:
                return CallReply()
        if ready.cluster_id in roll.drifted:
            return CallReply(drifted=True)
        left_out = roll.left_out.get(ready.cluster_id, "")
        return CallReply(call=roll.call, over=roll.over, dropped=roll.dropped, left_out=left_out)

    def forget(self, cluster: str) -> None:
        """It has left or paused: a roll call that waits for it looks again."""
        self._callers.pop(cluster, None)
        for roll in self._rolls.values():
            roll.arrived.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close_when_complete(self, key: tuple[int, int], roll: _Roll) -> None:
        silent: set[str] = set()  # do not answer
        follow: set[str] = set()  # came too late for it
        past: set[str] = set()  # say that it is over
        look_s = _FIRST_LOOK_S
        while True:
            in_step = [c for c, t in self._callers.items() if t >= key[0] - 1]
            expected = {*self.expected(), *in_step}
            missing = [c for c in expected if c not in {*roll.ready, *follow, *past}]
            enough = len(roll.ready) >= self.min_clusters()
            refused = _refused_by_most(roll.ready, len(expected))
            late = [c for c in missing if c not in silent and c not in refused]
            # If most are silent, it may be we who were cut off or stood still: we do not go on yet.
            doubtful = not late and 2 * len(roll.ready) < len(expected)
            if enough and (roll.deadline.passed or not (late or doubtful)):
                break
            roll.arrived.clear()
            try:
                await within(roll.arrived.wait(), min(look_s, self.timeouts.poll_s))
            except TimeoutError:
                look_s = min(1.0, 2 * look_s)
                asked = [c for c in missing if doubtful or c not in silent]
                standings = await asyncio.gather(*(self.standing_of(c, doubtful) for c in asked))
                where = dict(zip(asked, standings, strict=True))
                silent = {c for c in missing if where.get(c) is None}
                follow |= {c for c, s in where.items() if s is not None and s.follows >= key[0]}
                past |= {c for c, s in where.items() if s is not None and s.t >= key[0]}
                if past and await self._is_over(key[0], past, len(expected), roll):
                    # To commit it again without them would part the run in two.
                    roll.over = True
                    roll.closed.set()
                    return
        members = self._members(roll)
        alive = len(members) + len(past - {*roll.ready}) + len([c for c in missing if c not in silent])
        # A few may not go on while most are alive, late or past it: that would part the run in two.
        if not any(roll.ready[c].weight > 0 for c in members):
            roll.dropped = "no cluster has trained anything"
        elif len(members) < self.quorum:
            roll.dropped = f"{len(members)} clusters came to the roll call, the quorum is {self.quorum}"
        elif 2 * len(members) < alive:
            roll.dropped = f"{len(members)} of {alive} clusters came to the roll call, fewer than half"
        else:
            roll.call = Call(
                t=key[0],
                attempt=key[1],
                coordinator=self.me,
                ready=[roll.sealed[c] for c in members],
                remaining_s=self.timeouts.round_s - (self.timeouts.roll_call_s - roll.deadline.remaining()),
            )
        roll.closed.set()
        for old in sorted(self._rolls)[:-_KEPT]:
            del self._rolls[old]
        self._callers = {c: t for c, t in self._callers.items() if t >= key[0] - _KEPT}

    async def _is_over(self, t: int, past: Collection[str], expected: int, roll: _Roll) -> bool:
        """Whether those that say that outer step t is over are right: one proves a commit that follows from
        our history, or most of those that we expect say so, which have dropped it then. The word of a few is
        nothing.
        """
        lineages = {r.lineage for r in roll.ready.values()}
        proven = await asyncio.gather(*(self.parent_of(c, t) for c in past))
        return any(parent in lineages for parent in proven) or 2 * len(past) > expected

    def _members(self, roll: _Roll) -> list[str]:
        """Who of those that are ready averages, in order; why the others do not goes into roll.left_out."""
        # Clusters of another history cannot average with us: the larger side goes on, the others fetch its
        # rounds.
        lineage = Counter(r.lineage for r in roll.ready.values()).most_common(1)[0][0]
        ready = {c: r for c, r in sorted(roll.ready.items()) if r.lineage == lineage}
        roll.drifted = self._drifted(ready)
        ready = {c: r for c, r in ready.items() if c not in roll.drifted}
        cap = self.norm_cap([r.norm for r in ready.values() if r.weight > 0])
        for cluster, r in ready.items():
            if r.norm > cap:
                roll.left_out[cluster] = (
                    f"its pseudo-gradient has the norm {r.norm:.4g}, at most {cap:.4g} is usual"
                )
        ready = {c: r for c, r in ready.items() if c not in roll.left_out}
        for cluster in settle_quarrels({c: r.without for c, r in ready.items()}):
            accusers = [c for c, r in ready.items() if cluster in r.without]
            roll.left_out[cluster] = (
                f"refused by {', '.join(accusers)}" if accusers else "refuses several others"
            )
        for cluster, why in roll.left_out.items():
            _LOG.warning(
                "outer step %d goes on without cluster %s: %s", next(iter(ready.values())).t, cluster, why
            )
        return [c for c in ready if c not in roll.left_out]

    def _drifted(self, ready: dict[str, Ready]) -> list[str]:
        """Whose anchor is not that of most: equal bytes were applied, but machines round differently, or
        worse.
        """
        prints = {c: tuple(r.fingerprint) for c, r in ready.items() if r.fingerprint}
        alike = {c: [d for d in prints if same_anchor(prints[c], prints[d])] for c in prints}
        if not alike:
            return []
        most = max(alike, key=lambda c: (len(alike[c]), self.me in alike[c], c))
        return [c for c in prints if c not in alike[most]]


def _refused_by_most(ready: dict[str, Ready], expected: int) -> set[str]:
    """Whom half of those that are ready refuse, once half of all are: they are not waited for."""
    if 2 * len(ready) < expected:
        return set()
    refusals = Counter(c for r in ready.values() for c in set(r.without))
    return {c for c, count in refusals.items() if 2 * count >= len(ready)}
