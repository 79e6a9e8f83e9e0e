"""One good guess for a name that was not found."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?", or nothing if no known name is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
