"""Text as token ids on disk: encoded once per content, then mapped into memory by every process."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from tokenizers import Tokenizer

from p2p_dilocox.data.text import Document, documents, source_files
from p2p_dilocox.errors import DataError
from p2p_dilocox.settings import Data, RunSpec
from p2p_dilocox.tokenizer import end_of_text_id, tokenizer_dir, vocabulary_size

__all__ = ["Corpus", "Tokens", "load_tokens", "unigram_loss"]

Tokens = NDArray[np.unsignedinteger[Any]]

TokenType = np.dtype[np.unsignedinteger[Any]]

_FORMAT = "1"
"""Part of every cache name. Change it when the same text would give other tokens or another split."""

_PIECE_CHARACTERS = 1 << 16
_BATCH_PIECES = 32
_MIN_BLOCK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Corpus:
    """`train` and `valid`: token ids, [n] each, mapped from disk. No token of one is in the other."""

    train: Tokens
    valid: Tokens
    vocab_size: int


def load_tokens(spec: RunSpec, cache_dir: Path) -> Corpus:
    """The tokens of spec.data. The first call encodes the text and writes cache_dir/<hash of the content>/.

    Several processes may call this at the same instant: each writes a directory of its own and renames it,
    the first one stays. (They all do the work then: one call before they start is faster.)
    Raises DataError: no such file, nothing of the right kind, bad
    UTF-8, no tokenizer, less data than one batch."""
    vocab_size = vocabulary_size(spec.data.tokenizer)
    directory = cache_dir / _content_hash(spec.data)
    try:
        if not directory.is_dir():
            _build(spec.data, vocab_size, directory)
        train, valid = (np.load(directory / name, mmap_mode="r") for name in ("train.npy", "valid.npy"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{directory}: tokens cannot be kept there: {error}. Free space or delete it"
        ) from error
    _require_one_batch(spec, len(train), len(valid))
    return Corpus(train, valid, vocab_size)


def unigram_loss(corpus: Corpus) -> float:
    """Nats per token of the held-out part under token frequencies of the training part (plus one): the loss
    of a model that knows which tokens are common and nothing else."""
    counts = _counts(corpus.train, corpus.vocab_size) + 1
    log_probabilities = np.log(counts) - np.log(counts.sum())
    seen = _counts(corpus.valid, corpus.vocab_size)
    return float(-(seen * log_probabilities).sum() / seen.sum())


def _counts(tokens: Tokens, vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 22):  # bincount makes a copy in 8 bytes per token
        counts += np.bincount(tokens[start : start + (1 << 22)], minlength=vocab_size)
    return counts


def _require_one_batch(spec: RunSpec, train: int, valid: int) -> None:
    window = spec.data.seq_len + 1
    needed = spec.inner.batch_size * window
    if train < needed:
        raise DataError(
            f"the training text has {train} tokens, one batch needs {needed} "
            f"(batch_size {spec.inner.batch_size} x {window}). "
            "Add text, or lower inner.batch_size or data.seq_len"
        )
    if valid < window:
        raise DataError(
            f"the held-out text has {valid} tokens, one sequence needs {window}. "
            f"Add text, raise data.valid_fraction (now {spec.data.valid_fraction:g}) or lower data.seq_len"
        )


def _block_tokens(data: Data) -> int:
    """Length of the blocks whose last part is held out: about 32 kB of text, and at least long enough for the
    held-out part to hold four sequences without a seam."""
    return max(_MIN_BLOCK_TOKENS, int(4 * (data.seq_len + 1) / data.valid_fraction))


def _content_hash(data: Data) -> str:
    """32 hex digits that change with any file and any setting the tokens depend on.

    A dataset served by a hub is known by its name only: delete the cache to read it again.
    """
    tokenizer = tokenizer_dir(data.tokenizer)
    settings = [_FORMAT, data.source, data.name, data.subset, data.text_field, data.max_tokens]
    settings += [data.valid_fraction, _block_tokens(data), end_of_text_id(data.tokenizer)]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in (tokenizer / "tokenizer.json", *source_files(data)):
        try:
            with file.open("rb") as source:
                digest.update(hashlib.file_digest(source, "sha256").digest())
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def _build(data: Data, vocab_size: int, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        dtype: TokenType = np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.uint32)
        _write_split(_token_ids(data, dtype), data, dtype, work)
        try:
            work.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
            # another process was first, with the same bytes
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _token_ids(data: Data, dtype: TokenType) -> Iterator[Tokens]:
    """All token ids in order, in arrays of any length; documents
    end with the end-of-text token if there is one."""
    file = tokenizer_dir(data.tokenizer) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the type that the tokenizers library raises is Exception itself
        raise DataError(f"{file}: not a tokenizer: {error}") from error
    end = end_of_text_id(data.tokenizer)
    separator = np.array([] if end is None else [end], dtype=dtype)
    batch: list[tuple[str, bool]] = []
    for document in documents(data):
        for piece, is_last in _pieces(document):
            batch.append((piece, is_last))
            if len(batch) == _BATCH_PIECES:
                yield from _encode(tokenizer, batch, separator)
                batch = []
    yield from _encode(tokenizer, batch, separator)


def _encode(tokenizer: Tokenizer, batch: list[tuple[str, bool]], separator: Tokens) -> Iterator[Tokens]:
    encodings = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
    for encoding, (_, is_last) in zip(encodings, batch, strict=True):
        yield np.array(encoding.ids, dtype=separator.dtype)
        if is_last:
            yield separator


def _pieces(document: Document) -> Iterator[tuple[str, bool]]:
    """A document in pieces of bounded length, each with whether it is the last. Cut before a space where
    there is one: byte-level tokenizers start a token there, so the cut does not show."""
    rest = ""
    for block in document:
        rest += block
        while len(rest) > _PIECE_CHARACTERS:
            cut = rest.rfind(" ", 1, _PIECE_CHARACTERS)
            cut = cut if cut > 0 else _PIECE_CHARACTERS
            yield rest[:cut], False
            rest = rest[cut:]
    if rest:
        yield rest, True


def _write_split(arrays: Iterable[Tokens], data: Data, dtype: TokenType, work: Path) -> None:
    """train.npy and valid.npy in `work`. The last valid_fraction of every block is held out, so that both
    parts come from everywhere in the text."""
    with (work / "train.npy").open("wb") as train_file, (work / "valid.npy").open("wb") as valid_file:
        train, valid = _NpyFile(train_file, dtype), _NpyFile(valid_file, dtype)
        for block in _blocks(_at_most(data.max_tokens, arrays), _block_tokens(data)):
            trained = len(block) - round(len(block) * data.valid_fraction)
            train.append(block[:trained])
            valid.append(block[trained:])
        train.finish()
        valid.finish()


def _at_most(limit: int, arrays: Iterable[Tokens]) -> Iterator[Tokens]:
    """The first `limit` tokens. The source is not asked for more."""
    for array in arrays:
        yield array[:limit]
        limit -= len(array)
        if limit <= 0:
            return


def _blocks(arrays: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """The same tokens in arrays of `length`; the last may be shorter."""
    waiting: list[Tokens] = []
    num_waiting = 0
    for array in arrays:
        waiting.append(array)
        num_waiting += len(array)
        if num_waiting >= length:
            joined = np.concatenate(waiting)
            whole = num_waiting // length * length
            yield from joined[:whole].reshape(-1, length)
            waiting, num_waiting = [joined[whole:]], num_waiting - whole
    if num_waiting:
        yield np.concatenate(waiting)


class _NpyFile:
    """A one-dimensional .npy file whose length is known only at
    the end. numpy leaves room in the header to grow."""

    def __init__(self, file: BinaryIO, dtype: TokenType) -> None:
        self.file, self.dtype, self.length = file, dtype, 0
        self._write_header()

    def append(self, tokens: Tokens) -> None:
        self.file.write(tokens.tobytes())
        self.length += len(tokens)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self.file, header)
