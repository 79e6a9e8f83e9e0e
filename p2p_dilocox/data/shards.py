"""What a cluster trains on: random windows of the training tokens, different ones for every cluster.

There is no position to save. Window i of inner step h in outer step t follows from (seed, cluster id, t, h,
i) alone, so a cluster that crashed, resumed or came back under its old key goes on where it would have been,
and a cluster under a new key starts a stream of its own. Windows are drawn with replacement: streams of
different clusters are independent, not disjoint, and none ever ends.
"""

import hashlib

import numpy as np
import torch

from p2p_dilocox.data.tokens import Corpus, Tokens
from p2p_dilocox.settings import RunSpec

__all__ = ["Batches"]

# B: sequences of a batch   T: spec.data.seq_len. A window has T + 1 tokens: T inputs, and each one's next
# token


class Batches:
    """The batches of one cluster. Every rank of the cluster gets the same ones."""

    def __init__(self, corpus: Corpus, spec: RunSpec, cluster_id: str) -> None:
        """corpus: as load_tokens returns it, which has checked that it is long enough."""
        self.corpus = corpus
        self.batch_size = spec.inner.batch_size
        self.window = spec.data.seq_len + 1
        self._stream = f"{spec.run.seed}/{cluster_id}"

    def batch(self, t: int, h: int) -> torch.Tensor:
        """Inner step h of outer step t: int64 [B, T + 1]."""
        key = f"{self._stream}/{t}/{h}".encode()
        # SHAKE-256 as the generator: the same numbers on every machine and in every version of every library
        numbers = np.frombuffer(hashlib.shake_256(key).digest(8 * self.batch_size), dtype="<u8")
        return self._windows(self.corpus.train, numbers % np.uint64(len(self.corpus.train) - self.window + 1))

    def valid_batches(self, count: int) -> list[torch.Tensor]:
        """`count` batches, int64 [B, T + 1] each, from all over the held-out tokens; the same for every
        cluster. They overlap if there are not that many held-out tokens."""
        last = len(self.corpus.valid) - self.window
        starts = np.linspace(0, last, count * self.batch_size).astype(np.uint64)
        return [self._windows(self.corpus.valid, part) for part in np.split(starts, count)]

    def _windows(self, tokens: Tokens, starts: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> torch.Tensor:
        rows = [tokens[int(start) : int(start) + self.window].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))
