"""The tables of run.toml as frozen dataclasses: every setting with its type, range, default and meaning.

One field is one key. `Annotated` carries what `runspec.parse_run` checks (a `Rule`) and the sentence that
errors and the docs show. Rules between several keys are in consistency.py."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from p2p_dilocox.placement import SCHEDULES

__all__ = [
    "Adapt", "Checkpoint", "Compression", "Data", "Deadlines", "Eval", "Inner", "Local", "Model", "Outer",
    "Overlap", "Rule", "Run", "RunSpec", "Schedule", "adapted_inner_steps", "first_inner_steps",
    "inner_steps_before", "is_finite", "most_inner_steps", "tokens_per_outer_step", "total_inner_steps",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """`limit` completes the sentence "H = 0, must be ..."."""

    limit: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Rule:
    return Rule(f"at least {low:g}", lambda value: value >= low)


def above(low: float) -> Rule:
    return Rule(f"above {low:g}", lambda value: value > low)


def between(low: float, high: float) -> Rule:
    return Rule(f"between {low:g} and {high:g}", lambda value: low <= value <= high)


def below_one() -> Rule:
    return Rule("at least 0 and below 1", lambda value: 0 <= value < 1)


def one_of(*choices: object) -> Rule:
    return Rule(f"one of {', '.join(map(str, choices))}", lambda value: value in choices)


def all_values(rule: Rule) -> Rule:
    return Rule(f"{rule.limit}, each", lambda values: all(rule.holds(v) for v in values))


def _whole_bytes(group: int) -> bool:
    return 8 <= group <= 65528 and group % 8 == 0


fraction = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
printable = Rule("printable text", lambda text: text.isprintable())
CLUSTER_ID = re.compile(r"[a-z2-7]{16}")
RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """[run]"""

    id: Annotated[
        str,
        Rule("1 to 32 of a-z, 0-9 and -, not starting with -", lambda text: bool(RUN_ID.fullmatch(text))),
        "name of the run, in DHT keys and directory names",
    ]
    recipe: Annotated[str, "method of recipe.py that sets the defaults of outer, overlap, compression"] = (
        "dilocox"
    )
    seed: Annotated[
        int, at_least(0), "start of all random numbers: initial parameters, data, low-rank bases"
    ] = 0
    members: Annotated[
        tuple[str, ...],
        all_values(Rule("16 of a-z and 2-7", lambda text: bool(CLUSTER_ID.fullmatch(text)))),
        "cluster ids that may take part; empty: every cluster that has the link",
    ] = ()
    outer_steps: Annotated[int, at_least(1), "outer steps until the run is complete"]
    min_clusters: Annotated[int, at_least(1), "clusters that must be there before the first outer step"] = 1
    quorum: Annotated[int, at_least(1), "clusters without which no outer step is taken"] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """[model]: either `config` or `path`."""

    config: Annotated[dict[str, Any], "Hugging Face config, with model_type"] = field(default_factory=dict)
    path: Annotated[str, printable, "directory with a config.json, on every cluster"] = ""
    start: Annotated[
        str, one_of("seed", "weights"), "first parameters: drawn, or read from the safetensors of model.path"
    ] = "seed"
    stages: Annotated[int, between(1, 4096), "contiguous slices of layers, the same for all clusters"] = 1
    cut: Annotated[
        tuple[int, ...],
        all_values(at_least(0)),
        "layers of each stage, 0: embedding or head alone; empty: balanced by parameters and compute",
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """[data]. Relative paths start at the directory in which a peer is started."""

    source: Annotated[
        str, one_of("embedded", "text", "jsonl", "parquet", "hub"), "where the text comes from"
    ] = "embedded"
    paths: Annotated[
        tuple[str, ...], all_values(printable), "files, or directories of files, for text, jsonl and parquet"
    ] = ()
    name: Annotated[str, printable, "Hugging Face datasets name, or the directory of one, for hub"] = ""
    subset: Annotated[str, printable, "configuration of that dataset; empty: its default"] = ""
    text_field: Annotated[
        str, printable, "field or column that holds the text, for jsonl, parquet and hub"
    ] = "text"
    tokenizer: Annotated[str, printable, "embedded, or a directory with a tokenizer.json"] = "embedded"
    seq_len: Annotated[int, at_least(1), "tokens of one sequence"] = 128
    packing: Annotated[
        str,
        one_of("stream", "documents", "padded"),
        "stream: windows of the text; documents: the same, and each token sees its own document only; "
        "padded: one document, or a piece of it, per sequence",
    ] = "stream"
    order: Annotated[
        str,
        one_of("random", "shards"),
        "random: each cluster draws windows of its own; shards: clusters share the data out, and see all of "
        "it before any part twice",
    ] = "random"
    valid_fraction: Annotated[
        float, Rule("above 0 and at most 0.5", lambda value: 0 < value <= 0.5), "part held out for validation"
    ] = 0.05
    max_tokens: Annotated[int, at_least(2), "tokens read at most; an endless stream is cut here"] = (
        100_000_000
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """[inner]: AdamW on a cluster's own data."""

    H: Annotated[int, at_least(1), "inner steps per outer step"]
    batch_size: Annotated[int, at_least(1), "sequences per inner step and cluster"]
    microbatches: Annotated[
        int, at_least(1), "equal pieces of a batch that fill the pipeline; a cluster may choose its own"
    ] = 1
    schedule: Annotated[
        str, one_of(*SCHEDULES), "order of microbatches in the pipeline; a cluster may choose its own"
    ] = "1f1b"
    lr: Annotated[float, above(0), "peak learning rate"]
    betas: Annotated[tuple[float, float], all_values(below_one()), "decay of AdamW's two moments"] = (
        0.9,
        0.95,
    )
    eps: Annotated[float, above(0), "AdamW's epsilon"] = 1e-8
    weight_decay: Annotated[float, at_least(0), "decoupled, times the learning rate"] = 0.1
    warmup_steps: Annotated[int, at_least(0), "inner steps of linear warm-up"] = 0
    lr_schedule: Annotated[str, one_of("cosine", "constant"), "learning rate after the warm-up"] = "cosine"
    final_lr_fraction: Annotated[float, between(0, 1), "last learning rate of cosine, of the peak"] = 0.1
    clip_norm: Annotated[float, above(0), "largest norm of the whole model's gradient"] = 1.0
    checkpointing: Annotated[
        bool, "keep only the input of each layer, and compute it again for the gradient: less memory"
    ] = False
    precision: Annotated[
        str, one_of("auto", "fp32", "bf16"), "of forward and backward; auto: bf16 on CUDA, fp32 on CPU"
    ] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """[outer]: SGD on averaged pseudo-gradients, as torch.optim.SGD. Defaults come from the recipe."""

    lr: Annotated[float, above(0), "outer learning rate"]
    momentum: Annotated[float, below_one(), "outer momentum"]
    nesterov: Annotated[bool, "Nesterov momentum"] = True
    average: Annotated[
        str,
        one_of("pseudo-gradient", "gradient"),
        "what clusters average; gradient: the outer step is one of AdamW, with the settings of [inner]",
    ] = "pseudo-gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """[local]: outer steps of each cluster alone, on its own movement. Defaults come from the recipe."""

    every: Annotated[int, at_least(0), "inner steps between local outer steps; 0: none"] = 0
    lr: Annotated[float, above(0), "learning rate of a local outer step"] = 0.7
    momentum: Annotated[float, below_one(), "Nesterov momentum of the local outer steps"] = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """[schedule]: what of the model a round averages. Defaults come from the recipe."""

    fragments: Annotated[int, between(1, 4096), "parts of the model that take turns, one per outer step"] = 1
    order: Annotated[
        str, one_of("strided", "sequential"), "a fragment has every n-th layer, or neighbours"
    ] = "strided"
    fraction: Annotated[
        float,
        fraction,
        "part of the parameters that a round draws",
    ] = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """[overlap]: communication behind computation. Defaults come from the recipe."""

    mode: Annotated[
        str,
        one_of("arrival", "delay", "boundary", "eager", "paper", "none"),
        "when the average of a round is applied",
    ] = "none"
    keep: Annotated[
        float, between(0, 1), "part of the movement made meanwhile that a cluster keeps (beta; delay: alpha)"
    ] = 0.0
    delay: Annotated[int, at_least(1), "inner steps after which an average is applied, with delay"] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """[compression] of pseudo-gradients. Defaults come from the recipe."""

    bits: Annotated[
        int, one_of(2, 3, 4, 8, 16, 32, 64), "per value sent to the reducer; 16 to 64: plain floats"
    ]
    return_bits: Annotated[
        int,
        one_of(2, 3, 4, 8, 16, 32, 64),
        "per value of the average sent back; as bits where these are set",
    ]
    strong_bits: Annotated[
        int, one_of(2, 3, 4, 8, 16, 32, 64), "per value of the strongest directions, at least this much back"
    ]
    strong_fraction: Annotated[float, between(0, 1), "part of the directions that are the strongest"]
    gather_up_to: Annotated[
        int, between(0, 256), "up to so many clusters send all to all, without a reducer that encodes again"
    ]
    group: Annotated[
        int, Rule("a multiple of 8 from 8 to 65528", _whole_bytes), "values that share one scale"
    ]
    lowrank: Annotated[int, between(0, 65536), "directions kept of each weight matrix (r); 0: all, dense"]
    factor_embeddings: Annotated[
        bool, "whether embeddings and output head are matrices like others, or sent whole"
    ] = True
    top: Annotated[float, fraction, "part of the values that is sent, the largest of each 4096"] = 1.0
    return_top: Annotated[float, fraction, "the same of an average that comes back"] = 1.0
    feedback: Annotated[
        str,
        one_of("local", "parameters", "paper", "none"),
        "what becomes of the part a message could not say",
    ]
    gamma: Annotated[float, between(0, 1), "part of the error buffer added to the next pseudo-gradient"]

    def never_factored(self, embedding_names: frozenset[str]) -> frozenset[str]:
        """Tensors that are sent whole whatever their shape. embedding_names: with the output head."""
        return frozenset() if self.factor_embeddings else embedding_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapt:
    """[adapt]: rank and H while the run goes on, Algorithm 3 of DiLoCoX. Defaults come from the recipe."""

    rule: Annotated[
        str, one_of("none", "band", "literal"), "how the rank follows its use; none: rank and H are pinned"
    ] = "none"
    window: Annotated[int, at_least(1), "outer steps that a rank is judged by (c)"] = 5
    energy: Annotated[float, fraction, "part of an average's energy that its effective rank has"] = 0.95
    overlap: Annotated[float, fraction, "part of an outer step that a round may take (f)"] = 0.5
    H_min: Annotated[
        int, at_least(0), "least inner steps per outer step; 0: a quarter of inner.H, with literal 1"
    ] = 0
    H_max: Annotated[
        int, at_least(0), "most inner steps per outer step; 0: four times inner.H, with literal inner.H"
    ] = 0
    startup_steps: Annotated[int, at_least(0), "outer steps of the start-up phase, with any rule"] = 0
    startup_H: Annotated[int, at_least(1), "inner steps per outer step of the start-up phase"] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """[deadlines]. All other time limits of a round are derived from this one."""

    round_s: Annotated[float, between(0.1, 86400), "seconds a round may take"] = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """[checkpoint]"""

    every: Annotated[int, at_least(1), "outer steps between checkpoints"] = 10
    keep: Annotated[int, at_least(1), "newest checkpoints kept on disk"] = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """[eval] of the anchor on the held-out part."""

    every: Annotated[int, at_least(1), "outer steps between validations"] = 1
    batches: Annotated[int, at_least(1), "batches of batch_size sequences per validation"] = 8
    average: Annotated[int, at_least(1), "anchors (k) whose mean is validated as well; 1: none"] = 1
    average_every: Annotated[int, at_least(1), "outer steps (T) between two of these anchors"] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A run.toml that passed all checks."""

    run: Run
    model: Model
    data: Data
    inner: Inner
    local: Local
    outer: Outer
    schedule: Schedule
    overlap: Overlap
    compression: Compression
    adapt: Adapt
    deadlines: Deadlines = Deadlines()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()


