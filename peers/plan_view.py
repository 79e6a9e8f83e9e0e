"""A plan on a screen of 80 columns or more."""

import itertools
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_dilocox.plan import paper
from p2p_dilocox.plan.memory import RankMemory
from p2p_dilocox.plan.speed import ASSUMPTIONS

from .plan import Plan, days
from .view import bytes_text

__all__ = ["paper_view", "plan_view"]

_MOST_COLUMNS = 4
_PLACES = {"device": "GPU memory", "host": "main memory"}


def plan_view(plan: Plan) -> Group:
    parts: list[RenderableType] = [_head(plan), Text(), _memory_table(plan), Text(), *_verdict(plan)]
    if plan.pace is None:
        hint = "For speed, traffic and a choice of H give --uplink, and --flops or --tokens-per-s."
        parts.append(Text(hint, "dim"))
        return Group(*parts)
    return Group(*parts, Text(), _pace_table(plan), Text(), _choices_table(plan), *_advice(plan), Text(),
                 *_assumptions(ASSUMPTIONS))  # fmt: skip


def _head(plan: Plan) -> Text:
    spec, kind = plan.spec, "GPU" if plan.cluster.device == "cuda" else "CPU process"
    ranks = plan.cluster.ranks
    offload = ", --adamw-bits 8" if plan.cluster.adamw_bits == 8 else ""
    offload += ", --offload" if plan.cluster.offload else ""
    return Text.assemble(
        ("run ", ""), (spec.run.id, "bold"),
        f": {plan.parameters:,} parameters in {spec.model.stages} stages; a cluster of {ranks} {kind}"
        f"{_plural(ranks, 'es' if kind[0] == 'C' else 's')}{offload}; {plan.clusters} clusters",
    )  # fmt: skip


def _memory_table(plan: Plan) -> Table:
    columns = _alike(plan)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("GB")
    for ranks in columns:
        first, last = ranks[0].rank, ranks[-1].rank
        table.add_column(f"rank {first}" if first == last else f"ranks {first}-{last}", justify="right")
    for where in ("device", "host"):
        names = [row.name for row in columns[0][0].rows if row.where == where]
        for name in names:
            sizes = [_size(ranks[0], name, where) for ranks in columns]
            if any(sizes):
                table.add_row(name, *map(_gb, sizes))
        if names:
            totals = (_gb(ranks[0].total(where)) for ranks in columns)
            table.add_row(_PLACES[where], *totals, style="bold", end_section=True)
            if where == "device":
                table.add_row()
    return table


def _alike(plan: Plan) -> list[list[RankMemory]]:
    """Neighbours that need the same, together; if these are many: the first, the fullest and the last."""
    groups = [list(g) for _, g in itertools.groupby(plan.memory, key=lambda rank: rank.rows)]
    if len(groups) <= _MOST_COLUMNS:
        return groups
    fullest = plan.bottleneck
    shown = {0, len(groups) - 1, next(i for i, group in enumerate(groups) if fullest in group)}
    return [group for i, group in enumerate(groups) if i in shown]


def _verdict(plan: Plan) -> Iterable[RenderableType]:
    rank, place = plan.bottleneck, _PLACES[plan.where]
    needs = f"rank {rank.rank} needs {bytes_text(rank.total(plan.where))} of {place}"
    if plan.limit is None:
        yield Text(f"Fullest: {needs}. With --memory, such as --memory 40GB, it is said whether that fits.")
    elif plan.fits:
        yield Text(f"It fits: {needs}, and has {bytes_text(plan.limit)}.", "green")
    else:
        yield Text(f"It does not fit: {needs}, and has {bytes_text(plan.limit)}.", "bold red")
        if any(way.largest <= plan.limit for way in plan.ways):
            yield Text("What would make it fit, the cheapest first:")
        else:
            yield Text("Nothing here makes it fit. It takes more memory, or a smaller model. Nearest:")
        for way in plan.ways:
            yield Text(f"  {' and '.join(way.changes)}: {bytes_text(way.largest)}")


