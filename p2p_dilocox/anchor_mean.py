"""The mean of the last anchors, for evaluation and export; training does not know of it (CheckpointAvg).

Of parameters along a path with noise the mean is often the better model. Kept in main memory: k copies.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from p2p_dilocox.settings import RunSpec

__all__ = ["AnchorMean", "build_anchor_mean", "mean_of"]

Parameters = Mapping[str, Tensor]


class AnchorMean:
    """Of the last k anchors, one every T outer steps. A cluster that comes back starts to collect again."""

    def __init__(self, k: int, every: int) -> None:
        self._every = every
        self._kept: deque[dict[str, Tensor]] = deque(maxlen=k)

    def take(self, t: int, anchor: Parameters) -> None:
        """The anchor after outer step t, if it is one of those."""
        if t % self._every == 0:
            self._kept.append({name: tensor.detach().cpu().clone() for name, tensor in anchor.items()})

    def mean(self) -> dict[str, Tensor] | None:
        """None until there are two."""
        return mean_of(self._kept) if len(self._kept) > 1 else None


def build_anchor_mean(spec: RunSpec) -> AnchorMean | None:
    """None if the run asks for no mean."""
    return AnchorMean(spec.eval.average, spec.eval.average_every) if spec.eval.average > 1 else None


def mean_of(models: Sequence[Parameters]) -> dict[str, Tensor]:
    """Tensor by tensor, summed in float64, in the dtype of the last."""
    means = {}
    for name, last in models[-1].items():
        total = torch.zeros_like(last, dtype=torch.float64)
        for model in models:
            total += model[name]
        means[name] = (total / len(models)).to(last.dtype)
    return means
