"""Recipes side by side: the same model, data, tokens and inner optimizer, on simulated links. One cell is one
recipe with one seed; its result is a file, so that a comparison that was interrupted goes on where it was.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from p2p_dilocox.data import load_tokens
from p2p_dilocox.errors import StateError
from p2p_dilocox.runspec import RunSpec, parse_run_as
from p2p_dilocox.simulation import Link, Place, Point, Simulation, warm_start
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.traffic import fp16_bytes, model_tensors

__all__ = ["Cell", "Result", "Setup", "Summary", "prepare", "read_cell", "run_cell", "summarise"]

_VALIDATIONS = 12
_FORMAT = 1  # of a cell's file, and of what a simulation gives


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all cells share.

    text: a run.toml, whose method is replaced. inner_steps: of each cluster. warm_steps: inner steps of the
    model that all start from. allreduce_steps: how many inner steps as long an fp16 AllReduce of the model
    takes, which fixes the links. 31 is the paper's OPT-1.3B at 1 Gbit/s (arXiv 2506.21263, Table 1: 23,880
    tokens/s when nothing waits, 745 with an AllReduce at every step).
    """

    text: str
    clusters: int = 4
    inner_steps: int = 384
    warm_steps: int = 0
    allreduce_steps: float = 31.0

    def spec(self, recipe: str, seed: int) -> RunSpec:
        """Raises SpecError."""
        spec = parse_run_as(self.text, recipe, seed=seed, inner_steps=self.inner_steps)
        every = max(1, spec.run.outer_steps // _VALIDATIONS)
        return replace(spec, eval=replace(spec.eval, every=every))

    def link(self, num_parameters: int) -> Link:
        """An inner step takes 1 s."""
        bits = 8 * fp16_bytes(num_parameters, self.clusters)
        mbps = max(1e-6, bits * 1e-6 / self.allreduce_steps)
        return Link(uplink_mbps=mbps, downlink_mbps=mbps, latency_s=0.02)


@dataclass(frozen=True)
class Cell:
    recipe: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one cell came to. Losses in nats per token; bytes are payload that one cluster sends.

    compression_vs_fp16: bytes of an fp16 AllReduce at every inner step over ours; from_local_steps and
    from_coding are its two factors. points: the validations.
    """

    recipe: str
    seed: int
    val_loss: float
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

    gap: of the mean loss to `allreduce`, relative; None if that was not run.
    """

    recipe: str
    seeds: int
    mean: Result
    loss_spread: float
    gap: float | None


def prepare(setup: Setup, seeds: Sequence[int], recipe: str, out: Path) -> None:
    """Tokens and warm starts, which cells then only read. Raises DilocoxError."""
    for seed in seeds:
        spec = setup.spec(recipe, seed)
        corpus = load_tokens(spec, out / "tokens")
        if setup.warm_steps and not (file := _start_file(setup, seed, out)).exists():
            state = warm_start(spec, corpus, setup.warm_steps)
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)


def read_cell(setup: Setup, cell: Cell, out: Path) -> Result | None:
    """What an earlier call left in `out`, None if there is nothing. Raises StateError for a damaged file."""
    file = _file(setup, cell, out)
    return _read(file) if file.exists() else None


def run_cell(
    setup: Setup, cell: Cell, out: Path, progress: Callable[[int, int], None] = lambda _done, _of: None
) -> Result:
    """Simulate it and keep its result in `out`. progress: inner steps done, of all clusters, and in all."""
    spec, file = setup.spec(cell.recipe, cell.seed), _file(setup, cell, out)
    start = load_file(_start_file(setup, cell.seed, out)) if setup.warm_steps else None
    num_parameters = model_tensors(spec).num_parameters
    link = setup.link(num_parameters)
    places = [Place(cluster_id=f"cluster{number}", link=link) for number in range(setup.clusters)]
    simulation = Simulation(spec, places, load_tokens(spec, out / "tokens"), start=start)
    total = setup.clusters * spec.run.outer_steps * spec.inner.H
    simulation.on_step = lambda done: progress(done, total)
    simulation.run()
    result = _result(cell, spec, simulation, fp16_bytes(num_parameters, setup.clusters))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(asdict(result), indent=1) + "\n")
    return result


def _result(cell: Cell, spec: RunSpec, simulation: Simulation, fp16: float) -> Result:
    sent = simulation.sent_bytes / spec.run.outer_steps
    return Result(
        recipe=cell.recipe, seed=cell.seed, val_loss=simulation.points[-1].val_loss,
        start_loss=simulation.points[0].val_loss, tokens=simulation.tokens,
        outer_steps=spec.run.outer_steps, H=spec.inner.H, wire_bytes_per_outer_step=sent,
        compression_vs_fp16=fp16 * spec.inner.H / sent if sent else 0.0, from_local_steps=float(spec.inner.H),
        from_coding=fp16 / sent if sent else 0.0, utilisation=simulation.utilisation,
        tokens_per_s=simulation.tokens / simulation.seconds, seconds=simulation.seconds,
        points=simulation.points,
    )  # fmt: skip


def summarise(results: Sequence[Result]) -> list[Summary]:
    """One per recipe, the smallest loss first."""
    by_recipe: dict[str, list[Result]] = {}
    for result in results:
        by_recipe.setdefault(result.recipe, []).append(result)
    means = {recipe: _mean(of) for recipe, of in by_recipe.items()}
    reference = means["allreduce"].val_loss if "allreduce" in means else None
    found = [
        Summary(
            recipe=recipe, seeds=len(of), mean=means[recipe],
            loss_spread=max(r.val_loss for r in of) - min(r.val_loss for r in of),
            gap=None if reference is None else means[recipe].val_loss / reference - 1.0,
        )
        for recipe, of in by_recipe.items()
    ]  # fmt: skip
    return sorted(found, key=lambda summary: summary.mean.val_loss)


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
        )
        for same in zip(*(r.points for r in results), strict=False)
    ]
    return Result(**{**mean, "recipe": first.recipe, "points": points})


def _start_file(setup: Setup, seed: int, out: Path) -> Path:
    digest = hashlib.sha256(f"{_FORMAT} {setup.warm_steps} {setup.text}".encode()).hexdigest()[:12]
    out.mkdir(parents=True, exist_ok=True)
    return out / f"start-{seed}-{digest}.safetensors"


def _file(setup: Setup, cell: Cell, out: Path) -> Path:
    """Its name has a digest of all that the result depends on."""
    spec = setup.spec(cell.recipe, cell.seed)
    text = json.dumps([_FORMAT, torch.__version__, asdict(setup), asdict(spec)], default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return out / "cells" / f"{cell.recipe}-{cell.seed}-{digest}.json"


def _read(file: Path) -> Result:
    try:
        record = json.loads(file.read_bytes())
        return Result(**{**record, "points": [Point(**p) for p in record["points"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"{file} is no result of a comparison ({error}); delete it to run it again"
        ) from error
