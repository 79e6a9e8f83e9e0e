"""Which shard of the data each cluster trains on, so that together they see all of it before any part twice.

Shards have numbers that never end: shard q is part q mod n of pass q div n over the data. Of k clusters that
train, the i-th by id takes the first number that is i mod k and that nobody has trained on or holds; it says
so in its heartbeat, with all it knows to be trained. Heartbeats are some seconds old, so what matters is that
all know who trains. Nothing waits for them: at worst two train on one shard, or some are passed over as a
liar says that it trained them. The heartbeat of a dead cluster expires, and what it held is somebody's then.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["AHEAD", "Claim", "Leases"]

AHEAD = 1024  # numbers beyond the first unfinished one that a claim speaks of
_KEPT = 64  # own outer steps whose shards are remembered


@dataclass(frozen=True, slots=True)
class Claim:
    """done: all numbers below are trained. ahead: a bit for each of the AHEAD numbers from there on, the
    first is the lowest of the first byte. held: numbers in work, or in a round that is under way."""

    done: int = 0
    ahead: bytes = b""
    held: tuple[int, ...] = ()

    def finished(self) -> set[int]:
        """The numbers from `done` on that are trained."""
        return {self.done + i for i in range(8 * len(self.ahead)) if self.ahead[i // 8] >> i % 8 & 1}


class Leases:
    """save: called with a text to keep, from which the next start goes on; saved: that text, or ""."""

    def __init__(self, me: str, save: Callable[[str], None], saved: str = "") -> None:
        self._me, self._save = me, save
        self._done, self._ahead = 0, set[int]()
        self._taken: dict[int, int] = {}  # by outer step
        self._open: set[int] = set()  # outer steps whose round has not landed
        if saved:
            kept = json.loads(saved)
            self._done, self._ahead = int(kept["done"]), set(map(int, kept["ahead"]))
            self._taken = {int(t): int(number) for t, number in kept["taken"].items()}
            # Their rounds may have been committed, and land now.
            self._open = {t for t, n in self._taken.items() if n >= self._done and n not in self._ahead}

    def take(self, t: int, others: Mapping[str, Claim]) -> int:
        """The shard of outer step t; the same again after a restart. others: by cluster, those that train."""
        if t not in self._taken:
            self._learn(list(others.values()))
            held = {number for claim in others.values() for number in claim.held}
            held |= {self._taken[s] for s in self._open}
            free = (n for n in itertools.count(self._done) if n not in self._ahead and n not in held)
            clusters = sorted([self._me, *others])
            place = clusters.index(self._me)
            self._taken[t] = next(n for n in free if n % len(clusters) == place)
        self._open.add(t)
        self._write()
        return self._taken[t]

    def finish(self, t: int) -> int | None:
        """The round of outer step t is over: what was trained for it is delivered, or will be. Its shard, if
        it had one and this was not known."""
        number = self._taken.get(t)
        if number is None or t not in self._open:
            return None
        # What was begun before and never came to a round is free again.
        self._open = {s for s in self._open if s > t}
        self._mark({number})
        self._write()
        return number

    def claim(self) -> Claim:
        bits = bytearray(AHEAD // 8)
        for number in self._ahead:
            if number - self._done < AHEAD:
                bits[(number - self._done) // 8] |= 1 << (number - self._done) % 8
        held = tuple(sorted(self._taken[t] for t in self._open))[-8:]
        return Claim(self._done, bytes(bits).rstrip(b"\0"), held)

    def _learn(self, claims: list[Claim]) -> None:
        """Nobody is believed that is far ahead of us, unless most are."""
        if claims:
            usual = sorted(claim.done for claim in claims)[(len(claims) - 1) // 2]
            self._done = max(self._done, usual)
            self._mark(set())
        for claim in claims:
            if self._done <= claim.done <= self._done + AHEAD:
                self._mark(set(range(self._done, claim.done)))
            self._mark({n for n in claim.finished() if self._done <= n < self._done + 2 * AHEAD})

    def _mark(self, numbers: set[int]) -> None:
        self._ahead |= numbers
        while self._done in self._ahead:
            self._done += 1
        self._ahead = {n for n in self._ahead if n > self._done}

    def _write(self) -> None:
        recent = sorted(self._taken)[-_KEPT:]
        self._taken = {t: self._taken[t] for t in recent}
        self._open &= set(recent)
        kept = {"done": self._done, "ahead": sorted(self._ahead), "taken": self._taken}
        self._save(json.dumps(kept) + "\n")
