"""Each rule of a run spec: what is refused, with the line, the value and the limit."""

import subprocess
import sys

import pytest

from p2p_dilocox.errors import SpecError
from p2p_dilocox.recipe import recipes
from p2p_dilocox.runspec import (
    Outer,
    Overlap,
    meaning,
    parse_run,
    total_inner_steps,
)
from p2p_dilocox.settings import Compression

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


def test_a_good_spec_is_read_with_the_defaults_of_its_recipe() -> None:
    spec = parse_run(GOOD)
    assert spec.run.id == "tiny"
    assert spec.model.config["hidden_size"] == 64
    assert spec.inner.lr == 1e-3
    assert spec.outer == Outer(lr=0.7, momentum=0.7)
    assert spec.overlap == Overlap(mode="arrival", keep=0.5)
    assert spec.compression == Compression(
        bits=4, return_bits=4, strong_bits=8, strong_fraction=0.125, gather_up_to=2, group=64, lowrank=64,
        feedback="parameters", gamma=1.0,
    )  # fmt: skip
    assert total_inner_steps(spec) == 15


def test_whole_numbers_are_numbers_and_lists_become_tuples() -> None:
    spec = parse_run(changed("lr = 1e-3", "lr = 1\nbetas = [0, 0.99]"))
    assert (spec.inner.lr, spec.inner.betas) == (1.0, (0.0, 0.99))
    assert all(type(value) is float for value in (spec.inner.lr, *spec.inner.betas))


