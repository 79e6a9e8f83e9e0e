"""The run spec: `run.toml` as frozen dataclasses. Every cluster of a run trains by the same one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Checkpoint", "Compression", "Data", "Deadlines", "Eval", "Inner", "Model", "Outer", "Overlap", "Run", "RunSpec",
    "load_run_file", "parse_run",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    id: str
    recipe: str = "dilocox"
    seed: int = 0
    outer_steps: int
    min_clusters: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    config: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    stages: int = 1
    cut: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    source: str = "embedded"
    paths: tuple[str, ...] = ()
    name: str = ""
    subset: str = ""
    text_field: str = "text"
    tokenizer: str = "embedded"
    seq_len: int = 128
    valid_fraction: float = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    H: int
    batch_size: int
    microbatches: int = 1
    schedule: str = "1f1b"
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 0
    lr_schedule: str = "cosine"
    final_lr_fraction: float = 0.1
    clip_norm: float = 1.0
    precision: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    lr: float
    momentum: float
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    mode: str
    keep: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    bits: int
    return_bits: int
    group: int
    lowrank: int
    feedback: str
    gamma: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    round_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    every: int = 10
    keep: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    every: int = 1
    batches: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    run: Run
    model: Model
    data: Data
    inner: Inner
    outer: Outer
    overlap: Overlap
    compression: Compression
    deadlines: Deadlines = Deadlines()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()


def parse_run(text: str, *, name: str = "run.toml") -> RunSpec: ...


def load_run_file(path: Path) -> RunSpec: ...
