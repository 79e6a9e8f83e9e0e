"""What a cluster trains on: random windows of the training tokens, different ones for every cluster.

There is no position to save. Window i of inner step h in outer step t follows from (seed, cluster id, t, h,
i) alone, so a cluster that crashed, resumed or came back under its old key goes on where it would have been,
and a cluster under a new key starts a stream of its own. Windows are drawn with replacement: streams of
different clusters are independent, not disjoint, and none ever ends.
"""

import hashlib

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
        self._train, self._valid = (
            _Windows(tokens, self.window, end) for tokens in (corpus.train, corpus.valid)
        )

    def batch(self, t: int, h: int) -> torch.Tensor:
        """Inner step h of outer step t: int64 [B, T + 1]."""
        key = f"{self._stream}/{t}/{h}".encode()
        # SHAKE-256 as the generator: the same numbers on every machine and in every version of every library
        numbers = np.frombuffer(hashlib.shake_256(key).digest(8 * self.batch_size), dtype="<u8")
        return self._train.rows(numbers % np.uint64(self._train.count))

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
        if end is not None:
            self.starts, self.lengths = _pieces(np.flatnonzero(tokens == end) + 1, len(tokens), window)
            self.count = len(self.starts)
        if self.count < 1:
            raise DataError("no document has two tokens, and one of them is needed to predict the other")

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
