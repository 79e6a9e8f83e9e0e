"""Committed rounds that a rank keeps, for clusters that were not in them."""

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.messages import Result

__all__ = ["MOST_BYTES", "MOST_ROUNDS", "KeptRounds"]

MOST_ROUNDS = 64
MOST_BYTES = 256 << 20


class KeptRounds:
    """The newest, at least one, as many as fit."""

    def __init__(self) -> None:
        self._chunks: dict[int, dict[int, list[bytes]]] = {}  # t -> stage -> encoded average
        self._results: dict[int, Result] = {}

    def remember(self, t: int, result: Result | None, chunks: dict[int, list[bytes]]) -> None:
        """result: its proof, which only a cluster's lead has. chunks: by stage."""
        if result is not None:
            self._results[t] = result
        self._chunks[t] = chunks
        sizes = {k: sum(len(c) for stage in kept.values() for c in stage) for k, kept in self._chunks.items()}
        while len(sizes) > 1 and (len(sizes) > MOST_ROUNDS or sum(sizes.values()) > MOST_BYTES):
            old = min(sizes)
            del sizes[old], self._chunks[old]
            self._results.pop(old, None)

    def average_of(self, t: int, stage: int) -> list[bytes]:
        """The encoded average of a recent committed round. Raises NotTrustedError if it is not kept."""
        try:
            return self._chunks[t][stage]
        except KeyError:
            raise NotTrustedError(f"outer step {t}, stage {stage} is not kept here") from None

    def result_after(self, t: int) -> Result:
        """The first kept round after outer step t; its parent tells whether it is the next. NotTrustedError
        if none.
        """
        later = [k for k in self._results if k > t]
        if not later:
            raise NotTrustedError(f"no round after outer step {t} is kept here")
        return self._results[min(later)]