ONE_KEY = [
    # what is replaced, by what, and the line of the error
    ('id = "tiny"', 'id = "../../tmp/pwn"', 2, 'id = "../../tmp/pwn", must be 1 to 32 of a-z'),
    ('id = "tiny"', 'id = "/abs"', 2, 'id = "/abs", must be'),
    ('id = "tiny"', 'id = "llama-3.2-1b"', 2, 'id = "llama-3.2-1b", must be'),
    ('id = "tiny"', 'id = "a b"', 2, 'id = "a b", must be'),
    ('id = "tiny"', 'id = "ü"', 2, 'id = "\\u00fc", must be'),
    ('id = "tiny"', 'id = ""', 2, 'id = "", must be'),
    ('id = "tiny"', 'id = "a\\u0000b"', 2, 'id = "a\\u0000b", must be'),
    ('id = "tiny"', 'id = "tiny\\n"', 2, 'id = "tiny\\n", must be'),
    ('id = "tiny"', 'id = "-a"', 2, 'id = "-a", must be'),
    ('id = "tiny"', f'id = "{"a" * 33}"', 2, "must be 1 to 32 of a-z"),
    ("outer_steps = 3", "outer_steps = 0", 3, "outer_steps = 0, must be at least 1"),
    ("outer_steps = 3", "outer_steps = 3\nmin_clusters = 0", 4, "min_clusters = 0, must be at least 1"),
    ("outer_steps = 3", "outer_steps = 3\nquorum = 2", 4, "quorum = 2, must be at most min_clusters = 1"),
    ("outer_steps = 3", "outer_steps = 3\nseed = -1", 4, "seed = -1, must be at least 0"),
    ("outer_steps = 3", "outer_steps = 3\nseed = true", 4, "seed = true, must be a whole number"),
    ("outer_steps = 3", "outer_steps = 3\nseed = 1.5", 4, "seed = 1.5, must be a whole number"),
    (
        "outer_steps = 3",
        "outer_steps = 99999999999999999999",
        3,
        "outer_steps = 99999999999999999999, must be a number of at most 64 bits",
    ),
    (
        "outer_steps = 3",
        'outer_steps = 3\nrecipe = "dilocx"',
        4,
        f'recipe = "dilocx", must be one of {", ".join(recipes())}, did you mean',
    ),
    ("outer_steps = 3", "outer_steps = 3\nrecipe = 7", 4, "recipe = 7, must be text in quotes"),
    ("stages = 2", "stages = 0", 6, "stages = 0, must be between 1 and 4096"),
    ("stages = 2", "stages = -1", 6, "stages = -1, must be between 1 and 4096"),
    (
        "stages = 2",
        "stages = 2\ncut = [1, 2]",
        7,
        "cut = [1, 2], must be model.stages = 2 numbers with the sum 4",
    ),
    ("stages = 2", "stages = 2\ncut = [4]", 7, "cut = [4], must be model.stages = 2 numbers with the sum 4"),
    ("stages = 2", "stages = 2\ncut = [-1, 5]", 7, "cut = [-1, 5], must be at least 0, each"),
    ("stages = 2", "stages = 3\ncut = [2, 0, 2]", 7, "only the first and the last may be 0"),
    ("stages = 2", 'stages = 2\ncut = ["1", 3]', 7, 'cut = ["1", 3], must be a list of whole numbers'),
    ("stages = 2", "stages = 2\ncut = 2", 7, "cut = 2, must be a list of whole numbers"),
    ("stages = 2", 'stages = 2\npath = "models/x"', 7, 'path = "models/x", must be left out'),
    (
        "vocab_size = 2048",
        "vocab_size = 2000",
        18,
        "must fit the model's vocab_size = 2000, but has 2048 tokens",
    ),
    (
        "stages = 2",
        "stages = 7",
        6,
        "stages = 7, must be at most 6: 4 layers, the embedding and the head",
    ),
    (
        "vocab_size = 2048",
        "vocab_sizes = 2048",
        8,
        "[model.config] cannot be used: llama has no 'vocab_sizes', did you mean 'vocab_size'?",
    ),
    ("hidden_size = 64", "hidden_size = 65", 8, "The hidden size (65) is not a multiple"),
    ("stages = 2", 'stages = 2\nstart = "weights"', 7, 'start = "weights", must be "seed" without a'),
    ("seq_len = 32", 'seq_len = 32\npacking = "dense"', 20, "must be one of stream, documents, padded"),
    ("seq_len = 32", 'seq_len = 1\npacking = "padded"', 19, "must be at least 2 with data.packing"),
    ("hidden_size = 64", 'hidden_size = "a"', 8, "Field 'hidden_size' expected int, got str"),
    ("hidden_size = 64", "hidden_size = 64\nrms_norm_eps = nan", 8, "must be a table of plain values"),
    ("hidden_size = 64", "hidden_size = 64\nx = 1979-05-27", 8, "must be a table of plain values"),
    ("num_hidden_layers = 4", "num_hidden_layers = 0", 8, "must have a positive num_hidden_layers, got 0"),
    ('model_type = "llama"', 'model_type = "gpt22"', 8, "Unrecognized model identifier: gpt22"),
    ('model_type = "llama"', "", 8, 'has no model_type, a name such as "llama"'),
    ("seq_len = 32", "seq_len = 129", 19, "seq_len = 129, must be at most 128, the maximum positions"),
    ("seq_len = 32", "seq_len = 0", 19, "seq_len = 0, must be at least 1"),
    ("seq_len = 32", "seq_len = 32\nvalid_fraction = 0.0", 20, "valid_fraction = 0.0, must be above 0"),
    ("seq_len = 32", "seq_len = 32\nvalid_fraction = 0.6", 20, "valid_fraction = 0.6, must be above 0"),
    (
        "seq_len = 32",
        'seq_len = 32\nsource = "web"',
        20,
        "must be one of embedded, text, jsonl, parquet, hub",
    ),
    ("seq_len = 32", 'seq_len = 32\nsource = "text"', 18, "data.paths = [], must name at least one file"),
    ("seq_len = 32", 'seq_len = 32\npaths = ["a.txt"]', 20, 'paths = ["a.txt"], must be left out'),
    (
        "seq_len = 32",
        'seq_len = 32\npaths = ["a\\u0000"]',
        20,
        'paths = ["a\\u0000"], must be printable text',
    ),
    ("seq_len = 32", 'seq_len = 32\nsource = "hub"', 18, 'data.name = "", must name a dataset'),
    ("seq_len = 32", 'seq_len = 32\nsubset = "en"', 20, 'subset = "en", must be left out'),
    ("H = 5", "H = 0", 22, "H = 0, must be at least 1 (inner steps per outer step)"),
    ("H = 5", 'H = "5"', 22, 'H = "5", must be a whole number'),
    ("batch_size = 4", "batch_size = 5", 23, "batch_size = 5, must be a multiple of inner.microbatches = 2"),
    ("microbatches = 2", "microbatches = 0", 24, "microbatches = 0, must be at least 1"),
    ("lr = 1e-3", "lr = nan", 25, "lr = nan, must be finite (peak learning rate)"),
    ("lr = 1e-3", "lr = inf", 25, "lr = inf, must be finite"),
    ("lr = 1e-3", "lr = 0.0", 25, "lr = 0.0, must be above 0"),
    ("lr = 1e-3", "lr = -1e-3", 25, "lr = -0.001, must be above 0"),
    ("lr = 1e-3", 'lr = "abc"', 25, 'lr = "abc", must be a number'),
    ("lr = 1e-3", "lr = true", 25, "lr = true, must be a number"),
    ("lr = 1e-3", "lr = 1979-05-27", 25, "lr = 1979-05-27, must be a number"),
    ("lr = 1e-3", "lr = 1e-3\nbetas = [0.9]", 26, "betas = [0.9], must be a list of 2 numbers"),
    ("lr = 1e-3", "lr = 1e-3\nbetas = [0.9, 1.0]", 26, "must be at least 0 and below 1, each"),
    ("lr = 1e-3", "lr = 1e-3\nbetas = [0.9, nan]", 26, "betas = "),
    ("lr = 1e-3", 'lr = 1e-3\nschedule = "zb"', 26, 'schedule = "zb", must be one of 1f1b, gpipe, inter'),
    ("lr = 1e-3", 'lr = 1e-3\nlr_schedule = "wsd"', 26, "must be one of cosine, constant"),
    ("lr = 1e-3", 'lr = 1e-3\nprecision = "fp8"', 26, 'precision = "fp8", must be one of auto, fp32, bf16'),
    ("lr = 1e-3", "lr = 1e-3\nclip_norm = 0", 26, "clip_norm = 0, must be above 0"),
    ("lr = 1e-3", "lr = 1e-3\nwarmup_steps = 16", 26, "warmup_steps = 16, must be at most 15"),
    ("lr = 1e-3", "lr = 1e-3\nlrr = 2", 26, "unknown key lrr in [inner], did you mean 'lr'?"),
    ("lr = 1e-3", "lr = 1e-3\nlr = 2e-3", 26, "a key may be set only once: lr = 2e-3"),
    ("lr = 1e-3", "lr 1e-3", 25, "Expected '=' after a key"),
    ("lr = 1e-3", "lr = 1e-3\n[inner]", 26, "Cannot declare ('inner',) twice"),
    ("lr = 1e-3", "", 21, "[inner] needs lr (peak learning rate)"),
    ("lr = 1e-3", "lr = 1e-3\n[iner]\nH = 5", 26, "unknown table [iner], did you mean 'inner'?"),
    ("lr = 1e-3", 'lr = 1e-3\n["\\u001b[2J"]', 26, 'unknown table ["\\u001b[2J"]'),
    ("lr = 1e-3", "lr = 1e-3\n[outer]\nlr = 0", 27, "lr = 0, must be above 0 (outer learning rate)"),
    ("lr = 1e-3", "lr = 1e-3\n[outer]\nmomentum = 1.0", 27, "momentum = 1.0, must be at least 0 and below 1"),
    ("lr = 1e-3", "lr = 1e-3\n[outer]\nnesterov = 1", 27, "nesterov = 1, must be true or false"),
    (
        "lr = 1e-3",
        'lr = 1e-3\n[overlap]\nmode = "late"',
        27,
        'mode = "late", must be one of arrival, delay, boundary, eager, paper, none',
    ),
    ("lr = 1e-3", "lr = 1e-3\n[overlap]\nkeep = 1.5", 27, "keep = 1.5, must be between 0 and 1"),
    (
        "lr = 1e-3",
        'lr = 1e-3\n[overlap]\nmode = "paper"\nkeep = 0.5',
        28,
        'keep = 0.5, must be 0 with overlap.mode = "paper"',
    ),
    (
        "lr = 1e-3",
        "lr = 1e-3\n[compression]\nbits = 5",
        27,
        "bits = 5, must be one of 2, 3, 4, 8, 16, 32, 64",
    ),
    ("lr = 1e-3", "lr = 1e-3\n[compression]\nreturn_bits = 1", 27, "return_bits = 1, must be one of 2, 3, 4"),
    (
        "lr = 1e-3",
        "lr = 1e-3\n[compression]\ngroup = 0",
        27,
        "group = 0, must be a multiple of 8 from 8 to 65528",
    ),
    ("lr = 1e-3", "lr = 1e-3\n[compression]\nlowrank = -1", 27, "lowrank = -1, must be between 0 and 65536"),
    ("lr = 1e-3", "lr = 1e-3\n[compression]\ngamma = 2", 27, "gamma = 2, must be between 0 and 1"),
    (
        "lr = 1e-3",
        'lr = 1e-3\n[compression]\nfeedback = "ef21"',
        27,
        'feedback = "ef21", must be one of local, parameters, paper, none',
    ),
    ("lr = 1e-3", "lr = 1e-3\n[deadlines]\nround_s = 0", 27, "round_s = 0, must be between 0.1 and 86400"),
    ("lr = 1e-3", "lr = 1e-3\n[checkpoint]\nevery = 0", 27, "every = 0, must be at least 1"),
    ("lr = 1e-3", "lr = 1e-3\n[eval]\nbatches = 0", 27, "batches = 0, must be at least 1"),
    (
        "lr = 1e-3",
        "lr = 1e-3\n[[eval]]\nbatches = 1",
        26,
        'eval = [{"batches": 1}], must be a table: write [eval]',
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), ONE_KEY, ids=[case[1][-40:] for case in ONE_KEY])
def test_one_mistake_is_one_error_with_its_line(old: str, new: str, line: int, message: str) -> None:
    error = error_of(changed(old, new))
    assert error.startswith(f"run.toml line {line}: ")
    assert message in error
    assert "\n" not in error
    assert error.isprintable()