def _pace_table(plan: Plan) -> Table:
    rate, spec = plan.pace, plan.spec
    assert rate is not None
    table = Table.grid(padding=(0, 2))
    limit = spec.deadlines.round_s
    late = f"; deadlines.round_s = {limit:g} is too short for it" if rate.round_s > limit else ""
    rows = {
        "inner step": f"{_seconds(rate.step_s)}, H {spec.inner.H}: {_seconds(rate.step_s * spec.inner.H)}",
        "round": f"{bytes_text(rate.sent_bytes)} out of each cluster, {_seconds(rate.round_s)}, "
        f"{_seconds(rate.transfer_s)} of it on the link{late}",
        "utilisation": f"{rate.utilisation:.1%}, clusters wait {_seconds(rate.waits_s)} per outer step; "
        f"H {rate.enough_H:,} is enough",
        "speed": f"{rate.tokens_per_s:,.0f} tokens/s of all clusters: {plan.tokens:,.0f} tokens in "
        f"{_days(days(plan, rate))}",
        "traffic": f"{bytes_text(rate.month_bytes)} per month out of each cluster, as much into it",
    }
    for subject, text in rows.items():
        table.add_row(subject, text)
    return table


def _choices_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("what is sent")
    for name in ("per round", "round", "H enough", "utilisation", "per month"):
        table.add_column(name, justify="right")
    best = plan.recommended
    for choice in plan.choices:
        rate = choice.pace
        table.add_row(
            choice.name,
            bytes_text(rate.sent_bytes),
            _seconds(rate.round_s),
            f"{rate.enough_H:,}",
            f"{rate.utilisation:.0%}",
            bytes_text(rate.month_bytes),
            style="bold" if best and best[0] is choice else None,
        )
    return table


def _advice(plan: Plan) -> Iterable[Text]:
    assert plan.recommended is not None
    choice, H = plan.recommended
    yield Text(f"Take {choice.name} and H = {H:,}: of these the least lossy that is hidden.", "green")


def paper_view() -> Group:
    """The paper's cases."""
    sent, hours = paper.sync_example()
    speed, memory = Table(box=None, padding=(0, 2, 0, 0)), Table(box=None, padding=(0, 2, 0, 0))
    for name in ("case", "method"):
        speed.add_column(name)
        memory.add_column(name)
    for name in ("tokens/s", "printed", "deviation"):
        speed.add_column(name, justify="right")
    for name in ("GPUs", "GB per GPU", "in 40 GB"):
        memory.add_column(name, justify="right")
    for case in paper.CASES:
        for rate in paper.speed(case):
            figures = _rate(rate.tokens_per_s), _rate(rate.printed), f"{rate.deviation:+.1%}"
            speed.add_row(rate.case, rate.method, *figures)
        for fit in paper.memory(case):
            figures = str(fit.gpus), f"{fit.gpu_bytes / 1e9:.1f}", "yes" if fit.fits else "no"
            memory.add_row(fit.case, fit.method, *figures)
    return Group(
        Text("DiLoCoX, arXiv 2506.21263", "bold"), Text(),
        Text(f"section 2.4.1: 100e9 parameters, 3 clusters, 1 Gbit/s: {bytes_text(sent)}, {hours:.3f} h "
             "(printed: 533.3 GB, 1.18 h)"), Text(),
        speed, Text(), memory, Text(), *_assumptions(paper.ASSUMPTIONS),
    )  # fmt: skip


def _assumptions(sentences: Iterable[str]) -> Iterable[RenderableType]:
    yield Text("Assumed:", "dim")
    for sentence in sentences:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text("-", "dim"), Text(sentence, "dim"))
        yield grid


def _size(rank: RankMemory, name: str, where: str) -> int:
    return sum(row.bytes for row in rank.rows if (row.name, row.where) == (name, where))


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.1f} h"


def _days(days: float) -> str:
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days" if days >= 1 else _seconds(86400 * days)


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _plural(count: int, ending: str) -> str:
    return "" if count == 1 else ending
