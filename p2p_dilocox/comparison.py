"""Recipes side by side: the same model, data, tokens and inner optimizer, on simulated links. One cell is one
recipe with one seed; its result is a file, so that a comparison that was interrupted goes on where it was.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from p2p_dilocox.data import load_tokens
from p2p_dilocox.errors import SpecError, StateError
from p2p_dilocox.recipe import recipes
from p2p_dilocox.runspec import RunSpec, parse_run_as, total_inner_steps
from p2p_dilocox.simulation import (
    Link,
    Place,
    Point,
    Simulation,
    Together,
    drawn_absences,
    never_differ,
    warm_start,
)
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.suggest import did_you_mean
from p2p_dilocox.toml_text import toml_text
from p2p_dilocox.traffic import fp16_bytes, model_tensors

__all__ = [
    "Cell", "Method", "Result", "Setup", "Summary", "cell_file", "keep_result", "prepare", "read_cell",
    "result_of", "run_cell", "summarise",
]  # fmt: skip

_VALIDATIONS = 12
# Of a cell's file, of what a simulation gives, and of the settings that have a default.
_FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class Method:
    """A recipe as a comparison runs it. overrides: tables of a run spec."""

    recipe: str
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = [
            f"{t}.{k} = {json.dumps(v)}" for t, keys in self.overrides.items() for k, v in keys.items()
        ]
        return f"{self.recipe}: {', '.join(changed)}" if changed else self.recipe


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all cells share.

    text: a run.toml, whose method is replaced; name: its file, for errors. methods: by name; any other name
    is that of a recipe.
    inner_steps: of each cluster. warm_steps: of an AllReduce at every step, which all go on from.
    allreduce_steps: how many inner steps as long an fp16 AllReduce of the model takes, which fixes the links.
    31 is the paper's OPT-1.3B at 1 Gbit/s (arXiv 2506.21263, Table 1: 23,880 tokens/s when nothing waits, 745
    with an AllReduce at every step).
    away: the part of its time that a cluster is gone, as after kill -9, `away_steps` inner steps at a time on
    average; the first, which measures the losses, never is.
    """

    text: str
    name: str = "run.toml"
    methods: Mapping[str, Method] = field(default_factory=dict)
    clusters: int = 4
    inner_steps: int = 384
    warm_steps: int = 0
    allreduce_steps: float = 31.0
    away: float = 0.0
    away_steps: float = 50.0

    def method(self, name: str) -> Method:
        return self.methods.get(name) or Method(recipe=name)

    def spec(self, name: str, seed: int) -> RunSpec:
        """Raises SpecError."""
        if name not in self.methods and name not in recipes():
            known = sorted({*self.methods, *recipes()})
            guess = did_you_mean(name, known) or "."
            raise SpecError(
                f"{name} is no method of {self.name}, and no recipe{guess} Known are {', '.join(known)}"
            )
        method = self.method(name)
        spec = parse_run_as(
            self.text, method.recipe, seed=seed, inner_steps=self.inner_steps, overrides=method.overrides,
            name=f"{self.name}, methods.{name}" if name in self.methods else self.name,
        )  # fmt: skip
        every = max(1, spec.run.outer_steps // _VALIDATIONS)
        return replace(spec, eval=replace(spec.eval, every=every))

    def run_text(self, name: str, seed: int) -> str:
        """The same as a run.toml for real clusters. Raises SpecError."""
        spec = self.spec(name, seed)
        return toml_text(asdict(replace(spec, run=replace(spec.run, min_clusters=self.clusters))))

    def link(self, num_parameters: int) -> Link:
        """An inner step takes 1 s."""
        bits = 8 * fp16_bytes(num_parameters, self.clusters)
        mbps = max(1e-6, bits * 1e-6 / self.allreduce_steps)
        return Link(uplink_mbps=mbps, downlink_mbps=mbps, latency_s=0.02)

    def places(self, seed: int, num_parameters: int) -> list[Place]:
        """Of all clusters; who is away when is the same for all methods."""
        link, longest_s = self.link(num_parameters), 2 * self.inner_steps * (1 + self.allreduce_steps)
        shares = [0.0] + [self.away] * (self.clusters - 1)
        return [
            Place(
                cluster_id=f"cluster{number}",
                link=link,
                absences=drawn_absences(f"{seed} {number}", share, self.away_steps, longest_s),
            )
            for number, share in enumerate(shares)
        ]


@dataclass(frozen=True)
class Cell:
    """recipe: the name of a method."""

    recipe: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one cell came to. Losses in nats per token; bytes are payload that one cluster sends.

    settings: the method in full. averaged_loss: of the mean of the last anchors, if the method has one.
    compression_vs_fp16: bytes of an fp16 AllReduce at every inner step over ours; from_local_steps and
    from_coding are its two factors. H: of the run, where it varies. points: the validations.
    """

    recipe: str
    settings: str
    seed: int
    val_loss: float
    averaged_loss: float | None
    start_loss: float
    tokens: int
    outer_steps: int
    H: int
    wire_bytes_per_outer_step: float
    compression_vs_fp16: float
    from_local_steps: float
    from_coding: float
    utilisation: float
    tokens_per_s: float
    seconds: float
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One recipe over its seeds: `mean` of everything, and how far apart the losses are.

    gap: of the loss to `allreduce` of the same seed, relative, mean over the seeds that both were run with;
    gap_spread: how far apart these are. None if there are none.
    """

    recipe: str
    seeds: int
    mean: Result
    loss_spread: float
    gap: float | None
    gap_spread: float | None


def prepare(setup: Setup, out: Path) -> None:
    """Tokens and the warm start, which cells then only read. Raises DilocoxError."""
    spec = _start_spec(setup)
    corpus = load_tokens(spec, out / "tokens")
    if setup.warm_steps and not (file := _start_file(setup, out)).exists():
        state = warm_start(spec, corpus, setup.warm_steps)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)


