"""Which members a cluster does not average with: those that made a round fail, and those whose contribution
stands out.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

from p2p_dilocox.swarm.messages import Vote

__all__ = ["Grudges", "NormCap", "different_parts", "left_out", "to_blame"]

_LONGEST = 6  # strikes; 2^6 outer steps
_CAP = 10.0
_ROUNDS = 8


class Grudges:
    """Members that one cluster holds responsible for failed averagings.

    A strike keeps a member out of the rest of that outer step; each further one without a committed round in
    between doubles the time: 1, 2, 4 .. 64 outer steps. So a link that is too slow, or a peer that lies,
    costs the others less and less, and who has recovered is soon back.
    """

    def __init__(self) -> None:
        self._strikes: Counter[str] = Counter()
        self._until: dict[str, int] = {}

    def strike(self, cluster: str, t: int) -> None:
        self._strikes[cluster] = min(_LONGEST, self._strikes[cluster] + 1)
        self._until[cluster] = t + (1 << (self._strikes[cluster] - 1)) - 1

    def without(self, t: int) -> list[str]:
        """Whom we do not average with in outer step t."""
        return sorted(c for c, until in self._until.items() if t <= until)

    def until(self, cluster: str) -> int:
        return self._until.get(cluster, 0)

    def forgive(self, members: Collection[str]) -> None:
        """They were in a round that was committed."""
        for cluster in members:
            self._strikes.pop(cluster, None)
            self._until.pop(cluster, None)


def left_out(without: Mapping[str, Collection[str]]) -> list[str]:
    """Whom to leave out so that no two members remain of which one refuses the other.

    without: per cluster that is ready, whom it refuses. The one with the most quarrels goes first: an honest
    cluster has them with liars only, a liar with all whom it lies to or about. Of two with as many, the
    refused one goes, not who refuses; then the last in order, so that all clusters find the same.
    """
    gone: list[str] = []
    while True:
        quarrels: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        for cluster, others in without.items():
            for other in others:
                if cluster != other and other in without and cluster not in gone and other not in gone:
                    quarrels.update((cluster, other))
                    refused[other] += 1
        if not quarrels:
            return sorted(gone)
        gone.append(max(quarrels, key=lambda c: (quarrels[c], refused[c], c)))


def different_parts(members: Sequence[str], votes: Mapping[str, Vote]) -> dict[str, list[str]]:
    """Who accuses whom when averages differ: per voter the members from whom it has other bytes than most
    have.
    """
    accusers: dict[str, list[str]] = {}
    for index, owner in enumerate(members):
        got = {c: v.parts[index] for c, v in votes.items() if c != owner and len(v.parts) == len(members)}
        most, count = Counter(got.values()).most_common(1)[0] if got else ("", 0)
        for voter, digest in got.items():
            if digest != most or (count == 1 and len(got) > 1):
                accusers.setdefault(voter, []).append(owner)
    return accusers


def to_blame(
    me: str,
    members: Sequence[str],
    votes: Mapping[str, Vote],
    forgers: Mapping[str, str],
    seen: Mapping[str, str],
) -> dict[str, str]:
    """With whom cluster `me` does not average in the next attempt, and why, after votes that did not agree.

    Those whom the votes accuse, the same for all who know the same votes. If nobody accuses anybody, those
    who alone could not average or did not vote: they would fail the next attempt too. With the votes of less
    than half of the members nobody: then it is `me` who is cut off, and an innocent would be left out for it.
    forgers: who told votes that others did not sign. seen: what `me` itself holds against others.
    """
    blamed = {c: f"it told votes that others did not cast: {why}" for c, why in forgers.items()}
    if 2 * len(votes) >= len(members):
        accusers = {c: list(vote.accused) for c, vote in votes.items() if vote.accused}
        differ = len({vote.digest for vote in votes.values() if vote.digest}) > 1
        if differ:
            accusers = different_parts(members, votes)
        for cluster in left_out({c: accusers.get(c, []) for c in members}):
            said = [votes[a].reason for a in accusers if cluster in accusers[a] and votes[a].reason]
            why = "it sent other averages to others" if differ else (said or ["it refuses several"])[0]
            blamed[cluster] = f"it {seen[cluster]}" if cluster in seen else why
        if not blamed and not differ:
            failed = {c: v.reason or "it could not average" for c, v in votes.items() if not v.digest}
            failed |= {c: "it did not vote" for c in members if c not in votes}
            if 2 * len(failed) <= len(members) and me not in failed:
                blamed = failed
    blamed.pop(me, None)
    return blamed


class NormCap:
    """How long a pseudo-gradient may be (rule V5): ten times the median of the last rounds, or of this one if
    that is more.

    The median of a roll call is in it so that a run whose movement grows everywhere goes on: a few cannot
    move it.
    """

    def __init__(self) -> None:
        self._norms: deque[list[float]] = deque(maxlen=_ROUNDS)

    def remember(self, norms: Sequence[float]) -> None:
        """Of the members of a committed round that had something to average."""
        moved = [n for n in norms if n > 0]
        if moved:
            self._norms.append(moved)

    def cap(self, norms: Sequence[float]) -> float:
        """For a roll call of contributions this long. Infinite where nothing is known, and for the first two
        alone.
        """
        recent = [n for norms_of_round in self._norms for n in norms_of_round]
        moved = [n for n in norms if n > 0]
        if not recent and len(moved) < 3:
            return float("inf")
        return _CAP * max(_median(recent), _median(moved))


def _median(values: Sequence[float]) -> float:
    """The lower one of an even number, so that one of two cannot lift it."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
