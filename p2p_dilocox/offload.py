"""Tensors that live in main memory and are worked on at a GPU, a piece at a time.

The arithmetic runs where it would run without offloading, on the same bits, so its results are the same.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["borrowed", "picked", "shown_in", "slices", "stored"]


def stored(like: Tensor, *, dtype: torch.dtype, offload: bool) -> Tensor:
    """Zeros of the shape of `like`, beside it, or with `offload` in main memory, pinned if there is CUDA.

    Pinned memory is what a GPU copies from without a detour. torch takes it in powers of two.
    """
    if not offload:
        return torch.zeros_like(like, dtype=dtype)
    return torch.zeros(like.shape, dtype=dtype, pin_memory=torch.cuda.is_available())


@contextlib.contextmanager
def borrowed(device: torch.device, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors on `device`: themselves, or copies whose values go back at the end."""
    here = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
    yield here
    for tensor, copy in zip(tensors, here, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def slices(
    device: torch.device, size: int, written: Sequence[Tensor], read: Sequence[Tensor] = ()
) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape side by side on `device`, `written` first, flat, at most `size` values at a time.

    What is done to a slice of `written` is in its tensor when the next slice comes. Contiguous tensors only.
    """
    flat = [tensor.detach().view(-1) for tensor in (*written, *read)]
    for start in range(0, flat[0].numel(), size):
        parts = [tensor[start : start + size] for tensor in flat]
        constant = tuple(part.to(device, non_blocking=True) for part in parts[len(written) :])
        with borrowed(device, *parts[: len(written)]) as changing:
            yield (*changing, *constant)


def picked(
    device: torch.device, size: int, places: Tensor | None, written: Sequence[Tensor], read: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """As slices; with places, int64 [k], the values there alone, all at once."""
    if places is None:
        yield from slices(device, size, written, read)
        return
    flat = [tensor.detach().view(-1) for tensor in (*written, *read)]
    chosen = [tensor[places.to(tensor.device)] for tensor in flat]
    yield from slices(device, max(1, len(places)), chosen[: len(written)], chosen[len(written) :])
    for tensor, values in zip(flat, chosen[: len(written)], strict=False):
        tensor[places.to(tensor.device)] = values


@contextlib.contextmanager
def shown_in(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, copy: bool
) -> Iterator[None]:
    """Within it the parameters have the values of `tensors`; afterwards theirs again, bit for bit.

    They borrow the tensors. copy: they take the values, and their own wait in main memory; for tensors that
    are elsewhere.
    """
    kept = {name: p.data.cpu().clone() if copy else p.data for name, p in parameters.items()}
    try:
        _give(parameters, tensors, copy=copy)
        yield
    finally:
        _give(parameters, kept, copy=copy)


@torch.no_grad()
def _give(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, copy: bool) -> None:
    for name, parameter in parameters.items():
        if copy:
            parameter.copy_(tensors[name])
        else:
            parameter.data = tensors[name]
