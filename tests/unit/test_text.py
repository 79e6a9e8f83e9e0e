"""Sources of text: what is read, and what is refused with which place."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from p2p_dilocox.data.text import documents
from p2p_dilocox.data.tokens import Corpus, load_tokens
from p2p_dilocox.errors import DataError
from p2p_dilocox.runspec import Data, RunSpec, parse_run
from p2p_dilocox.tokenizer import tokenizer_dir

SPEC = parse_run(
    """
[run]
id = "tiny"
outer_steps = 3
[model]
path = "not here, so that no config class has to be imported"
[data]
seq_len = 32
valid_fraction = 0.1
[inner]
H = 5
batch_size = 4
lr = 1e-3
"""
)
SENTENCE = "It is a truth universally acknowledged, that number {} is in want of another.\n"


def with_data(data: Data) -> RunSpec:
    return replace(SPEC, data=data)


def text_data(*paths: Path, source: str = "text") -> Data:
    return replace(SPEC.data, source=source, paths=tuple(map(str, paths)))


def write_sentences(path: Path, count: int, start: int = 0) -> str:
    text = "".join(SENTENCE.format(n) for n in range(start, start + count))
    path.write_text(text, encoding="utf-8")
    return text


def decoded(corpus: Corpus) -> str:
    """Training tokens, then held-out ones."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir("embedded") / "tokenizer.json"))
    ids = [*corpus.train.tolist(), *corpus.valid.tolist()]
    return str(tokenizer.decode(ids, skip_special_tokens=False))


# Sources


def test_text_files_of_a_directory_are_read_in_order_and_others_ignored(tmp_path: Path) -> None:
    second = write_sentences(tmp_path / "b.txt", 150, start=1000)
    first = write_sentences(tmp_path / "a.txt", 150)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\xff\xd8")
    with gzip.open(tmp_path / "c.txt.gz", "wt") as packed:
        packed.write("the end")
    corpus = load_tokens(with_data(text_data(tmp_path)), tmp_path / "cache")
    assert decoded(corpus) == f"{first}<|endoftext|>{second}<|endoftext|>the end<|endoftext|>"


def test_jsonl_and_parquet_give_the_same_tokens(tmp_path: Path) -> None:
    texts = [SENTENCE.format(n) for n in range(200)] + ["", "naïve 漢字"]
    rows = "\n".join(json.dumps({"body": text, "id": 1}) for text in texts) + "\n\n"
    (tmp_path / "rows.jsonl").write_text(rows)
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "body": texts}), tmp_path / "rows.parquet")
    corpora = [
        load_tokens(
            with_data(replace(text_data(tmp_path / f"rows.{kind}", source=kind), text_field="body")),
            tmp_path / "cache",
        )
        for kind in ("jsonl", "parquet")
    ]
    assert decoded(corpora[0]) == "".join(f"{text}<|endoftext|>" for text in texts if text)
    assert np.array_equal(corpora[0].train, corpora[1].train)
    assert np.array_equal(corpora[0].valid, corpora[1].valid)


def test_a_datasets_directory_is_streamed_up_to_max_tokens(tmp_path: Path) -> None:
    rows = [json.dumps({"text": SENTENCE.format(n)}) for n in range(2000)]
    directory = tmp_path / "set"
    directory.mkdir()
    (directory / "train.jsonl").write_text("\n".join(rows))
    data = replace(SPEC.data, source="hub", name=str(directory), max_tokens=3000)
    corpus = load_tokens(with_data(data), tmp_path / "cache")
    assert len(corpus.train) + len(corpus.valid) == 3000
    assert decoded(corpus).startswith(f"{SENTENCE.format(0)}<|endoftext|>{SENTENCE.format(1)}<|endoftext|>")


def test_long_texts_are_encoded_in_pieces_that_do_not_show(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "a.txt", 20_000)  # 1.6 MB: several blocks and many pieces
    corpus = load_tokens(with_data(text_data(tmp_path / "a.txt")), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(tokenizer_dir("embedded") / "tokenizer.json"))
    whole = np.bincount(tokenizer.encode(text).ids, minlength=2048)
    pieces = np.bincount(np.concatenate([corpus.train, corpus.valid]), minlength=2048)
    whole[0] += 1
    assert np.array_equal(pieces, whole)


