"""What both command line programs share: how an error ends, and how text of strangers is shown."""

import errno
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from p2p_dilocox.errors import DilocoxError, SpecError

__all__ = ["DirectoryName", "Program", "Quantity", "printable"]


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class Program(click.Group):
    """A group of commands. A DilocoxError ends as one line on stderr and its own exit code, see errors.py.

    With -v the traceback comes first. Ctrl-C ends with 130, as shells expect.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DilocoxError as error:
            if ctx.params.get("verbose"):
                click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:  # a disk, a directory: nothing that a traceback would explain
            if ctx.params.get("verbose") or (error.filename is None and error.errno not in _DISK):
                raise
            place = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"error: {place}{error.strerror}", err=True)
            ctx.exit(DilocoxError.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)


class DirectoryName(click.Path):
    """A directory that may be there or not; "" is not the current one but an unset variable in a script."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if value else self.fail("the name is empty.", param, ctx)


class Quantity(click.ParamType[float]):
    """A number with a unit. parse raises SpecError, whose sentence is what the user sees."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return self._parse(str(value))
        except SpecError as error:
            return self.fail(str(error), param, ctx)


def printable(text: str, limit: int = 200) -> str:
    """`text` without control characters, at most `limit` long: what others send may not steer a terminal."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