def test_all_mistakes_are_shown_at_once_in_the_order_of_the_file() -> None:
    text = (
        changed("H = 5", "H = 0")
        .replace("lr = 1e-3", "lr = nan\nfoo = 1")
        .replace("stages = 2", "stages = 0")
    )
    assert [line.split(",")[0] for line in error_of(text).splitlines()] == [
        "run.toml line 6: stages = 0",
        "run.toml line 22: H = 0",
        "run.toml line 25: lr = nan",
        "run.toml line 26: unknown key foo in [inner]",
    ]


def test_a_rule_between_keys_is_not_reported_for_a_value_that_is_wrong_by_itself() -> None:
    error = error_of(changed("microbatches = 2", "microbatches = -2"))
    assert error == (
        "run.toml line 24: microbatches = -2, must be at least 1 "
        "(equal pieces of a batch that fill the pipeline; a cluster may choose its own)"
    )


def test_missing_tables_are_named_with_what_they_need() -> None:
    assert error_of("").splitlines() == [
        "run.toml: the table [run] is missing; it needs id, outer_steps",
        "run.toml: the table [inner] is missing; it needs H, batch_size, lr",
        'run.toml: [model.config] must be set (or model.path), for example { model_type = "llama", ... }',
    ]


def test_a_table_that_is_a_value_is_one_error() -> None:
    text = 'run = "tiny"\n' + GOOD.replace('[run]\nid = "tiny"\nouter_steps = 3\n', "")
    assert error_of(text) == 'run.toml line 1: run = "tiny", must be a table: write [run]'


