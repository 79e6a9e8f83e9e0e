"""Outer steps that a cluster takes alone, on its own movement, at their own frequency: single-node DiLoCo.

Every n inner steps: v <- m v + delta; theta_i <- start - lr (delta + m v) with delta = start - theta_i, and
the next ones start from there. No byte is sent. To the rounds it is movement like any other, so it goes with
every recipe; FedAvg of clusters that do it every H inner steps is DiLoCo, exactly.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from p2p_dilocox.outer_step import Average, nesterov_
from p2p_dilocox.settings import Local

__all__ = ["LocalOuter", "build_local_outer"]

Parameters = Mapping[str, Tensor]


def build_local_outer(local: Local, parameters: Parameters) -> "LocalOuter | None":
    """None if the run has no local outer steps."""
    return LocalOuter(local, parameters) if local.every else None


class LocalOuter:
    """`start`: theta_i after the last local outer step. `momentum`: v. Both like the parameters, and this
    cluster's own."""

    def __init__(self, local: Local, parameters: Parameters) -> None:
        self._local = local
        self.start = {name: p.detach().clone() for name, p in parameters.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.start.items()}

    @torch.no_grad()
    def step_(self, parameters: Parameters, number: int) -> bool:
        """After inner step `number` of the run, from 1. Whether a local outer step was due, and is taken."""
        if number % self._local.every:
            return False
        for name, theta_i in parameters.items():
            start, v = {name: self.start[name]}, {name: self.momentum[name]}
            delta = Average(dense={name: self.start[name] - theta_i})
            nesterov_(start, v, delta, lr=self._local.lr, beta=self._local.momentum, nesterov=True)
            theta_i.copy_(self.start[name])
        return True

    @contextlib.contextmanager
    def moved_(self, parameters: Parameters) -> Iterator[None]:
        """Within it a round moves theta_i: what was moved since the last local outer step stays the same."""
        self._shift_(parameters, -1.0)
        yield
        self._shift_(parameters, 1.0)

    @torch.no_grad()
    def reset_(self, parameters: Parameters) -> None:
        """What was moved since the last local outer step is given up."""
        for name, theta_i in parameters.items():
            self.start[name].copy_(theta_i)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        starts = {f"start/{name}": tensor for name, tensor in self.start.items()}
        return starts | {f"momentum/{name}": tensor for name, tensor in self.momentum.items()}

    @torch.no_grad()
    def _shift_(self, parameters: Parameters, sign: float) -> None:
        for name, theta_i in parameters.items():
            self.start[name].add_(theta_i, alpha=sign)
