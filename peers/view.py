"""The live view of a cluster, drawn from its Progress. display.py decides when it is shown."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress import Progress, RoundTotals

__all__ = ["ClusterView", "DemoView", "bytes_text", "console", "phase_line", "round_line", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {
    "training": "bold green",
    "warming up": "green",
    "done": "bold green",
    "leaving": "bold yellow",
    "paused": "bold yellow",
    "waiting": "bold yellow",
}
_LABEL_WIDTH = 10
_MAX_HEIGHT = 40
_PLAIN_WIDTH = 120  # of tables in files and pipes


def console() -> Console:
    """Standard output. Without markup: text in our tables may come from other clusters."""
    screen = Console(markup=False, highlight=False)
    return screen if screen.is_terminal else Console(markup=False, highlight=False, width=_PLAIN_WIDTH)


class ClusterView:
    """One cluster, as high as the terminal: figures first, the log in the lines that are left."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        p = self.progress
        inside = options.update(width=options.max_width - 4, height=None)
        figures = Group(_steps(p), Text(), _losses(p, inside.max_width), Text(), _figures(p))
        height = (
            min(options.height or console.height - 1, _MAX_HEIGHT) - 2
        )  # the cursor keeps a line; borders
        room = height - len(console.render_lines(figures, inside)) - 1
        title = Text.assemble(
            ("dilocox", "bold cyan"), "  run ", (p.run_id, "bold"), "  ", (p.phase, _style(p.phase))
        )
        if p.detail:
            title.append(f"  {p.detail}", "dim")
        title.truncate(options.max_width - 8, overflow="ellipsis")
        yield Panel(
            Group(figures, Text(), *_log_lines(p.log, max(room, 0))),
            title=title,
            title_align="left",
            subtitle=Text("Ctrl-C leaves the run", "dim"),
            subtitle_align="right",
            border_style="cyan",
            height=height + 2,
            padding=(0, 1),
        )


class DemoView:
    """Several clusters of one run side by side, with one progress bar: the slowest cluster's."""

    def __init__(self, clusters: Sequence[Progress], headline: str = "") -> None:
        self.clusters = clusters
        self.headline = headline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = self.clusters[0]
        done = min(max(p.rounds, default=0) for p in self.clusters)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(_label("outer step"), _bar(done, first.outer_steps), f"{done} of {first.outer_steps}")
        table = Table(expand=True, border_style="dim", header_style="bold")
        table.add_column("cluster")
        for name in ("step", "loss", "val loss", "tokens/s", "sent/step", "use"):
            table.add_column(name, justify="right", no_wrap=True)
        for p in self.clusters:
            last = p.last_round
            table.add_row(
                Text(p.name, no_wrap=True), f"{p.t}.{p.h}", _number(p.loss), _number(p.val_loss),
                _count(p.tokens_per_s), bytes_text(last.sent_bytes) if last else "-", _percent(p.utilisation),
            )  # fmt: skip
        losses = Table.grid(padding=(0, 1))
        width = options.max_width - 4 - _LABEL_WIDTH - 14
        for p in self.clusters:
            losses.add_row(
                _label(p.name), Text(p.phase, _style(p.phase)), Text(sparkline(p.losses, width), "yellow")
            )
        log = sorted((when, f"{p.name}  {line}") for p in self.clusters for when, line in p.log)
        yield Panel(
            Group(bar, table, losses, Text(), *_log_lines(log, 4)),
            title=Text.assemble(("dilocox demo", "bold cyan"), f"  {self.headline}"),
            title_align="left",
            border_style="cyan",
            padding=(0, 1),
        )


def round_line(progress: Progress, totals: RoundTotals) -> str:
    """The one line that a log has per outer step; always the same order."""
    mb = (
        f"{totals.sent_bytes / 1e6:.1f}"
        if not 0 < totals.sent_bytes < 1e5
        else f"{totals.sent_bytes / 1e6:.3f}"
    )
    clusters = f"{len(totals.members)} cluster{'' if len(totals.members) == 1 else 's'}"
    return (
        f"outer {totals.t} committed  {clusters}  loss {_number(progress.loss)}  {mb} MB up  "
        f"lowrank {totals.lowrank}  H {totals.H}  hidden {totals.hidden:.0%} of {totals.seconds:.1f} s"
    )


def phase_line(progress: Progress) -> str:
    return f"{progress.phase}: {progress.detail}" if progress.detail else progress.phase


def bytes_text(count: float) -> str:
    """`count` bytes in decimal units: MB is 10^6."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as blocks between their smallest and largest; a gap for what is not finite."""
    shown = list(values)[-max(width, 1) :]
    finite = [v for v in shown if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if low <= v <= high else " " for v in shown)


def _steps(p: Progress) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(_label("cluster"), Text(f"{p.name}  {p.cluster_id}"), "")
    grid.add_row(
        _label("recipe"), Text(f"{p.recipe}, {p.num_ranks} process{'' if p.num_ranks == 1 else 'es'}"), ""
    )
    grid.add_row(
        _label("outer step"), _bar(max(p.rounds, default=0), p.outer_steps), f"{p.t} of {p.outer_steps}"
    )
    grid.add_row(_label("inner step"), _bar(p.h, p.H), f"{p.h} of {p.H}")
    return grid


def _losses(p: Progress, width: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    room = width - _LABEL_WIDTH - 10
    grid.add_row(
        _label("loss"), Text(_number(p.loss), "bold yellow"), Text(sparkline(p.losses, room), "yellow")
    )
    values = [p.val_losses[t] for t in sorted(p.val_losses)]
    grid.add_row(
        _label("val loss"),
        Text(_number(p.val_loss), "bold magenta"),
        Text(sparkline(values, room), "magenta"),
    )
    return grid


def _figures(p: Progress) -> Table:
    last = p.last_round
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        _label("speed"),
        f"{_count(p.tokens_per_s)} tokens/s   lr {_scientific(p.lr)}   utilisation {_percent(p.utilisation)}",
    )
    sent, received = (last.sent_bytes, last.received_bytes) if last else (0, 0)
    grid.add_row(_label("last round"), f"{bytes_text(sent)} sent   {bytes_text(received)} received")
    grid.add_row(
        _label("total"), f"{bytes_text(p.sent_bytes)} sent   {bytes_text(p.received_bytes)} received"
    )
    hidden = f"   {last.hidden:.0%} of {last.seconds:.1f} s hidden" if last else ""
    grid.add_row(_label("settings"), f"lowrank {last.lowrank if last else '-'}   H {p.H or '-'}{hidden}")
    grid.add_row(_label("group"), _members(p))
    return grid


def _members(p: Progress) -> Text:
    last = p.last_round
    if last is None:
        return Text("no round yet", "dim")
    names = [f"{member[:8]} (this one)" if member == p.cluster_id else member[:8] for member in last.members]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return Text(
        f"{len(names)} in round {last.t}: {', '.join(names[:5])}{more}", no_wrap=True, overflow="ellipsis"
    )


def _log_lines(log: Iterable[tuple[float, str]], count: int) -> list[RenderableType]:
    lines = list(log)[-count:] if count > 0 else []
    return [
        Text.assemble(
            (time.strftime("%H:%M:%S ", time.localtime(when)), "dim"), line, no_wrap=True, overflow="ellipsis"
        )
        for when, line in lines
    ]


def _bar(completed: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(completed, total), width=30)


def _label(text: str) -> Text:
    shown = Text(text, "dim")
    shown.truncate(_LABEL_WIDTH, overflow="ellipsis", pad=True)
    return shown


def _style(phase: str) -> str:
    return _PHASE_STYLES.get(phase, "bold")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
