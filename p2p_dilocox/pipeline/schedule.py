"""Microbatches through the ranks of a cluster, by the schedules of torch.distributed.pipelining.

A chunk of the placement is a stage to torch. It finds out shapes and dtypes between ranks from the first
microbatch; so there is one schedule object per shape of batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from p2p_dilocox.pipeline.reading import NO_TOKEN
from p2p_dilocox.placement import Placement

__all__ = ["Microbatches", "TokenLoss", "alone", "over_ranks", "without_gradients"]

Microbatches = Callable[[Tensor, Tensor, dict[str, Any]], Tensor | None]
"""(inputs int64 [B, T], targets int64 [B, T], what else every stage is called with, [B, ...] by name) -> loss
per target of the batch, float32 [], at the last chunk, else None."""

_OF_ONE_CHUNK = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_OF_SEVERAL = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TokenLoss:
    """Cross entropy of microbatches in nats. Its mean over them is the mean over all targets of the batch,
    however many of them each microbatch has."""

    def __init__(self, targets: Tensor, microbatches: int) -> None:
        """targets: of the batch, int64 [B, T]; NO_TOKEN is no target."""
        self.usual_targets = (targets != NO_TOKEN).sum().clamp(min=1) / microbatches

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """float32 []. logits: float [b, T, vocab]; targets: int64 [b, T]."""
        logits, targets = logits.float().flatten(0, 1), targets.flatten()
        summed = functional.cross_entropy(logits, targets, ignore_index=NO_TOKEN, reduction="sum")
        return summed / self.usual_targets


def alone(module: nn.Module, microbatches: int, *, training: bool) -> Microbatches:
    """The whole model on one rank; needs no process group. Gradients are averaged over microbatches."""

    def run(inputs: Tensor, targets: Tensor, beside: dict[str, Any]) -> Tensor:
        loss_of, loss = TokenLoss(targets, microbatches), torch.zeros((), device=inputs.device)
        values = [tensor.chunk(microbatches) for tensor in (inputs, targets, *beside.values())]
        for x, y, *others in zip(*values, strict=True):
            part = loss_of(module(x, **dict(zip(beside, others, strict=True))), y) / microbatches
            if training:
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        return loss

    return run


def over_ranks(
    modules: Mapping[int, nn.Module],
    placement: Placement,
    microbatches: int,
    device: torch.device,
    *,
    schedule: str,
) -> Microbatches:
    """This rank's part of a step over the default process group. Gradients are averaged over microbatches.

    modules: its chunks by number. schedule: of placement.SCHEDULES, one that `check_microbatches` lets pass.
    The result may be used for one shape of inputs only, and all ranks must call it together.
    """
    stages = [PipelineStage(m, chunk, len(placement.chunks), device) for chunk, m in modules.items()]
    loss_of: list[TokenLoss] = []
    # The loss is divided here: torch would divide gradients chunk by chunk, and a tied tensor that is in two
    # chunks of this rank twice.
    options: dict[str, Any] = {
        "loss_fn": lambda logits, targets: loss_of[-1](logits, targets) / microbatches, "scale_grads": False,
    }  # fmt: skip
    order: Any
    if schedule in _OF_ONE_CHUNK:
        order = _OF_ONE_CHUNK[schedule](stages[0], microbatches, **options)
    else:
        order = _OF_SEVERAL[schedule](list(stages), microbatches, **options)

    def run(inputs: Tensor, targets: Tensor, beside: dict[str, Any]) -> Tensor | None:
        losses: list[Tensor] = []
        loss_of[:] = [TokenLoss(targets, microbatches)]
        first = [inputs] if 0 in modules else []
        order.step(*first, target=targets, losses=losses, return_outputs=False, **beside)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    return run


def without_gradients(
    modules: Mapping[int, nn.Module], placement: Placement, microbatches: int, rank: int
) -> Microbatches:
    """As `over_ranks`, forward only: torch's schedules for several chunks have no such mode that fits all.

    Each chunk takes all microbatches, then the next one does; what has been computed is on its way meanwhile.
    """
    last = len(placement.chunks) - 1
    kinds: dict[int, tuple[torch.Size, torch.dtype]] = {}  # of what enters each chunk

    def run(inputs: Tensor, targets: Tensor, beside: dict[str, Any]) -> Tensor | None:
        loss_of, loss = TokenLoss(targets, microbatches), None
        kept: dict[int, Tensor] = {}  # for our next chunk
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for chunk, module in modules.items():
            before = placement.ranks[chunk - 1] if chunk > 0 else None
            after = placement.ranks[chunk + 1] if chunk < last else None
            values = [tensor.chunk(microbatches) for tensor in (inputs, targets, *beside.values())]
            for number, (x, y, *others) in enumerate(zip(*values, strict=True)):
                if before == rank:
                    x = kept.pop(number)
                elif before is not None:
                    if chunk not in kinds:
                        kinds[chunk] = _receive_kind(before, x.device)
                    x = x.new_empty(kinds[chunk][0], dtype=kinds[chunk][1])
                    dist.recv(x, before)
                output = module(x, **dict(zip(beside, others, strict=True)))
                if after == rank:
                    kept[number] = output
                elif after is not None:
                    if chunk + 1 not in kinds:
                        kinds[chunk + 1] = _send_kind(output, after)
                    sent.append((dist.isend(output.contiguous(), after), output))
                else:
                    part = loss_of(output, y) / microbatches
                    loss = part if loss is None else loss + part
        for work, _ in sent:
            if work is not None:
                work.wait()
        return loss

    return run


def _send_kind(tensor: Tensor, rank: int) -> tuple[torch.Size, torch.dtype]:
    dist.send(torch.tensor([*tensor.shape, _DTYPES.index(tensor.dtype)], device=tensor.device), rank)
    return tensor.shape, tensor.dtype


def _receive_kind(rank: int, device: torch.device) -> tuple[torch.Size, torch.dtype]:
    """Of a hidden state, [b, T, width]."""
    header = torch.empty(4, dtype=torch.int64, device=device)
    dist.recv(header, rank)
    *shape, dtype = header.tolist()
    return torch.Size(shape), _DTYPES[dtype]
