"""What a cluster of this machine is doing, and who is in a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from p2p_dilocox.errors import StateError
from p2p_dilocox.program import printable
from p2p_dilocox.swarm.link import JoinLink

if TYPE_CHECKING:  # it loads hivemind
    from p2p_dilocox.swarm.messages import Presence

from .control import SOCKET_NAME, ask
from .view import bytes_text

__all__ = [
    "cluster_status", "distinct_names", "status_table", "swarm_records", "swarm_status", "swarm_table",
]  # fmt: skip


def cluster_status(state: Path) -> dict[str, Any]:
    """What the supervisor in `state` answers, or what the last one left behind, with "running": false."""
    if (state / SOCKET_NAME).exists():
        try:
            return {**ask(state, {"command": "status"}), "running": True}
        except StateError:
            pass  # the supervisor was killed; its last report is still there
    try:
        record = json.loads((state / "status.json").read_text(encoding="utf-8"))
        return {**record, "running": False, "pid": int(record["pid"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{state} has no status of a cluster. Is it the --state-dir of a dilocox-peer join?"
        ) from error


def status_table(record: dict[str, Any]) -> Table:
    """`record` as cluster_status returns it: one line per figure, unknown ones as "-"."""
    table = Table.grid(padding=(0, 2))
    table.add_row("cluster", f"{record['name']}  {record['cluster_id']}")
    table.add_row("run", f"{record['run_id']}, recipe {record['recipe']}, {record['ranks']} processes")
    running = f"running as process {record['pid']}" if record["running"] else "not running"
    table.add_row("state", f"{record['phase']} {record['detail']}".strip() + f", {running}")
    table.add_row("outer step", f"{record['t']} of {record['outer_steps']}, {record['committed']} committed")
    table.add_row("inner step", f"{record['h']} of {record['H']}")
    table.add_row(
        "loss", f"{_figure(record['loss'], '.3f')}   validation {_figure(record['val_loss'], '.3f')}"
    )
    table.add_row(
        "speed",
        f"{_figure(record['tokens_per_s'], ',.0f')} tokens/s, "
        f"utilisation {_figure(record['utilisation'], '.0%')}",
    )
    table.add_row(
        "bytes", f"{bytes_text(record['sent_bytes'])} sent, {bytes_text(record['received_bytes'])} received"
    )
    table.add_row(
        "this month", f"{bytes_text(record.get('month_bytes', 0))} with all that is around the rounds"
    )
    table.add_row("group", ", ".join(record["members"]) or "-")
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def swarm_status(text: str) -> list[dict[str, Any]]:
    """The clusters of the run behind a join link, by id. Raises LinkError or UnreachableError."""
    link = JoinLink.parse(text)
    from .visit import list_clusters  # loads hivemind: a wrong link should not wait for it

    return swarm_records(list_clusters(link))


def swarm_records(clusters: dict[str, tuple[Presence, float]]) -> list[dict[str, Any]]:
    """clusters: what each said of itself, and how many seconds ago. All of it are its own words."""
    names = distinct_names({cluster: presence for cluster, (presence, _) in clusters.items()})
    tokens = sum(presence.tokens for presence, _ in clusters.values())
    return [
        {
            "cluster_id": cluster,
            "name": names[cluster],
            "state": presence.state,
            "processes": len(presence.ranks),
            "stages": sorted({stage for rank in presence.ranks for stage in rank.stages}),
            "t": presence.t,
            "h": presence.h,
            "loss": presence.loss if math.isfinite(presence.loss) else None,
            "tokens_per_s": presence.tokens_per_s,
            "tokens": presence.tokens,
            "share": presence.tokens / tokens if tokens else 0.0,
            "seen_s": round(seen_s, 1),
        }
        for cluster, (presence, seen_s) in sorted(clusters.items())
    ]


def distinct_names(clusters: dict[str, Presence]) -> dict[str, str]:
    """A name is a claim: the cluster that has used it longest is shown with it, any other with its id behind.

    How long is what each says of itself, so a name proves nothing; the id does, which is its key's.
    """
    first: dict[str, str] = {}
    for cluster in sorted(clusters, key=lambda c: (clusters[c].since, c)):
        first.setdefault(clusters[cluster].name, cluster)
    return {c: p.name if first[p.name] == c else f"{p.name}~{c[:6]}" for c, p in clusters.items()}


def swarm_table(clusters: list[dict[str, Any]]) -> Table:
    table = Table(border_style="cyan", title=f"{len(clusters)} clusters", title_justify="left")
    table.add_column("cluster")
    table.add_column("name")
    for name in ("state", "stages", "outer step", "loss", "tokens/s", "tokens", "share", "seen"):
        table.add_column(name, justify="right")
    for c in clusters:
        table.add_row(
            c["cluster_id"], printable(c["name"], 40), c["state"], _spans(c["stages"]), f"{c['t']}+{c['h']}",
            _figure(c["loss"], ".3f"), f"{c['tokens_per_s']:,.0f}", f"{c['tokens']:,}", f"{c['share']:.0%}",
            f"{c['seen_s']:.0f} s ago",
        )  # fmt: skip
    return table


def _spans(stages: list[int]) -> str:
    """0-3,5 for 0, 1, 2, 3 and 5."""
    spans: list[list[int]] = []
    for stage in stages:
        if spans and stage == spans[-1][1] + 1:
            spans[-1][1] = stage
        else:
            spans.append([stage, stage])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