def read_cell(setup: Setup, cell: Cell, out: Path, link: str = "") -> Result | None:
    """What an earlier call left in `out`, None if there is nothing. link: the rate of real links, "" for
    simulated ones. Raises StateError for a damaged file."""
    file = cell_file(setup, cell, out, link)
    return replace(_read(file), recipe=cell.recipe) if file.exists() else None


def keep_result(setup: Setup, cell: Cell, out: Path, result: Result, link: str = "") -> None:
    """For `read_cell`."""
    file = cell_file(setup, cell, out, link)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(asdict(result), indent=1) + "\n")


def run_cell(
    setup: Setup, cell: Cell, out: Path, progress: Callable[[int, int], None] = lambda _done, _of: None
) -> Result:
    """Simulate it and keep its result in `out`. progress: inner steps done, of all clusters, and in all."""
    spec = setup.spec(cell.recipe, cell.seed)
    start = load_file(_start_file(setup, out)) if setup.warm_steps else None
    places = setup.places(cell.seed, model_tensors(spec).num_parameters)
    kind = Together if never_differ(spec) and not setup.away else Simulation
    simulation = kind(spec, places, load_tokens(spec, out / "tokens"), start=start)
    total = setup.clusters * total_inner_steps(spec)
    simulation.on_step = lambda done: progress(done, total)
    simulation.run()
    result = result_of(
        setup, cell, simulation.points, tokens=simulation.tokens, sent_bytes=simulation.sent_bytes,
        utilisation=simulation.utilisation, seconds=simulation.seconds,
    )  # fmt: skip
    keep_result(setup, cell, out, result)
    return result


def result_of(
    setup: Setup, cell: Cell, points: Sequence[Point], *, tokens: int, sent_bytes: float, utilisation: float,
    seconds: float,
) -> Result:  # fmt: skip
    """tokens: of all clusters. sent_bytes: that one has sent in all."""
    spec = setup.spec(cell.recipe, cell.seed)
    fp16 = fp16_bytes(model_tensors(spec).num_parameters, setup.clusters)
    sent, steps = sent_bytes / spec.run.outer_steps, total_inner_steps(spec) / spec.run.outer_steps
    return Result(
        recipe=cell.recipe, settings=str(setup.method(cell.recipe)), seed=cell.seed,
        val_loss=points[-1].val_loss, averaged_loss=points[-1].mean_val_loss, start_loss=points[0].val_loss,
        tokens=tokens, outer_steps=spec.run.outer_steps, H=spec.inner.H, wire_bytes_per_outer_step=sent,
        compression_vs_fp16=fp16 * steps / sent if sent else 0.0, from_local_steps=steps,
        from_coding=fp16 / sent if sent else 0.0, utilisation=utilisation, tokens_per_s=tokens / seconds,
        seconds=seconds, points=list(points),
    )  # fmt: skip


