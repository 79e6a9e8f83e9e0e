"""Who is in the run, as the organiser sees it: a table on a terminal, one line per change elsewhere."""

from collections.abc import Mapping
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2p_dilocox.program import printable
from p2p_dilocox.swarm.messages import Presence

__all__ = ["Board", "LineBoard", "TableBoard", "open_board"]


class Board(Protocol):
    def show(self, clusters: Mapping[str, Presence]) -> None: ...

    def say(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def close(self) -> None: ...


def open_board(run_id: str) -> Board:
    console = Console(markup=False, highlight=False)
    return TableBoard(console, run_id) if console.is_terminal else LineBoard()


class LineBoard:
    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, int]] = {}

    def show(self, clusters: Mapping[str, Presence]) -> None:
        for cluster_id in sorted(self._shown.keys() - clusters.keys()):
            del self._shown[cluster_id]
            click.echo(f"cluster {cluster_id} is gone; {len(clusters)} present")
        for cluster_id, presence in sorted(clusters.items()):
            standing = (presence.state, presence.t)
            if self._shown.get(cluster_id) != standing:
                self._shown[cluster_id] = standing
                click.echo(
                    f"cluster {cluster_id} {printable(presence.name, 32)} {presence.state}  "
                    f"outer {presence.t}  loss {presence.loss:.3f}  {presence.tokens_per_s:.0f} tokens/s; "
                    f"{len(clusters)} present"
                )

    def say(self, message: str) -> None:
        click.echo(message)

    def warn(self, message: str) -> None:
        click.echo(f"warning: {message}", err=True)

    def close(self) -> None: ...


class TableBoard:
    def __init__(self, console: Console, run_id: str) -> None:
        self._run_id = run_id
        self._live = Live(self._table({}), console=console, auto_refresh=False)
        self._live.start()

    def show(self, clusters: Mapping[str, Presence]) -> None:
        self._live.update(self._table(clusters), refresh=True)

    def say(self, message: str) -> None:
        self._live.console.print(message)

    def warn(self, message: str) -> None:
        self._live.console.print(f"warning: {message}")

    def close(self) -> None:
        self._live.stop()

    def _table(self, clusters: Mapping[str, Presence]) -> Table:
        table = Table(
            title=f"run {self._run_id}", title_justify="left", caption="Ctrl-C stops", border_style="cyan"
        )
        table.add_column(f"{len(clusters)} clusters")
        table.add_column("name")
        for name in ("state", "processes", "outer step", "loss", "tokens/s"):
            table.add_column(name, justify="right")
        for cluster_id, presence in sorted(clusters.items()):
            table.add_row(
                cluster_id, Text(printable(presence.name, 32)), presence.state, str(len(presence.ranks)),
                f"{presence.t}+{presence.h}", f"{presence.loss:.3f}", f"{presence.tokens_per_s:,.0f}",
            )  # fmt: skip
        return table