def tokens_per_outer_step(spec: RunSpec) -> int:
    """Tokens that a cluster trains on in one outer step: the largest weight its contribution may have."""
    return most_inner_steps(spec) * spec.inner.batch_size * spec.data.seq_len


def first_inner_steps(spec: RunSpec, t: int) -> int:
    """H of outer step t, before anything has adapted it."""
    return spec.adapt.startup_H if t <= spec.adapt.startup_steps else spec.inner.H


def adapted_inner_steps(spec: RunSpec) -> tuple[int, int]:
    """The least and the largest H after the start-up phase."""
    adapt, H = spec.adapt, spec.inner.H
    if adapt.rule == "none":
        return H, H
    least, most = (1, H) if adapt.rule == "literal" else (math.ceil(H / 4), 4 * H)
    return adapt.H_min or least, adapt.H_max or most


def most_inner_steps(spec: RunSpec) -> int:
    """The largest H that an outer step may have."""
    adapt, (_, most) = spec.adapt, adapted_inner_steps(spec)
    return max(most, adapt.startup_H) if adapt.startup_steps else most


def inner_steps_before(spec: RunSpec, t: int) -> int:
    """Inner steps of all outer steps before t. An adapted H does not count here: learning rates follow the
    outer step, so that a cluster needs to know nothing of the past."""
    startup = min(t - 1, spec.adapt.startup_steps)
    return startup * spec.adapt.startup_H + (t - 1 - startup) * spec.inner.H


def total_inner_steps(spec: RunSpec) -> int:
    """Inner steps of the whole run, the length of the learning rate schedule."""
    return inner_steps_before(spec, spec.run.outer_steps + 1)


def is_finite(value: float) -> bool:
    """False for NaN, infinities and whole numbers beyond 64 bits, which TOML does not promise to carry."""
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)
