"""Microbatches through the ranks of a cluster, by the schedules of torch.distributed.pipelining.

A rank is one stage to torch, even if it holds several of the run's. Shapes and dtypes between ranks are found
out by torch from the first microbatch; so there is one schedule object per shape of batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from p2p_dilocox.errors import SpecError

__all__ = ["SCHEDULES", "Microbatches", "alone", "over_ranks", "token_loss"]

Microbatches = Callable[[Tensor, Tensor], Tensor | None]
"""(inputs int64 [B, T], targets int64 [B, T]) -> mean loss, float32 [], on the last rank, else None."""

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy per token in nats, float32. logits: float [b, T, vocab]; targets: int64 [b, T]."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def alone(module: nn.Module, microbatches: int, *, training: bool) -> Microbatches:
    """The whole model on one rank; needs no process group. Gradients are averaged over microbatches."""

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = torch.zeros((), device=inputs.device)
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            part = token_loss(module(x), y) / microbatches
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
    order = kind(stage, microbatches, loss_fn=token_loss)
    step = order.step if training else order.eval

    def run(inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        step(*([inputs] if stage.is_first else []), target=targets, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return run
