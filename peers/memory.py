"""What a rank says when its memory is not enough."""

import contextlib
from collections.abc import Iterator

import torch

from p2p_dilocox.errors import OutOfMemoryError

__all__ = ["memory_errors_named"]

# How torch's allocator of main memory, and C++ under Python, say it; the GPU's has an exception of its own.
_PHRASES = ("can't allocate memory", "bad_alloc", "bad allocation", "Cannot allocate memory")


@contextlib.contextmanager
def memory_errors_named(device: str) -> Iterator[None]:
    """Turns the errors of a failed allocation into OutOfMemoryError, and lets all others pass."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        cause = next(filter(_is_of_memory, _chain(error)), None)
        if cause is None:
            raise
        first = next(iter(str(cause).strip().splitlines()), "no more than that")[:200]
        where = device if isinstance(cause, torch.OutOfMemoryError) else "main memory"
        raise OutOfMemoryError(
            f"out of memory ({where}): {first}. More --microbatches, --offload, --adamw-bits 8 or more "
            "devices need less."
        ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from: torch's pipeline wraps all that goes wrong in a backward pass."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(p in str(error) for p in _PHRASES)
