"""Where text comes from. Every source is a stream of documents, so that nothing has to fit into memory."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from io import BufferedReader
from pathlib import Path
from typing import Any

from p2p_dilocox.errors import DataError
from p2p_dilocox.settings import Data

__all__ = ["Document", "documents", "source_files"]

Document = Iterable[str]
"""One text as a sequence of blocks, to be read once and in order."""

_SUFFIXES = {
    "text": (".txt", ".txt.gz", ".md"),
    "jsonl": (".jsonl", ".jsonl.gz"),
    "parquet": (".parquet",),
}
"""What is taken from a directory. A file that is named itself may be called anything."""

_BLOCK_BYTES = 1 << 20


def source_files(data: Data) -> list[Path]:
    """The files of `data`, in the order in which they are read; [] for a dataset that a hub serves.

    Raises DataError for a path that does not exist and for a directory without a file of the right kind.
    """
    if data.source == "embedded":
        corpus = Path(str(resources.files("p2p_dilocox") / "data" / "corpus"))
        return sorted(corpus.glob("*.txt.gz"))
    if data.source == "hub":
        directory = Path(data.name)
        return sorted(file for file in directory.rglob("*") if file.is_file()) if directory.is_dir() else []
    files: list[Path] = []
    for name in data.paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(
                f for f in path.rglob("*") if f.name.endswith(_SUFFIXES[data.source]) and f.is_file()
            )
            if not inside:
                raise DataError(
                    f"data.paths: the directory {path} holds no {data.source} file "
                    f"({', '.join(_SUFFIXES[data.source])})"
                )
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"data.paths: {path} does not exist (looked from {Path.cwd()})")
    return files


def documents(data: Data) -> Iterator[Document]:
    """All documents of `data`, in a fixed order. A text file is one document, so is a row of the other kinds.

    Raises DataError, while reading, for a file that cannot be read or decoded, with the place in the file.
    """
    if data.source == "hub":
        yield from _hub_rows(data)
        return
    for file in source_files(data):
        if data.source == "jsonl":
            yield from _jsonl_rows(file, data.text_field)
        elif data.source == "parquet":
            yield from _parquet_rows(file, data.text_field)
        else:
            yield _text_blocks(file)


def _open(file: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _text_blocks(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        with _open(file) as source:
            while True:
                block = source.read(_BLOCK_BYTES)
                undecoded = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, position - undecoded, error) from error
                position += len(block)
                if text:
                    yield text
                if not block:
                    return
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _jsonl_rows(file: Path, text_field: str) -> Iterator[Document]:
    position = 0
    try:
        with _open(file) as source:
            for number, line in enumerate(source, start=1):
                try:
                    row = json.loads(line.decode("utf-8")) if line.strip() else {text_field: ""}
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, position, error) from error
                except ValueError as error:
                    raise DataError(f"{file} line {number} is not JSON: {error}") from error
                position += len(line)
                yield (_text_of(row, text_field, f"{file} line {number}"),)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _parquet_rows(file: Path, text_field: str) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            raise _no_field(str(file), text_field, table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield (_text_of({text_field: value}, text_field, f"{file} row {row}"),)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}") from error


def _hub_rows(data: Data) -> Iterator[Document]:
    """Rows of the train split, as they arrive. `datasets` also takes a local directory by its path."""
    import datasets

    try:
        rows = datasets.load_dataset(data.name, data.subset or None, split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield (_text_of(row, data.text_field, f"{data.name} row {number}"),)
    except DataError:
        raise
    except Exception as error:  # network, hub and file formats: anything can come out of there
        raise DataError(
            f"data.name = {json.dumps(data.name)}: the dataset cannot be read: {error}"
        ) from error


def _text_of(row: Any, text_field: str, place: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__}, must be an object with the field {text_field!r}")
    if text_field not in row:
        raise _no_field(place, text_field, list(row))
    text = row[text_field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field {text_field!r} is {type(text).__name__}, must be text")
    return text


def _no_field(place: str, text_field: str, names: list[str]) -> DataError:
    others = ", ".join(map(repr, names)) or "none"
    return DataError(f"{place}: no field {text_field!r}; there are {others}. Set data.text_field")


def _not_utf8(file: Path, start: int, error: UnicodeDecodeError) -> DataError:
    """start: where in the file the bytes begin that the decoder was given."""
    return DataError(
        f"{file}: byte {start + error.start} ({error.object[error.start]:#04x}) is not UTF-8; "
        "convert the file to UTF-8 or leave it out of data.paths"
    )
