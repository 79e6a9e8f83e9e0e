"""Microbatches through the ranks of a cluster, by the schedules of torch.distributed.pipelining.

A rank is one stage to torch, even if it holds several of the run's. Shapes and dtypes between ranks are found
out by torch from the first microbatch; so there is one schedule object per shape of batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from p2p_dilocox.errors import SpecError
from p2p_dilocox.pipeline.reading import NO_TOKEN

__all__ = ["SCHEDULES", "Microbatches", "TokenLoss", "alone", "over_ranks"]

Microbatches = Callable[[Tensor, Tensor, dict[str, Any]], Tensor | None]
"""(inputs int64 [B, T], targets int64 [B, T], what else every stage is called with, [B, ...] by name) -> loss
per target of the batch, float32 [], on the last rank, else None."""

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


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
    module: nn.Module,
    microbatches: int,
    rank: int,
    num_ranks: int,
    device: torch.device,
    *,
    schedule: str,
    training: bool,
) -> Microbatches:
    """This rank's part of a pipeline over the default process group. Averages gradients over microbatches.

    schedule: a name in SCHEDULES. It may be used for one shape of
    inputs only, and all ranks must call it together.
    """
    if training and schedule == "1f1b" and microbatches < num_ranks:
        raise SpecError(
            f"inner.microbatches = {microbatches}, must be at least {num_ranks}, the ranks of this cluster, "
            'for schedule = "1f1b". Use more microbatches, fewer devices, or schedule = "gpipe"'
        )
    stage = PipelineStage(module, rank, num_ranks, device)
    # An object of its own for evaluation: torch works out shapes anew whenever one object changes between the
    # two.
    kind = SCHEDULES[schedule] if training else ScheduleGPipe
    loss_of: list[TokenLoss] = []
    order = kind(stage, microbatches, loss_fn=lambda logits, targets: loss_of[-1](logits, targets))
    step = order.step if training else order.eval

    def run(inputs: Tensor, targets: Tensor, beside: dict[str, Any]) -> Tensor | None:
        losses: list[Tensor] = []
        loss_of[:] = [TokenLoss(targets, microbatches)]
        first = [inputs] if stage.is_first else []
        step(*first, target=targets, losses=losses, return_outputs=False, **beside)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return run
