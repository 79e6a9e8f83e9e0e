"""The streams of a round: two members that average a stage share one, for all its phases and in both
directions.

Patience is told from silence: who has nothing to send yet says so a few times per `stall_s`. A peer that is
frozen, dead or holds back is found in seconds, however long the deadline is, and the member that is to blame
is named. One that speaks but takes nothing may be behind our own slow link, and has longer.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from p2p_dilocox.averaging.butterfly import Averaging
from p2p_dilocox.averaging.deadlines import Deadline
from p2p_dilocox.averaging.fault import Aborted, MemberFault
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.stream import Frame, Refused, Silent, Stream

__all__ = ["ABORTED", "Budget", "Exchange", "Traffic"]

_MEASURED_BYTES = 4 << 20  # less says nothing about a link: it fits into the buffers on the way
_FAST_MBPS = 300.0  # beyond it a busy machine is what we would measure, not its link
ABORTED = "aborted: "
_PARTING: set[asyncio.Task[None]] = set()  # else nothing would hold them


class Traffic:
    """Bytes of averaging as handed to and taken from libp2p's sockets, and how fast many of them leave."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.uplink_mbps = 0.0  # 0: not known yet
        self._active, self._since, self._busy_s, self._bytes = 0, 0.0, 0.0, 0

    @contextlib.contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """`size` bytes are leaving, perhaps next to others."""
        if not self._active:
            self._since = time.monotonic()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self.sent += size
            self._bytes += size
            if not self._active:
                self._busy_s += time.monotonic() - self._since

    def measure(self) -> None:
        """A round is over: learn from it how fast our link is."""
        if self._bytes >= _MEASURED_BYTES and self._busy_s > 0:
            mbps = min(_FAST_MBPS, 8e-6 * self._bytes / self._busy_s)
            self.uplink_mbps = 0.5 * (mbps + (self.uplink_mbps or mbps))
        self._busy_s, self._bytes = 0.0, 0


@dataclass(frozen=True)
class Budget:
    """Seconds. usual_s: after this a member that lags behind the others is left out. limit_s: the exchange is
    over. stall_s: how long a member may be silent.
    """

    usual_s: float
    limit_s: float
    stall_s: float

    @property
    def take_s(self) -> float:
        """How long a member that is not silent may take nothing."""
        return min(4 * self.stall_s, max(self.stall_s, self.usual_s))


@dataclass
class _Line:
    """What another member owes us: the frames `due` in each phase and of each kind, and how many came."""

    stream: "asyncio.Future[Stream]"
    due: dict[tuple[int, Frame], int]
    came: dict[tuple[int, Frame], int] = field(default_factory=dict)
    waits: bool = True  # the last that it sent was a WAIT
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False  # and it has all from us

    def owes(self, phase: int, kind: Frame) -> bool:
        return self.came.get((phase, kind), 0) < self.due[phase, kind]

    @property
    def owes_anything(self) -> bool:
        return any(self.owes(*key) for key in self.due)


