"""Run specs and what they name on this machine: run files, models, tokenizers."""

import json
from pathlib import Path

import pytest

from p2p_dilocox.errors import SpecError
from p2p_dilocox.runspec import RunSpec, load_run_file, parse_run, read_run_text, shipped_runs, warnings_for

GOOD = """\
[run]
id = "tiny"
outer_steps = 3

[model]
stages = 2

[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 128

[data]
seq_len = 32

[inner]
H = 5
batch_size = 4
microbatches = 2
lr = 1e-3
"""


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def error_of(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_run(text)
    return str(caught.value)


def test_a_tokenizer_directory_that_is_too_large_for_the_model_is_refused(tmp_path: Path) -> None:
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 4000}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = changed("seq_len = 32", f"seq_len = 32\ntokenizer = {json.dumps(str(tmp_path))}")
    error = error_of(text)
    assert error.startswith("run.toml line 20: tokenizer = ")
    assert "must fit the model's vocab_size = 2048, but has 4001 tokens" in error


def test_a_model_directory_is_checked_like_an_inline_config(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 2,
        "n_positions": 16,
        "resid_pdrop": 0.0,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"vocab_size": 2048, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    )
    start, rest = GOOD.split("[model]")
    text = f"{start}[model]\nstages = 6\npath = {json.dumps(str(tmp_path))}\n[data]{rest.split('[data]')[1]}"
    text = text.replace("microbatches = 2", "microbatches = 6").replace("batch_size = 4", "batch_size = 6")
    assert [line.split(": ", 1)[1] for line in error_of(text).splitlines()] == [
        "stages = 6, must be at most 5: 3 layers, the embedding and the head",
        "seq_len = 32, must be at most 16, the maximum positions of the model",
    ]


def test_what_is_not_on_this_machine_is_a_warning(tmp_path: Path) -> None:
    start, rest = GOOD.split("[model]")
    path = json.dumps(str(tmp_path / "nowhere"))
    text = f"{start}[model]\nstages = 2\npath = {path}\n[data]{rest.split('[data]')[1]}"
    (warning,) = warnings_for(parse_run(text))
    assert "has no config.json on this machine" in warning
    spec = parse_run(changed("seq_len = 32", f"seq_len = 32\ntokenizer = {path}"))
    (warning,) = warnings_for(spec)
    assert "no tokenizer.json there" in warning


def paper(lr: float, momentum: float) -> RunSpec:
    return parse_run(GOOD + f'[overlap]\nmode = "paper"\n[outer]\nlr = {lr}\nmomentum = {momentum}\n')


def test_a_learning_rate_that_will_diverge_is_a_warning() -> None:
    assert warnings_for(paper(0.5, 0.5)) == []
    (warning,) = warnings_for(paper(0.7, 0.9))
    assert warning.startswith("outer.lr = 0.7 with momentum 0.9 is above 0.25")
    assert warnings_for(parse_run(GOOD + "[outer]\nlr = 0.7\nmomentum = 0.9\n")) == []


@pytest.mark.parametrize("name", shipped_runs())
def test_shipped_runs_are_valid(name: str) -> None:
    assert warnings_for(load_run_file(name)) == []


def test_the_demo_is_shipped() -> None:
    assert load_run_file("demo").run.id == "demo"
    assert parse_run(read_run_text(Path("demo"))) == load_run_file("demo")


def test_a_name_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(SpecError, match=r'no shipped run is called "dem"; there are .*demo'):
        load_run_file("dem")


def test_files_that_cannot_be_read_are_errors_with_their_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.toml: no such file"):
        load_run_file(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="is a directory; a run.toml file is needed"):
        load_run_file(tmp_path)
    (tmp_path / "latin.toml").write_bytes(GOOD.encode() + "# \xe9\n".encode("latin-1"))
    with pytest.raises(SpecError, match=r"latin\.toml line 26: byte 0xe9 is not UTF-8"):
        load_run_file(tmp_path / "latin.toml")
    with pytest.raises(SpecError, match="cannot be read"):
        load_run_file(tmp_path / "a\0b.toml")


def test_an_editor_on_windows_does_not_change_what_is_signed(tmp_path: Path) -> None:
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_run_text(tmp_path / "windows.toml") == GOOD


def test_errors_carry_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(changed("H = 5", "H = 0"))
    with pytest.raises(SpecError, match=r"^mine\.toml line 22: H = 0"):
        load_run_file(tmp_path / "mine.toml")
