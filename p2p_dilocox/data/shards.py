"""What a cluster trains on: in each outer step one shard of the data, the same in every process.

With data.order = "random" window i of inner step h in outer step t follows from (seed, cluster id, t, h, i):
drawn with replacement, there is no position to save. With "shards" it follows from (seed, shard, h, i), and
leases.py remembers the number of each outer step's shard. Either way a cluster that crashed, resumed or came
back under its old key goes on where it would have been, and no stream ever ends.
"""

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray

from p2p_dilocox.data.tokens import Corpus, Tokens
from p2p_dilocox.errors import DataError
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.tokenizer import end_of_document

__all__ = ["PADDING", "Batches"]

PADDING = -1

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
        end = end_of_document(spec.data.tokenizer) if spec.data.packing == "padded" else None
        self._seed, self._lease = spec.run.seed, (0, 0)
        self._per_shard = spec.inner.H * spec.inner.batch_size
        self._train, self._valid = (
            _Windows(tokens, self.window, end) for tokens in (corpus.train, corpus.valid)
        )

    def batch(self, t: int, h: int) -> torch.Tensor:
        """Inner step h of outer step t: int64 [B, T + 1]. From the shard that was leased for t; without one
        random windows, which follow from (seed, cluster, t, h) alone."""
        leased_t, number = self._lease
        if t == leased_t:
            first = number % self.num_shards * self._per_shard + h * self.batch_size
            positions = np.arange(first, first + self.batch_size, dtype=np.uint64)
            return self._train.rows(self._shuffled(number // self.num_shards, positions))
        key = f"{self._stream}/{t}/{h}".encode()
        # SHAKE-256 as the generator: the same numbers on every machine and in every version of every library
        numbers = np.frombuffer(hashlib.shake_256(key).digest(8 * self.batch_size), dtype="<u8")
        return self._train.rows(numbers % np.uint64(self._train.count))

    @property
    def num_shards(self) -> int:
        """Parts of the data, each of as many windows as a cluster trains on in an outer step; 1 if it has not
        even those: then an outer step goes round it several times."""
        return max(1, self._train.num_apart // self._per_shard)

    def lease(self, t: int, number: int) -> None:
        """Outer step t trains on shard `number`, see leases.py."""
        self._lease = (t, number)

    def _shuffled(self, over: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The windows at some positions of pass `over`: each window stands at one position, neighbours are
        far apart. Windows of another pass begin elsewhere in the text."""
        count, stride = self._train.num_apart, self._train.stride
        digest = hashlib.shake_256(f"{self._seed}/{over}".encode()).digest(24)
        factor, shift, offset = np.frombuffer(digest, dtype="<u8").tolist()
        factor = factor % count or 1
        while math.gcd(factor, count) > 1:  # then it is a permutation
            factor += 1
        windows = [(factor * p + shift) % count for p in positions.tolist()]
        starts = [(w * stride + offset % stride) % self._train.count for w in windows]
        return np.array(starts, dtype=np.uint64)

    def valid_batches(self, count: int) -> list[torch.Tensor]:
        """`count` batches, int64 [B, T + 1] each, from all over the held-out tokens; the same for every
        cluster. They overlap if there are not that many held-out tokens."""
        numbers = np.linspace(0, self._valid.count - 1, count * self.batch_size).astype(np.uint64)
        return [self._valid.rows(part) for part in np.split(numbers, count)]


class _Windows:
    """All windows of a text. Without an end-of-document token one begins at every token; with one, documents
    are cut into pieces of at most a window, none of a single token, and each piece is a window by itself."""

    def __init__(self, tokens: Tokens, window: int, end: int | None) -> None:
        self.tokens, self.window = tokens, window
        self.starts: NDArray[np.int64] | None = None
        self.count = len(tokens) - window + 1
        self.stride = window - 1
        if end is not None:
            self.starts, self.lengths = _pieces(np.flatnonzero(tokens == end) + 1, len(tokens), window)
            self.count, self.stride = len(self.starts), 1
        if self.count < 1:
            raise DataError("no document has two tokens, and one of them is needed to predict the other")

    @property
    def num_apart(self) -> int:
        """Windows that share no target token."""
        return max(1, self.count // self.stride)

    def rows(self, numbers: NDArray[np.uint64]) -> torch.Tensor:
        """int64 [len(numbers), T + 1], PADDING behind the end of a short piece."""
        rows = np.full((len(numbers), self.window), PADDING, dtype=np.int64)
        for row, number in zip(rows, numbers.tolist(), strict=True):
            start = number if self.starts is None else int(self.starts[number])
            length = self.window if self.starts is None else int(self.lengths[number])
            row[:length] = self.tokens[start : start + length]
        return torch.from_numpy(rows)


def _pieces(ends: NDArray[np.int64], total: int, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of the pieces of all documents. ends: one past each document's last token. A piece
    begins with the last token of the one before it, which is only an input there: every token but the first
    of a document is predicted once."""
    borders = np.unique(np.concatenate([[0], ends, [total]]))
    lengths = np.diff(borders)
    counts = np.maximum(-(-(lengths - 1) // (window - 1)), 0)
    first = np.repeat(borders[:-1], counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = first + number * (window - 1)
    return starts, np.minimum(window, np.repeat(borders[1:], counts) - starts)