class Exchange:
    """One stage in one attempt of an outer step."""

    def __init__(
        self,
        phases: Sequence[Averaging],
        peers: list[str],
        dials: list[bool | None],
        dial: Callable[[str], Awaitable[Stream]],
        traffic: Traffic,
        budget: Budget,
    ) -> None:
        """peers: the libp2p peer of each member. dial: opens the stream to one. dials: per member whether we
        dial it or it dials us; None for ourselves, and for a member with which we have nothing to exchange.
        """
        self._phases, self._peers, self._dials, self._dial = phases, peers, dials, dial
        self._traffic, self._budget = traffic, budget
        self._limit = max(p.frame_bytes() for p in phases)
        self._over, self._reason = asyncio.Event(), ""
        self._lines = {
            m: _Line(asyncio.get_running_loop().create_future(), self._due(m))
            for m, ours in enumerate(dials)
            if ours is not None
        }

    async def attach(self, stream: Stream) -> None:
        """A member dialled us. Returns when the exchange is over. Raises NotTrustedError if it was not its
        turn.
        """
        if self._reason:
            raise ConnectionError(ABORTED + self._reason)
        member = self._peers.index(stream.peer) if stream.peer in self._peers else None
        line = self._lines.get(member) if member is not None else None
        if member is None or line is None or self._dials[member] or line.stream.done():
            raise NotTrustedError(f"no stream of {stream.peer} is expected in this round")
        line.stream.set_result(stream)
        await self._over.wait()

    async def run(self) -> None:
        """Return once every phase is averaged and all others have what they get from us.

        Raises MemberFault if a member is to blame, Aborted if not.
        """
        pending = {
            asyncio.create_task(self._own()),
            *(asyncio.create_task(self._trade(m)) for m in self._lines),
        }
        tasks = list(pending)
        usual, limit = Deadline(self._budget.usual_s), Deadline(self._budget.limit_s)
        reason, suspect = "the round is over", None
        try:
            while pending:
                look_s = limit.remaining() if usual.passed else limit.within(usual.remaining())
                done, pending = await asyncio.wait(
                    pending, timeout=min(look_s, 1.0), return_when=asyncio.FIRST_EXCEPTION
                )
                errors = [e for e in (task.exception() for task in done) if e is not None]
                for error in sorted(errors, key=lambda e: not isinstance(e, MemberFault)):
                    self._confirm(error)
                    raise error
                # With hardly any time from the start nobody is to blame for having been slow.
                if pending and usual.passed and 2 * self._budget.usual_s > self._budget.stall_s:
                    self._blame_the_slow(at_the_end=limit.passed)
                if pending and limit.passed:
                    raise Aborted(f"no average within {self._budget.limit_s:.1f} s")
        except BaseException as error:
            reason = str(error) or "given up"
            suspect = getattr(error, "member", None)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._hang_up(reason if suspect is None else f"{suspect}: {reason}")

    def _due(self, member: int) -> dict[tuple[int, Frame], int]:
        return {
            (number, kind): len(pieces)
            for number, phase in enumerate(self._phases)
            for kind, pieces in (
                (Frame.CONTRIBUTION, phase.incoming(member)),
                (Frame.AVERAGE, phase.returned(member)),
            )
        }

    async def _own(self) -> None:
        try:
            for phase in self._phases:
                await phase.add_own()
        except ValueError as error:
            raise Aborted(f"our own contribution cannot be coded: {error}") from error

    async def _trade(self, member: int) -> None:
        line, patience_s = self._lines[member], 2 * self._budget.stall_s
        try:
            if self._dials[member]:
                line.stream.set_result(await within(self._dial(self._peers[member]), patience_s))
            stream = await within(asyncio.shield(line.stream), patience_s)
        except TimeoutError:
            raise MemberFault(member, f"did not begin within {patience_s:.1f} s") from None
        except Exception as error:  # noqa: BLE001 (p2pd has many ways to say that a peer cannot be reached)
            raise MemberFault(member, f"cannot be reached: {error}") from error
        halves = [asyncio.create_task(half(member, stream)) for half in (self._send, self._receive)]
        try:
            await asyncio.gather(*halves)
            line.finished = True
        except Refused as error:
            text = str(error)
            if text.startswith(ABORTED):
                raise self._aborted(text.removeprefix(ABORTED)) from error
            raise MemberFault(member, f"refused: {text}") from error
        except (ConnectionError, NotTrustedError) as error:
            gone = isinstance(error, ConnectionError) and not isinstance(error, Silent)
            raise MemberFault(member, str(error), gone=gone) from error
        except ValueError as error:
            raise Aborted(f"our own contribution cannot be coded: {error}") from error
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)

    async def _send(self, member: int, stream: Stream) -> None:
        for phase in self._phases:
            for kind, source in (
                (Frame.CONTRIBUTION, phase.contributions(member)),
                (Frame.AVERAGE, phase.averages()),
            ):
                while (data := await self._next(source, stream)) is not None:
                    with self._traffic.sending(len(data)):
                        await stream.send(kind, data, self._budget.take_s)
        here = self._lines[member].all_here
        while not here.is_set():
            with contextlib.suppress(TimeoutError):
                await within(here.wait(), self._budget.stall_s / 4)
            if not here.is_set():
                await stream.send(Frame.WAIT, b"", self._budget.take_s)
        with contextlib.suppress(ConnectionError):  # it may have ended first
            await stream.send(Frame.END, b"", self._budget.take_s)

    async def _next(self, source: AsyncIterator[bytes], stream: Stream) -> bytes | None:
        """The next that we have to send, None after the last; while there is none yet we say so."""
        following = asyncio.ensure_future(anext(source, None))
        try:
            while not (await asyncio.wait({following}, timeout=self._budget.stall_s / 4))[0]:
                await stream.send(Frame.WAIT, b"", self._budget.take_s)
            return following.result()
        finally:
            following.cancel()

    async def _receive(self, member: int, stream: Stream) -> None:
        line, patience_s = self._lines[member], 2 * self._budget.stall_s  # it may begin a little after us
        kind = Frame.WAIT
        while line.owes_anything:
            kind, data = await stream.receive(self._limit, patience_s)
            patience_s = self._budget.stall_s
            line.waits = kind == Frame.WAIT
            if line.waits:
                continue
            self._traffic.received += len(data)
            number = next(
                (n for n in range(len(self._phases)) if (n, kind) in line.due and line.owes(n, kind)), None
            )
            if number is None:
                raise MemberFault(member, f"sent more than {sum(line.due.values())} frames")
            index = line.came.get((number, kind), 0)
            take = self._phases[number].add if kind == Frame.CONTRIBUTION else self._phases[number].receive
            await take(member, index, data)
            line.came[number, kind] = index + 1
        line.all_here.set()
        while kind != Frame.END:  # it ends when it has all from us
            try:
                kind, _ = await stream.receive(0, self._budget.stall_s)
            except Silent:
                raise
            except ConnectionError:
                return  # it died, perhaps after it had all: the votes will tell

    def _aborted(self, text: str) -> Aborted:
        """What another member says when it ends the exchange, with the number of the one that it blames."""
        number, _, reason = text.partition(": ")
        known = number.isascii() and number.isdigit() and len(number) < 5 and int(number) < len(self._peers)
        return Aborted(reason, suspect=int(number)) if known else Aborted(text)

    def _blame_the_slow(self, *, at_the_end: bool) -> None:
        """Raise MemberFault for a member that holds the others up, unless most do: then it is more likely us.

        A first contribution waits for nobody. What comes later may wait for a third member; who waits says
        so.
        """
        slow = [
            m
            for m, line in self._lines.items()
            if line.owes(0, Frame.CONTRIBUTION) or (line.owes_anything and (at_the_end or not line.waits))
        ]
        if slow and len(slow) <= max(1, len(self._lines) // 2):
            line = self._lines[slow[0]]
            came, due, after_s = sum(line.came.values()), sum(line.due.values()), self._budget.usual_s
            raise MemberFault(slow[0], f"was too slow: {came} of {due} messages after {after_s:.1f} s")

    def _confirm(self, error: BaseException) -> None:
        """Raise MemberFault if somebody blames a member that alone has not given us its contribution either.

        The one on a slow link may blame its accuser, whom it cannot hear any more: that would be one word
        against another.
        """
        late = [m for m, line in self._lines.items() if line.owes(0, Frame.CONTRIBUTION)]
        if isinstance(error, Aborted) and late == [error.suspect]:
            raise MemberFault(late[0], f"was late here too: {error}") from error

    async def _hang_up(self, reason: str) -> None:
        """Tell those who still wait for us that this is over, and free the streams.

        What we say last would be lost if we closed the stream behind it: who is told closes, we wait for
        that.
        """
        self._reason = reason
        lines = [line for line in self._lines.values() if line.stream.done() and not line.stream.cancelled()]
        lines = [line for line in lines if line.stream.exception() is None]
        await asyncio.gather(
            *(li.stream.result().refuse(ABORTED + reason) for li in lines if not li.finished)
        )
        for line in self._lines.values():
            line.stream.cancel()

        async def part() -> None:
            ends = [li.stream.result().end(self._budget.stall_s, wait=not li.finished) for li in lines]
            await asyncio.gather(*ends, return_exceptions=True)
            self._over.set()

        parting = asyncio.create_task(part())
        _PARTING.add(parting)
        parting.add_done_callback(_PARTING.discard)