# Errors


def test_paths_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    cases = [
        (text_data(tmp_path / "none.txt"), "none.txt does not exist"),
        (text_data(tmp_path), "holds no text file (.txt, .txt.gz, .md)"),
        (text_data(tmp_path, source="jsonl"), "holds no jsonl file"),
        (replace(SPEC.data, source="hub", name=str(tmp_path)), "the dataset cannot be read"),
        (replace(SPEC.data, tokenizer=str(tmp_path)), "no tokenizer.json there"),
        (replace(SPEC.data, tokenizer=str(tmp_path / "x")), "no tokenizer.json there"),
    ]
    for data, message in cases:
        with pytest.raises(DataError) as caught:
            load_tokens(with_data(data), tmp_path / "cache")
        assert message in str(caught.value)
    assert not list(tmp_path.glob("cache/*"))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    data = replace(SPEC.data, tokenizer=str(tmp_path))
    for content in ("{", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": 0}}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
            load_tokens(with_data(data), tmp_path / "cache")


@pytest.mark.parametrize("before", [0, 5, (1 << 20) - 1, (1 << 20) + 7])
def test_bytes_that_are_not_utf8_are_found_with_their_offset(tmp_path: Path, before: int) -> None:
    (tmp_path / "latin.txt").write_bytes(b"a" * before + "é".encode("latin-1") + b" and more text")
    with pytest.raises(DataError, match=rf"latin\.txt: byte {before} \(0xe9\) is not UTF-8"):
        load_tokens(with_data(text_data(tmp_path / "latin.txt")), tmp_path / "cache")


def test_a_character_cut_off_at_the_end_of_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes(b"abc" + "漢".encode()[:2])
    with pytest.raises(DataError, match=r"cut\.txt: byte 3 \(0xe6\) is not UTF-8"):
        load_tokens(with_data(text_data(tmp_path / "cut.txt")), tmp_path / "cache")


def test_a_character_across_two_blocks_is_whole(tmp_path: Path) -> None:
    text = "a" * ((1 << 20) - 1) + "漢字"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (document,) = documents(text_data(tmp_path / "a.txt"))
    blocks = list(document)
    assert len(blocks) > 1
    assert "".join(blocks) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 2 is not JSON"),
        (b'["a"]', "line 2: list, must be an object with the field 'text'"),
        (b'{"body": "a"}', "line 2: no field 'text'; there are 'body'. Set data.text_field"),
        (b'{"text": 7}', "line 2: field 'text' is int, must be text"),
        (b'{"text": "\xe9"}', "rows.jsonl: byte 27 (0xe9) is not UTF-8"),
    ],
)
def test_bad_rows_are_named_with_their_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        load_tokens(with_data(text_data(tmp_path / "rows.jsonl", source="jsonl")), tmp_path / "cache")
    assert message.replace("byte 25", f"byte {17 + line.index(0xE9) if 0xE9 in line else 0}") in str(
        caught.value
    )


def test_a_parquet_file_without_the_column_and_a_file_that_is_none(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="no field 'text'; there are 'body'"):
        load_tokens(with_data(text_data(tmp_path / "rows.parquet", source="parquet")), tmp_path / "cache")
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_tokens(with_data(text_data(tmp_path / "rows.parquet", source="parquet")), tmp_path / "cache")


def test_less_text_than_one_batch_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line")
    with pytest.raises(DataError, match=r"the training text has \d tokens, one batch needs 132 "):
        load_tokens(with_data(text_data(tmp_path / "a.txt")), tmp_path / "cache")
    (tmp_path / "a.txt").touch()
    write_sentences(tmp_path / "a.txt", 8)
    data = replace(text_data(tmp_path / "a.txt"), valid_fraction=0.01)
    with pytest.raises(DataError, match=r"the held-out text has \d tokens, one sequence needs 33"):
        load_tokens(with_data(data), tmp_path / "cache")


def test_a_text_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="the training text has 0 tokens"):
        load_tokens(with_data(text_data(tmp_path / "a.txt")), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_sentences(tmp_path / "a.txt", 100)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="tokens cannot be kept there"):
        load_tokens(with_data(text_data(tmp_path / "a.txt")), tmp_path / "file")