def summarise(results: Sequence[Result]) -> list[Summary]:
    """One per recipe, the smallest loss first."""
    by_recipe: dict[str, list[Result]] = {}
    for result in results:
        by_recipe.setdefault(result.recipe, []).append(result)
    reference = {result.seed: result.val_loss for result in by_recipe.get("allreduce", [])}
    found = []
    for recipe, of in by_recipe.items():
        gaps = [r.val_loss / reference[r.seed] - 1.0 for r in of if r.seed in reference]
        summary = Summary(
            recipe=recipe, seeds=len(of), mean=_mean(of), loss_spread=_spread([r.val_loss for r in of]),
            gap=statistics.fmean(gaps) if gaps else None, gap_spread=_spread(gaps) if gaps else None,
        )  # fmt: skip
        found.append(summary)
    return sorted(found, key=lambda summary: summary.mean.val_loss)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _mean(results: Sequence[Result]) -> Result:
    """Of the numbers of several seeds; the points too, validation by validation."""
    first, values = results[0], [asdict(result) for result in results]
    mean: dict[str, Any] = {
        key: statistics.fmean(v[key] for v in values) if isinstance(value, float) else value
        for key, value in values[0].items()
    }
    points = [
        Point(
            same[0].t,
            statistics.fmean(p.seconds for p in same),
            same[0].tokens,
            statistics.fmean(p.sent_bytes for p in same),
            statistics.fmean(p.val_loss for p in same),
            None,
        )
        for same in zip(*(r.points for r in results), strict=False)
    ]
    return Result(**{**mean, "recipe": first.recipe, "points": points})


def _start_spec(setup: Setup) -> RunSpec:
    """The warm start has the batches of all clusters together, no method's settings, and one seed: cells of
    another have other batches afterwards."""
    spec = parse_run_as(setup.text, "allreduce", seed=0, inner_steps=setup.warm_steps or setup.inner_steps)
    batch_size = setup.clusters * spec.inner.batch_size
    return replace(spec, inner=replace(spec.inner, batch_size=batch_size, lr_schedule="constant"))


def _start_file(setup: Setup, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return out / f"start-{_digest(_start_spec(setup), setup.warm_steps)}.safetensors"


def cell_file(setup: Setup, cell: Cell, out: Path, link: str) -> Path:
    """Its name has a digest of all that the result depends on: studies may share `out` and its cells."""
    spec = setup.spec(cell.recipe, cell.seed)
    start = _digest(_start_spec(setup), setup.warm_steps) if setup.warm_steps else ""
    churn = (setup.away, setup.away_steps) if setup.away else ()
    digest = _digest(spec, setup.clusters, link or setup.allreduce_steps, start, *churn)
    return out / "cells" / f"{spec.run.recipe}-{cell.seed}-{digest}.json"


def _digest(spec: RunSpec, *more: float | str) -> str:
    """Settings at their defaults are left out, so that a new one changes no name."""
    sections = [(table.name, getattr(spec, table.name)) for table in fields(spec)]
    set_ = {
        f"{table}.{key.name}": value
        for table, section in sections
        for key in fields(section)
        if (value := getattr(section, key.name)) != key.default
    }
    release = torch.__version__.partition("+")[0]
    text = json.dumps([_FORMAT, release, set_, *more], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(file: Path) -> Result:
    try:
        record = json.loads(file.read_bytes())
        return Result(**{**record, "points": [Point(**p) for p in record["points"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"{file} is no result of a comparison ({error}); delete it to run it again"
        ) from error
