"""Text to tokens to batches: what is read, what is refused, who gets which window."""

import gzip
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from p2p_dilocox.data.shards import PADDING, Batches, _pieces
from p2p_dilocox.data.text import source_files
from p2p_dilocox.data.tokens import Corpus, load_tokens, unigram_loss
from p2p_dilocox.errors import DataError
from p2p_dilocox.runspec import Data, RunSpec, parse_run
from p2p_dilocox.tokenizer import end_of_text_id, tokenizer_dir, vocabulary_size

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


@pytest.fixture(scope="session")
def austen(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_tokens(SPEC, tmp_path_factory.mktemp("cache"))


# The embedded corpus


def test_the_embedded_corpus_is_one_to_four_megabytes_of_english(austen: Corpus) -> None:
    texts = [gzip.decompress(file.read_bytes()).decode("utf-8") for file in source_files(SPEC.data)]
    assert len(texts) == 5
    assert 1e6 < sum(map(len, texts)) < 4e6
    for text in texts:
        assert "Chapter" in text or "CHAPTER" in text
        assert set(text) <= set(map(chr, range(32, 127))) | set("\n£")
        assert "Gutenberg" not in text


def test_the_embedded_tokenizer_has_2048_tokens_and_transformers_loads_it() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir("embedded"))
    assert len(tokenizer) == vocabulary_size("embedded") == 2048
    assert tokenizer.eos_token_id == end_of_text_id("embedded") == 0
    for text in ("Emma Woodhouse, handsome, clever, and rich", "naïve 漢字 🙂\n\n\tx"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_all_text_is_in_the_tokens_once_with_an_end_behind_each_novel(austen: Corpus) -> None:
    texts = [gzip.decompress(file.read_bytes()).decode("utf-8") for file in source_files(SPEC.data)]
    both = np.concatenate([austen.train, austen.valid])
    assert austen.train.dtype == np.uint16
    assert int((both == 0).sum()) == 5
    characters = {token: len(text) for token, text in _token_texts().items()}
    assert sum(characters[int(token)] for token in both) == sum(len(text.encode()) for text in texts)


def _token_texts() -> dict[int, str]:
    """Byte-level tokens write each byte as one character. The end of a text stands for no byte."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir("embedded") / "tokenizer.json"))
    return {token: text for text, token in tokenizer.get_vocab().items()} | {0: ""}


def test_a_unigram_is_better_than_chance_and_far_from_a_language_model(austen: Corpus) -> None:
    assert 6.0 < unigram_loss(austen) < 6.6 < math.log(2048)


def test_unigram_loss_is_the_cross_entropy_of_smoothed_counts() -> None:
    corpus = Corpus(np.array([0, 0, 1], dtype=np.uint16), np.array([0, 1, 1, 2], dtype=np.uint16), 3)
    probabilities = np.array([3, 2, 1]) / 6
    expected = -np.log(probabilities[[0, 1, 1, 2]]).mean()
    assert unigram_loss(corpus) == pytest.approx(expected, rel=1e-12)


# Held-out text


def test_no_training_window_contains_a_held_out_token(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(60_000)]  # each is one token and stands in the text once
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(words))
    spec = with_data(replace(text_data(tmp_path / "a.txt"), tokenizer=str(tmp_path)))
    corpus = load_tokens(spec, tmp_path / "cache")
    held_out = set(corpus.valid.tolist())
    assert len(held_out) == len(corpus.valid) == 5999
    assert held_out | set(corpus.train.tolist()) == set(range(60_000))
    batches = Batches(corpus, spec, "cluster-a")
    trained = set(torch.cat([batches.batch(1, h) for h in range(1000)]).flatten().tolist())
    assert len(trained) > 40_000
    assert held_out.isdisjoint(trained)
    assert held_out.issuperset(torch.cat(batches.valid_batches(10)).flatten().tolist())


def test_held_out_text_comes_from_everywhere(austen: Corpus) -> None:
    assert len(austen.valid) / (len(austen.train) + len(austen.valid)) == pytest.approx(0.1, abs=1e-3)
    own = -np.log((np.bincount(austen.valid, minlength=2048) + 1) / (len(austen.valid) + 2048))
    seen = np.bincount(austen.valid, minlength=2048)
    assert unigram_loss(austen) - float((seen * own).sum() / seen.sum()) < 0.1


def test_valid_batches_are_held_out_windows_the_same_for_every_cluster(austen: Corpus) -> None:
    ours, theirs = (Batches(austen, SPEC, name).valid_batches(6) for name in ("a", "b"))
    assert [batch.shape for batch in ours] == [torch.Size([4, 33])] * 6
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    everything = austen.valid.tobytes()
    for window in torch.cat(ours).numpy().astype(np.uint16):
        assert window.tobytes() in everything
    assert torch.equal(ours[0][0], torch.from_numpy(austen.valid[:33].astype(np.int64)))
    assert torch.equal(ours[-1][-1], torch.from_numpy(austen.valid[-33:].astype(np.int64)))


# Streams of clusters


def test_a_batch_depends_on_seed_cluster_and_step_only(austen: Corpus) -> None:
    first = Batches(austen, SPEC, "cluster-a")
    expected = first.batch(3, 2)
    assert expected.shape == (4, 33)
    assert expected.dtype == torch.int64
    again = Batches(austen, SPEC, "cluster-a")
    again.batch(1, 1)  # no position that could have moved
    assert torch.equal(again.batch(3, 2), expected)
    other_seed = replace(SPEC, run=replace(SPEC.run, seed=1))
    for other in (
        first.batch(3, 3),
        first.batch(2, 2),
        Batches(austen, SPEC, "cluster-b").batch(3, 2),
        Batches(austen, other_seed, "cluster-a").batch(3, 2),
    ):
        assert not torch.equal(other, expected)


def test_batches_are_the_same_on_every_machine_and_in_every_version() -> None:
    counting = Corpus(np.arange(50_000, dtype=np.uint16), np.arange(100, dtype=np.uint16), 65536)
    batch = Batches(counting, SPEC, "cluster-a").batch(1, 0)
    assert batch[:, 0].tolist() == [5170, 24659, 13777, 44253]
    assert torch.equal(batch - batch[:, :1], torch.arange(33).expand(4, 33))


def test_windows_of_clusters_are_uniform_and_independent() -> None:
    counting = Corpus(np.arange(60_000, dtype=np.uint16), np.arange(100, dtype=np.uint16), 65536)
    streams = [Batches(counting, SPEC, name) for name in ("a", "b")]
    ours, theirs = (
        torch.cat([stream.batch(t, h)[:, 0] for t in range(1, 21) for h in range(100)]).double()
        for stream in streams
    )
    for starts in (ours, theirs):  # 8000 draws: standard error of a tenth is 0.0034
        shares = torch.histc(starts, bins=10, min=0, max=60_000) / len(starts)
        assert (shares - 0.1).abs().max() < 0.02
    correlation = torch.corrcoef(torch.stack([ours, theirs]))[0, 1]
    assert abs(float(correlation)) < 0.05  # standard error 0.011
    assert len(set(ours.tolist()) & set(theirs.tolist())) < 0.25 * len(ours)


def test_the_first_and_the_last_window_can_be_drawn() -> None:
    corpus = Corpus(np.arange(34, dtype=np.uint16), np.arange(33, dtype=np.uint16), 2048)
    starts = {int(row[0]) for h in range(20) for row in Batches(corpus, SPEC, "a").batch(1, h)}
    assert starts == {0, 1}


# The cache


def test_changed_text_or_settings_get_tokens_of_their_own(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_sentences(tmp_path / "a.txt", 100)
    data = text_data(tmp_path / "a.txt")
    load_tokens(with_data(data), cache)
    load_tokens(with_data(data), cache)
    assert len(list(cache.iterdir())) == 1
    write_sentences(tmp_path / "a.txt", 100, start=1)
    changed = load_tokens(with_data(data), cache)
    assert "number 100 " in decoded(changed)
    load_tokens(with_data(replace(data, valid_fraction=0.2)), cache)
    load_tokens(with_data(replace(data, max_tokens=1000)), cache)
    assert len(list(cache.iterdir())) == 4


LOAD = """
import sys
from dataclasses import replace
from pathlib import Path
from p2p_dilocox.data.tokens import load_tokens
from p2p_dilocox.runspec import parse_run
spec = parse_run(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
corpus = load_tokens(spec, Path(sys.argv[2]))
print(len(corpus.train), int(corpus.train.astype("u8").sum()), int(corpus.valid.astype("u8").sum()))
"""
EMBEDDED = """
run = { id = "tiny", outer_steps = 1 }
model = { path = "not here, so that no config class has to be imported" }
inner = { H = 1, batch_size = 4, lr = 1e-3 }
"""


def test_processes_that_build_the_cache_at_the_same_instant_agree(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, EMBEDDED, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert len(list(tmp_path.iterdir())) == 1


# Documents


def documents_corpus(lengths: list[int]) -> Corpus:
    """Document k is the token k + 1, so often, and then the end-of-text token 0."""
    tokens = np.concatenate([np.array([k + 1] * n + [0]) for k, n in enumerate(lengths)]).astype(np.uint16)
    return Corpus(tokens, tokens, 2048)


def test_padded_sequences_are_one_document_each_and_predict_every_token_once() -> None:
    lengths = [3, 40, 1, 7, 100, 0, 32, 31, 33]  # 0 and 1 token: nothing, one token to predict
    spec = replace(SPEC, data=replace(SPEC.data, packing="padded", seq_len=32))
    batches = Batches(documents_corpus(lengths), spec, "somebody")
    predicted: dict[int, int] = {}
    pieces = {tuple(row) for batch in batches.valid_batches(50) for row in batch.tolist()}
    for piece in pieces:
        text = [token for token in piece if token != PADDING]
        assert list(piece) == text + [PADDING] * (33 - len(text))
        assert len(set(text) - {0}) == 1 and len(text) >= 2
        predicted[text[0]] = predicted.get(text[0], 0)
    counts = [len(_pieces(np.array([n + 1]), n + 1, 33)[0]) for n in lengths]
    starts, sizes = _pieces(np.cumsum([n + 1 for n in lengths]), sum(n + 1 for n in lengths), 33)
    assert len(starts) == sum(counts) and counts == [1, 2, 1, 1, 4, 0, 1, 1, 2]
    targets = [i for start, size in zip(starts, sizes, strict=True) for i in range(start + 1, start + size)]
    begins = {0, *np.cumsum([n + 1 for n in lengths]).tolist()}
    assert sorted(targets) == [i for i in range(sum(n + 1 for n in lengths)) if i not in begins]
    assert set(predicted) == {k + 1 for k, n in enumerate(lengths) if n}
    rows = torch.cat([batches.batch(t, h) for t in range(1, 5) for h in range(5)])
    assert {tuple(row) for row in rows.tolist()} <= pieces
    other = Batches(documents_corpus(lengths), spec, "other").batch(1, 0)
    assert not torch.equal(batches.batch(1, 0), other)


def test_documents_of_one_token_leave_nothing_to_predict() -> None:
    spec = replace(SPEC, data=replace(SPEC.data, packing="padded"))
    with pytest.raises(DataError, match="no document has two tokens"):
        Batches(documents_corpus([0, 0, 0]), spec, "somebody")
