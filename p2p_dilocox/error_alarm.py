"""A warning for error buffers that grow."""

__all__ = ["ErrorAlarm"]

_ERROR_LIMIT, _ERROR_STEPS = 3.0, 3


class ErrorAlarm:
    """Speaks once, when the error buffer was over 3 times the fresh movement for 3 outer steps running.

    Local feedback behind a codec that keeps the fraction c of the energy holds at most
    sqrt(1 - c) / (1 - gamma sqrt(1 - c)) of it; more means that what is sent is mostly old, and that a lr
    which was stable is not. Feedback `paper` grows with every outer step and always comes here.
    """

    def __init__(self) -> None:
        self._running, self._silent = 0, False

    def hear(self, ratio: float | None) -> str:
        """ratio: |error| / |fresh| of an outer step, None if not known. A sentence, or "" if all is well."""
        if ratio is None or self._silent:
            return ""
        self._running = self._running + 1 if ratio > _ERROR_LIMIT else 0
        if self._running < _ERROR_STEPS:
            return ""
        self._silent = True
        return (
            f"the error buffer is {ratio:.1f} times what this cluster moves in an outer step, above "
            f"{_ERROR_LIMIT:g} for {_ERROR_STEPS} outer steps: contributions are mostly old. The run needs a "
            'smaller compression.gamma, a larger compression.lowrank, or compression.feedback = "local"'
        )
