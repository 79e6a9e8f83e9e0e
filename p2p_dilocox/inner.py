"""The inner optimizer: AdamW on a cluster's own data, with a
learning rate that depends on the inner step's number only.

So all clusters train at the same rate in the same outer step, however late one has joined (field report C9).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from p2p_dilocox.runspec import Inner

__all__ = ["InnerOptimizer", "learning_rate"]


def learning_rate(inner: Inner, step: int, total_steps: int) -> float:
    """Rate of inner step `step` (0-based) of `total_steps`: linear
    warm-up, then constant, or cosine to the final rate."""
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    if inner.lr_schedule == "constant":
        return inner.lr
    progress = min(1.0, (step - inner.warmup_steps) / max(1, total_steps - inner.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return inner.lr * (inner.final_lr_fraction + (1.0 - inner.final_lr_fraction) * cosine)


class InnerOptimizer:
    """torch.optim.AdamW over a rank's parameters; vectors are
    not decayed. Outer steps leave its state alone."""

    def __init__(self, parameters: Iterable[nn.Parameter], inner: Inner, total_steps: int) -> None:
        self._inner, self._total_steps = inner, total_steps
        self._parameters = list(parameters)
        groups = [
            {"params": [p for p in self._parameters if p.dim() >= 2], "weight_decay": inner.weight_decay},
            {"params": [p for p in self._parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        # On a GPU the unfused step holds one more copy of all parameters for a moment.
        self._fused = all(p.is_cuda for p in self._parameters)
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=inner.lr,
            betas=inner.betas,
            eps=inner.eps,
            fused=self._fused,
        )

    def step(self, number: int) -> float:
        """Inner step `number` of the whole run, 0-based. Returns the learning rate it took."""
        lr = learning_rate(self._inner, number, self._total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return lr

    def state(self) -> dict[str, Tensor]:
        """exp_avg, exp_avg_sq and step of every parameter, by position; empty before the first step."""
        return {
            f"{index}/{key}": torch.as_tensor(value)
            for index, parameter in enumerate(self._parameters)
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            index, key = name.split("/")
            parameter = self._parameters[int(index)]
            where = value.device if key == "step" and not self._fused else parameter.device
            self._adamw.state[parameter][key] = value.to(where).clone()
