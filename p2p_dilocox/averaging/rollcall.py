"""The roll call of an outer step: one member list for all stages of all clusters (rule V2).

The clusters of the last committed round know each other, so they agree, without asking, on an order of
coordinators for
outer step t. Each offers its signed `Ready` to the first that answers. The coordinator waits until all it
expects are
there, never longer than its deadline, and closes the call. Clusters that are dead are not waited for.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.messages import PROTOCOL, Call, CallReply, Ready, Standing, open_sealed

__all__ = ["RollCalls", "Roster", "coordinator_order", "read_call"]

_KEPT = 16  # calls remembered, to tell latecomers


@dataclass(frozen=True)
class Roster:
    """A call that was checked: the members in the order of their ids;
    `key` names the list in every message of the round."""

    t: int
    attempt: int
    members: tuple[Ready, ...]
    key: str
    remaining_s: float

    @property
    def ids(self) -> list[str]:
        return [m.cluster_id for m in self.members]

    @property
    def weights(self) -> list[float]:
        return [m.weight for m in self.members]

    def index_of(self, cluster_id: str) -> int | None:
        return next((i for i, m in enumerate(self.members) if m.cluster_id == cluster_id), None)

    def peers_of_stage(self, stage: int) -> list[str]:
        """The peer that holds `stage` in each member. Raises NotTrustedError if a member has none."""
        peers = [m.peer_of_stage(stage) for m in self.members]
        if None in peers:
            raise NotTrustedError(f"cluster {self.ids[peers.index(None)]} has nobody for stage {stage}")
        return [p for p in peers if p is not None]


def read_call(call: Call, run_id: str) -> Roster:
    """Check every signature and that the members agree on the
    outer step and on history. Raises NotTrustedError."""
    members = sorted((open_sealed(r, run_id, Ready) for r in call.ready), key=lambda m: m.cluster_id)
    if len({m.cluster_id for m in members}) != len(members):
        raise NotTrustedError(f"the roll call of outer step {call.t} lists a cluster twice")
    for member in members:
        if (member.t, member.attempt) != (call.t, call.attempt):
            raise NotTrustedError(
                f"the roll call of outer step {call.t} lists {member.cluster_id} for step {member.t}"
            )
        if member.lineage != members[0].lineage:
            raise NotTrustedError(f"the roll call of outer step {call.t} mixes lineages")
    key = hashlib.sha256(b"".join(m.pack() for m in members)).hexdigest()
    return Roster(call.t, call.attempt, tuple(members), key, call.remaining_s)


def coordinator_order(clusters: Sequence[str], t: int) -> list[str]:
    """The same on every cluster, and another one each outer step."""
    return sorted(clusters, key=lambda c: hashlib.sha256(f"{t} {c}".encode()).digest())


@dataclass
class _Roll:
    deadline: Deadline
    ready: dict[str, bytes] = field(default_factory=dict)
    lineages: dict[str, str] = field(default_factory=dict)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    call: Call | None = None
    over: bool = False


class RollCalls:
    """The coordinator's side; every cluster's lead has one.

    coordinators: whose lead may hold the roll call. expected: the clusters to wait for.
    standing_of: where a cluster stands, None if it does not answer.
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
        standing_of: Callable[[str], Awaitable[Standing | None]],
        min_clusters: Callable[[], int],
    ) -> None:
        self.me, self.run_id, self.spec_digest, self.timeouts = me, run_id, spec_digest, timeouts
        self.coordinators, self.expected = coordinators, expected
        self.standing_of, self.min_clusters = standing_of, min_clusters
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
            return CallReply(refused="another run spec: fetch it again with a fresh --state-dir")
        self._callers[ready.cluster_id] = ready.t
        key = (ready.t, ready.attempt)
        roll = self._rolls.get(key)
        if roll is None:
            if ready.t <= last_t:
                return CallReply(over=True)
            for cluster in coordinator_order(self.coordinators(), ready.t):
                if cluster == self.me:
                    break
                if await self.standing_of(cluster) is not None:
                    return CallReply(redirect=cluster)
            roll = self._rolls.setdefault(key, _Roll(Deadline(self.timeouts.roll_call_s)))
            if not roll.ready:
                task = asyncio.create_task(self._close_when_complete(key, roll))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if roll.over:
            return CallReply(over=True)
        if roll.call is None:
            roll.ready[ready.cluster_id] = sealed
            roll.lineages[ready.cluster_id] = ready.lineage
            roll.arrived.set()
            try:
                await asyncio.wait_for(roll.closed.wait(), self.timeouts.poll_s)
            except TimeoutError:
                return CallReply()
        return CallReply(call=roll.call, over=roll.over)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close_when_complete(self, key: tuple[int, int], roll: _Roll) -> None:
        dead: set[str] = set()
        while True:
            in_step = [c for c, t in self._callers.items() if t >= key[0] - 1]
            missing = [c for c in {*self.expected(), *in_step} if c not in roll.ready and c not in dead]
            enough = len(roll.ready) >= self.min_clusters()
            if enough and (not missing or roll.deadline.passed):
                break
            roll.arrived.clear()
            try:
                await asyncio.wait_for(roll.arrived.wait(), min(1.0, self.timeouts.poll_s))
            except TimeoutError:
                standings = await asyncio.gather(*(self.standing_of(c) for c in missing))
                dead.update(c for c, standing in zip(missing, standings, strict=True) if standing is None)
                if any(standing.t >= key[0] for standing in standings if standing is not None):
                    # For them this outer step is over, committed or dropped. To commit it again without them
                    # would part the run in two.
                    roll.over = True
                    roll.closed.set()
                    return
        # Clusters of another history cannot average with us: the larger side goes on, the others fetch its
        # rounds.
        lineage = Counter(roll.lineages.values()).most_common(1)[0][0]
        roll.call = Call(
            t=key[0],
            attempt=key[1],
            coordinator=self.me,
            ready=[r for c, r in sorted(roll.ready.items()) if roll.lineages[c] == lineage],
            remaining_s=self.timeouts.round_s - (self.timeouts.roll_call_s - roll.deadline.remaining()),
        )
        roll.closed.set()
        for old in sorted(self._rolls)[:-_KEPT]:
            del self._rolls[old]
        self._callers = {c: t for c, t in self._callers.items() if t >= key[0] - _KEPT}
