"""`compare`: every cell of a comparison in a process of its own, as many at a time as asked for."""

import csv
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import click
import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from p2p_dilocox.comparison import Cell, Result, Setup, Summary, prepare, read_cell, run_cell, summarise
from p2p_dilocox.errors import StateError
from p2p_dilocox.stability import unstable
from p2p_dilocox.swarm.process import die_with_parent

from .view import bytes_text, console

__all__ = ["compare", "comparison_table", "summary_record", "write_comparison"]

_GLANCE_S = 0.25
_queue: "Queue[tuple[Cell, int, int]] | None" = None  # of a worker: to the program that started it


def compare(setup: Setup, cells: Sequence[Cell], out: Path, processes: int, link: str = "") -> list[Summary]:
    """All cells, those from an earlier call with the same settings read from `out`. Shows bars on a terminal.

    link: rate of real links between real clusters, one cell at a time; "": simulated, `processes` at a time.
    Raises SpecError for a recipe that does not exist or a setting that it refuses, before anything runs.
    """
    specs = {cell: setup.spec(cell.recipe, cell.seed) for cell in cells}
    warnings = (f"{cell.recipe}: {w}" for cell, s in specs.items() for w in unstable(s, setup.clusters))
    for warning in dict.fromkeys(warnings):
        click.echo(f"warning: {warning}", err=True)
    out.mkdir(parents=True, exist_ok=True)
    screen = console()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(), console=screen, disable=not screen.is_terminal, transient=True,
    ) as bars:  # fmt: skip
        known = {cell: read_cell(setup, cell, out, link) for cell in cells}
        missing = [cell for cell, result in known.items() if result is None]
        if missing:
            whole = bars.add_task("all", total=len(cells), completed=len(cells) - len(missing))
        if missing and link:
            known |= {cell: _run_linked(setup, cell, out, link, bars, whole) for cell in missing}
        elif missing:
            start = bars.add_task("tokens and warm start", total=None)
            prepare(setup, out)
            bars.remove_task(start)
            known |= _run(setup, missing, out, processes, bars, whole)
    return summarise([result for result in known.values() if result is not None])


def _run(
    setup: Setup, cells: Sequence[Cell], out: Path, processes: int, bars: Progress, whole: TaskID
) -> dict[Cell, Result]:
    context = get_context("spawn")
    queue: Queue[tuple[Cell, int, int]] = context.Queue()
    tasks: dict[Cell, TaskID] = {}
    with ProcessPoolExecutor(processes, context, _begin, (queue,)) as pool:
        try:
            futures: dict[Future[Result], Cell] = {pool.submit(_cell, setup, c, out): c for c in cells}
            left = set(futures)
            while left:
                over, left = wait(left, _GLANCE_S, FIRST_COMPLETED)
                _show(queue, bars, tasks)
                for future in over:
                    future.result()
                    bars.advance(whole)
                    if (task := tasks.pop(futures[future], None)) is not None:
                        bars.remove_task(task)
            return {cell: future.result() for future, cell in futures.items()}
        except BaseException:  # also Ctrl-C: what runs is not worth waiting for, what is done is in its files
            for process in pool._processes.values():
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_linked(setup: Setup, cell: Cell, out: Path, link: str, bars: Progress, whole: TaskID) -> Result:
    from .linked import run_linked_cell

    task = bars.add_task(f"{cell.recipe}, seed {cell.seed}", total=None)

    def progress(done: int, of: int) -> None:
        bars.update(task, completed=done, total=of)

    result = run_linked_cell(setup, cell, out, link, progress)
    bars.remove_task(task)
    bars.advance(whole)
    return result


def _show(queue: "Queue[tuple[Cell, int, int]]", bars: Progress, tasks: dict[Cell, TaskID]) -> None:
    while True:
        try:
            cell, done, of = queue.get_nowait()
        except Empty:
            return
        if cell not in tasks:
            tasks[cell] = bars.add_task(f"{cell.recipe}, seed {cell.seed}", total=of)
        bars.update(tasks[cell], completed=done)


def _begin(queue: "Queue[tuple[Cell, int, int]]") -> None:
    global _queue
    die_with_parent()
    torch.set_num_threads(1)
    _queue = queue


def _cell(setup: Setup, cell: Cell, out: Path) -> Result:
    def progress(done: int, of: int) -> None:
        if _queue is not None and (done % max(1, of // 100) == 0 or done == of):
            _queue.put((cell, done, of))

    return run_cell(setup, cell, out, progress)


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "recipe": lambda s: s.recipe,
    "loss": lambda s: f"{s.mean.val_loss:.4f}",
    "spread": lambda s: f"{s.loss_spread:.4f}" if s.seeds > 1 else "-",
    "gap": lambda s: "-" if s.gap is None else f"{s.gap:+.2%}",
    "of mean": lambda s: "-" if s.mean.averaged_loss is None else f"{s.mean.averaged_loss:.4f}",
    "H": lambda s: f"{s.mean.from_local_steps:.0f}",
    "sent per outer step": lambda s: bytes_text(s.mean.wire_bytes_per_outer_step),
    "vs fp16": lambda s: f"{s.mean.compression_vs_fp16:.0f}x",
    "vs fp32": lambda s: f"{2 * s.mean.compression_vs_fp16:.0f}x",
    "steps * coding": lambda s: f"{s.mean.from_local_steps:.0f} * {s.mean.from_coding:.1f}",
    "utilisation": lambda s: f"{s.mean.utilisation:.0%}",
    "tokens/s": lambda s: f"{s.mean.tokens_per_s:.0f}",
}


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """The smallest loss first. `gap`: of the loss to allreduce. `of mean`: loss of the mean of the last
    anchors. `vs fp16`: to an AllReduce at every step."""
    table = Table(box=None, pad_edge=False)
    averages = any(summary.mean.averaged_loss is not None for summary in summaries)
    columns = {name: cell for name, cell in _COLUMNS.items() if name != "of mean" or averages}
    for name in columns:
        table.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(*(cell(summary) for cell in columns.values()))
    return table


def summary_record(summary: Summary) -> dict[str, Any]:
    """Flat, for JSON and CSV; without the points."""
    mean = {k: v for k, v in asdict(summary.mean).items() if k not in ("recipe", "seed", "points")}
    return {
        "recipe": summary.recipe, "seeds": summary.seeds, "loss_spread": summary.loss_spread,
        "gap_to_allreduce": summary.gap, "gap_spread": summary.gap_spread, **mean,
        "compression_vs_fp32": 2 * summary.mean.compression_vs_fp16,
    }  # fmt: skip


def write_comparison(summaries: Sequence[Summary], out: Path) -> list[str]:
    """comparison.csv, .json and .png, and front.png in `out`; their names.

    Raises StateError if they cannot be written.
    """
    from p2p_dilocox.comparison_plot import plot_comparison, plot_front

    records = [summary_record(summary) for summary in summaries]
    try:
        with (out / "comparison.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0].keys())
            writer.writeheader()
            writer.writerows(records)
        with_points = [
            record | {"points": [asdict(point) for point in summary.mean.points]}
            for record, summary in zip(records, summaries, strict=True)
        ]
        (out / "comparison.json").write_text(json.dumps(with_points, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StateError(f"cannot write the comparison to {out}: {error.strerror}") from error
    plot_comparison(summaries, out / "comparison.png")
    plot_front(summaries, out / "front.png")
    return ["comparison.csv", "comparison.json", "comparison.png", "front.png"]


def default_processes() -> int:
    return max(1, len(os.sched_getaffinity(0)))
