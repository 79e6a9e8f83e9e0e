"""Loss, throughput and bytes of the clusters of a run as one PNG, drawn from their events; and where rank and
H have changed, these too, with the reasons."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from p2p_dilocox.errors import StateError
from p2p_dilocox.events import Adapted, Evaluated, InnerStep, RoundCommitted
from p2p_dilocox.sinks import read_events

__all__ = ["Curves", "load_curves", "plot_curves"]

_REASON_LINES = 24


@dataclass(slots=True)
class Curves:
    """One cluster's figures. Outer step t ends at t on the x axis; inner step h of it is at t - 1 + h / H."""

    name: str
    loss: list[tuple[float, float]] = field(default_factory=list)
    val_loss: list[tuple[float, float]] = field(default_factory=list)
    tokens_per_s: list[tuple[float, float]] = field(default_factory=list)
    """Per outer step: all tokens over all seconds of its inner steps."""
    sent_bytes: list[tuple[float, float]] = field(default_factory=list)
    """Per outer step, summed over the cluster's ranks."""
    ranks: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Of each stage, from one change to the next; empty if nothing has changed."""
    H: list[tuple[float, float]] = field(default_factory=list)
    changes: dict[int, str] = field(default_factory=dict)
    """By outer step: what has changed, and why."""


def load_curves(state: Path) -> Curves:
    """The curves in the state directory of a cluster. Raises StateError if there are none."""
    curves = Curves(name=state.name)
    seen: set[tuple[int, int]] = set()
    work: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    sent: dict[int, int] = defaultdict(int)
    val: dict[int, float] = {}
    lowrank: dict[int, int] = {}
    length: dict[int, int] = {}
    adapted: dict[int, list[Adapted]] = defaultdict(list)
    for event in read_events(state / "events.jsonl"):
        match event:
            case InnerStep() if (event.t, event.h) not in seen:  # several ranks may report it
                seen.add((event.t, event.h))
                curves.loss.append((event.t - 1 + event.h / event.H, event.loss))
                work[event.t][0] += event.tokens
                work[event.t][1] += event.seconds
                length[event.t] = event.H
            case RoundCommitted():
                sent[event.t] += event.sent_bytes
                lowrank[event.t] = event.lowrank
            case Adapted():
                adapted[event.t].append(event)
            case Evaluated():
                val[event.t] = event.val_loss
    curves.val_loss = sorted(val.items())
    if not curves.loss and not curves.val_loss:
        raise StateError(f"{state} has no losses yet: wait for the first inner step.")
    curves.tokens_per_s = [
        (t, tokens / seconds) for t, (tokens, seconds) in sorted(work.items()) if seconds > 0
    ]
    curves.sent_bytes = sorted(sent.items())
    if adapted and lowrank:
        curves.H = sorted(length.items())
        changes = [(t, adapted[t][-1].lowrank) for t in sorted(adapted)]
        for stage in range(len(changes[0][1])):
            points = [(t, ranks[stage]) for t, ranks in changes]
            first, last = (min(lowrank), lowrank[min(lowrank)]), (max(lowrank), points[-1][1])
            curves.ranks[stage] = [first, *points, last]
    for t, events in sorted(adapted.items()):  # of several ranks, which may say the same of H
        curves.changes[t] = "; ".join(dict.fromkeys(p for e in events for p in e.message.split("; ")))
    return curves


def plot_curves(
    clusters: Sequence[Curves],
    out: Path,
    *,
    unigram_loss: float | None = None,
    fp16_bytes: float | None = None,
) -> None:
    """Write a PNG of 1500 x 450 points to `out`, or 1500 x 900 with rank and H where these have changed.

    unigram_loss: a baseline (nats per token) for the loss panel.
    fp16_bytes: what averaging the same parameters in fp16 would send per outer step.
    Raises StateError if `out` cannot be written.
    """
    rows = 2 if any(curves.changes for curves in clusters) else 1
    figure = Figure(figsize=(15, 4.5 * rows), dpi=100, layout="constrained")
    (loss, speed, traffic), *more = figure.subplots(rows, 3, squeeze=False)
    for panels in more:
        _draw_changes(next(curves for curves in clusters if curves.changes), *panels)
    for number, curves in enumerate(clusters):
        loss.plot(*_xy(curves.loss), color=f"C{number}", alpha=0.3, linewidth=1)
        for panel, points, what in (
            (loss, curves.val_loss, ", validation"),
            (speed, curves.tokens_per_s, ""),
            (traffic, curves.sent_bytes, ""),
        ):
            panel.plot(
                *_xy(points),
                color=f"C{number}",
                linestyle="-"
                if number == 0
                else (0, (3, 2 + number)),  # equal curves show through each other
                marker="o",
                markersize=3,
                label=f"{curves.name}{what}",
            )
    if unigram_loss is not None:
        loss.axhline(unigram_loss, color="grey", linestyle="--", linewidth=1, label="unigram baseline")
    if fp16_bytes is not None:
        traffic.axhline(fp16_bytes, color="grey", linestyle="--", linewidth=1, label="fp16 averaging")
    traffic.set_ylim(bottom=0)
    traffic.yaxis.set_major_formatter(EngFormatter(unit="B"))
    speed.set_ylim(bottom=0)
    for panel, title in (
        (loss, "loss (nats per token)"),
        (speed, "tokens/s"),
        (traffic, "bytes sent per outer step"),
    ):
        panel.set_title(title)
        panel.set_xlabel("outer step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="png")
    except OSError as error:
        raise StateError(f"cannot write the plot {out}: {error.strerror}") from error


def _draw_changes(curves: Curves, ranks: Axes, length: Axes, reasons: Axes) -> None:
    """Of one cluster: all have the same."""
    for stage, points in curves.ranks.items():
        dashes = "-" if stage == 0 else (0, (3, 2 + stage))
        ranks.plot(*_xy(points), drawstyle="steps-post", linestyle=dashes, label=f"stage {stage}")
    length.plot(*_xy(curves.H), marker="o", markersize=3, color="black")
    for panel, title in ((ranks, "rank of a round"), (length, "H, inner steps of an outer step")):
        panel.set_title(title)
        panel.set_xlabel("outer step")
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    if curves.ranks:
        ranks.legend()
    lines = [line for t, why in curves.changes.items() for line in textwrap.wrap(f"{t}: {why}", 88)]
    if len(lines) > _REASON_LINES:
        lines = [f"... the last of {len(curves.changes)} changes", *lines[-_REASON_LINES:]]
    reasons.set_title("outer step: what changed, and why")
    reasons.axis("off")
    reasons.text(0, 1, "\n".join(lines), va="top", fontsize=8, transform=reasons.transAxes)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
