"""Validation losses of a comparison: over tokens, bytes and time, and the last ones over bytes alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from p2p_dilocox.comparison import Summary
from p2p_dilocox.errors import StateError
from p2p_dilocox.pareto import pareto
from p2p_dilocox.simulation import Point

__all__ = ["front", "plot_comparison", "plot_front"]

_PANELS: list[tuple[str, str, str, Callable[[Point], float]]] = [
    ("tokens of all clusters", "", "linear", lambda p: p.tokens),
    ("bytes that a cluster has sent", "B", "log", lambda p: p.sent_bytes),
    ("time", "s", "log", lambda p: p.seconds),
]


def plot_comparison(summaries: Sequence[Summary], out: Path) -> None:
    """A PNG of 1650 x 500 points. Raises StateError if `out` cannot be written."""
    figure = Figure(figsize=(16.5, 5), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (title, unit, scale, x) in zip(panels, _PANELS, strict=True):
        for number, summary in enumerate(summaries):
            points = [p for p in summary.mean.points if scale == "linear" or x(p) > 0]
            panel.plot(
                [x(p) for p in points], [p.val_loss for p in points], label=summary.recipe,
                color=f"C{number % 10}", linestyle="-" if number < 10 else "--", marker="o", markersize=3,
            )  # fmt: skip
        panel.set_xscale(scale)
        panel.set_xlabel(title)
        panel.xaxis.set_major_formatter(EngFormatter(unit=unit))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, out)


def front(summaries: Sequence[Summary]) -> list[Summary]:
    """Those that no other one beats with as few bytes (Pareto), the fewest bytes first."""
    by_name = {summary.recipe: summary for summary in summaries}
    points = {name: (s.mean.points[-1].sent_bytes, s.mean.val_loss) for name, s in by_name.items()}
    return [by_name[name] for name in pareto(points)]


def plot_front(summaries: Sequence[Summary], out: Path) -> None:
    """A PNG of 1000 x 650 points: the last loss over all bytes sent, and the Pareto front as a line.

    Raises StateError if `out` cannot be written.
    """
    figure = Figure(figsize=(10, 6.5), dpi=100, layout="constrained")
    panel = figure.subplots()
    best = front(summaries)
    panel.plot(
        [s.mean.points[-1].sent_bytes for s in best], [s.mean.val_loss for s in best], color="C1",
        drawstyle="steps-post", label="nothing better with as few bytes",
    )  # fmt: skip
    for summary in summaries:
        x, y = summary.mean.points[-1].sent_bytes, summary.mean.val_loss
        panel.plot([x], [y], "o", color="C1" if summary in best else "C0", markersize=5)
        panel.annotate(summary.recipe, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(EngFormatter(unit="B"))
    panel.set_xlabel("bytes that a cluster has sent in all")
    panel.set_ylabel("validation loss in the end (nats per token)")
    panel.grid(alpha=0.3, which="both")
    panel.legend()
    _save(figure, out)


def _save(figure: Figure, out: Path) -> None:
    try:
        figure.savefig(out, format="png")
    except OSError as error:
        raise StateError(f"cannot write the plot {out}: {error.strerror}") from error
