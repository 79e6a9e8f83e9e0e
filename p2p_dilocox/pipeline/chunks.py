"""The chunks of a rank: a span for each, with one tensor where two of them are tied."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from p2p_dilocox.pipeline.cut import build_span
from p2p_dilocox.pipeline.skeleton import Skeleton
from p2p_dilocox.pipeline.span import Span
from p2p_dilocox.placement import Placement

__all__ = ["build_chunks"]


def build_chunks(
    skeleton: Skeleton,
    placement: Placement,
    rank: int,
    cuts: Sequence[range],
    *,
    seed: int,
    device: torch.device,
    documents: bool = False,
    weights: Path | None = None,
) -> list[Span]:
    """What a rank holds, chunk after chunk; arguments and errors as `build_span`."""
    held = [placement.chunks[chunk] for chunk in placement.chunks_of(rank)]
    spans = [
        build_span(
            skeleton, c[0], c[-1], cuts, seed=seed, device=device, documents=documents, weights=weights
        )
        for c in held
    ]
    first, last = spans[0], spans[-1]
    if first.is_first and last.tied_copy is not None:
        assert last.tied_name is not None
        _replace(last.module, last.tied_copy, first.stage_parameters[0][last.tied_name])
        spans[-1] = dataclasses.replace(last, tied_copy=None)
    return spans


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter is old:
                part.register_parameter(name, new)
