"""Validation losses of a comparison, over tokens, bytes and time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from p2p_dilocox.comparison import Summary
from p2p_dilocox.errors import StateError
from p2p_dilocox.simulation import Point

__all__ = ["plot_comparison"]

_PANELS: list[tuple[str, str, str, Callable[[Point], float]]] = [
    ("tokens of all clusters", "", "linear", lambda p: p.tokens),
    ("bytes that a cluster has sent", "B", "log", lambda p: p.sent_bytes),
    ("simulated time", "s", "log", lambda p: p.seconds),
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
    try:
        figure.savefig(out, format="png")
    except OSError as error:
        raise StateError(f"cannot write the plot {out}: {error.strerror}") from error