def test_an_error_of_an_inline_table_has_its_line() -> None:
    text = GOOD.replace("[inner]\nH = 5\nbatch_size = 4\nmicrobatches = 2\nlr = 1e-3\n", "")
    text = "inner = { H = 0, batch_size = 4, lr = 1e-3, microbatches = 2 }\n" + text
    assert error_of(text).startswith("run.toml line 1: inner.H = 0, must be at least 1")


def test_lines_are_right_behind_strings_and_arrays_of_several_lines() -> None:
    text = changed("stages = 2", 'cut = [\n  2, # ]\n  2,\n]\nstages = 2\npath = """\n[x]\nH = 1\n"""\n')
    text = text.replace("H = 5", '"H" = 0  # H = 7')
    number = text.splitlines().index('"H" = 0  # H = 7') + 1
    assert f"run.toml line {number}: H = 0, must be at least 1" in error_of(text)


def test_dotted_keys_have_lines() -> None:
    text = "inner.H = 0\ninner.batch_size = 4\ninner.lr = 1.0\ninner.microbatches = 2\n"
    text += GOOD.replace("[inner]\nH = 5\nbatch_size = 4\nmicrobatches = 2\nlr = 1e-3\n", "")
    assert error_of(text).startswith("run.toml line 1: ")


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    assert "run.toml" in error_of("x = " + "[" * 5000)


