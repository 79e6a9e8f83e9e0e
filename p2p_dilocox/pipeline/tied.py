"""One tensor at both ends of a pipeline: the embedding of stage 0, which owns it, and the last stage's head.

Both ranks add up both gradients, in bits the same sum, and take the same optimizer step, so the copies stay
equal without being sent. The copy counts in no gradient norm and is never averaged or saved.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from p2p_dilocox.pipeline.span import Span

__all__ = ["TiedEnd", "tied_end"]


class TiedEnd:
    """The tied tensor as one of its two ranks sees it. Every call must be made by both, in the same order."""

    def __init__(self, parameter: nn.Parameter, other_rank: int, *, owns: bool) -> None:
        self.parameter = parameter
        self.other_rank = other_rank
        self.owns = owns

    def sum_grads_(self) -> None:
        """Both gradients become their sum. a + b equals b + a in
        floating point, so both holders agree in bits."""
        grad = self.parameter.grad
        if grad is None:
            grad = self.parameter.grad = torch.zeros_like(self.parameter)
        theirs = torch.empty_like(grad)
        send = dist.P2POp(dist.isend, grad, self.other_rank)
        receive = dist.P2POp(dist.irecv, theirs, self.other_rank)
        for work in dist.batch_isend_irecv([send, receive] if self.owns else [receive, send]):
            work.wait()
        grad.add_(theirs)

    @torch.no_grad()
    def sync_(self) -> None:
        """The copy becomes the owner's tensor."""
        value: Tensor = self.parameter.data
        if self.owns:
            dist.send(value, self.other_rank)
        else:
            dist.recv(value, self.other_rank)


def tied_end(spans: Sequence[Span], num_ranks: int) -> TiedEnd | None:
    """spans: of a rank. None where nothing has to be sent: no tied tensor, neither end is here, or both."""
    first, last = spans[0], spans[-1]
    if first.tied_name is None or first.is_first == last.is_last:
        return None
    if first.is_first:
        return TiedEnd(first.stage_parameters[0][first.tied_name], num_ranks - 1, owns=True)
    assert last.tied_copy is not None
    return TiedEnd(last.tied_copy, 0, owns=False)