@pytest.mark.parametrize(
    ("mode", "outer", "keep"),
    [
        ("boundary", Outer(lr=0.5, momentum=0.7), 0.5),
        ("paper", Outer(lr=0.5, momentum=0.5), 0.0),
        ("none", Outer(lr=0.7, momentum=0.7), 0.0),
    ],
)
def test_another_overlap_brings_its_own_stable_outer_optimizer(mode: str, outer: Outer, keep: float) -> None:
    spec = parse_run(GOOD + f'[overlap]\nmode = "{mode}"\n')
    assert (spec.outer, spec.overlap) == (outer, Overlap(mode=mode, keep=keep))


def test_a_recipe_keeps_its_outer_optimizer_if_its_own_overlap_is_written_down() -> None:
    spec = parse_run(
        changed("outer_steps = 3", 'outer_steps = 3\nrecipe = "diloco"') + '[overlap]\nmode = "none"\n'
    )
    assert spec.outer == Outer(lr=0.7, momentum=0.9)


def test_single_keys_override_a_recipe() -> None:
    spec = parse_run(GOOD + "[outer]\nlr = 0.6\n[compression]\nreturn_bits = 8\n")
    assert (spec.outer.lr, spec.outer.momentum) == (0.6, 0.7)
    assert (spec.compression.bits, spec.compression.return_bits) == (4, 8)


@pytest.mark.parametrize(("lowrank", "gamma"), [(0, 1.0), (8, 0.5)])
def test_gamma_follows_the_rank_unless_it_is_set(lowrank: int, gamma: float) -> None:
    text = GOOD + f'[compression]\nfeedback = "local"\nlowrank = {lowrank}\n'
    assert parse_run(text).compression.gamma == gamma
    assert parse_run(text + "gamma = 0.25\n").compression.gamma == 0.25


def test_every_setting_says_what_it_means() -> None:
    spec = parse_run(GOOD)
    for table in spec.__slots__:
        for key in getattr(spec, table).__slots__:
            assert meaning(table, key)


def test_importing_the_run_spec_does_not_import_torch() -> None:
    code = (
        "import sys, p2p_dilocox.runspec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
