"""The inner optimizer: AdamW on a cluster's own data, with a
learning rate that depends on the inner step's number only.

So all clusters train at the same rate in the same outer step, however late one has joined (field report C9).
"""

import importlib
import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from p2p_dilocox.errors import SpecError, StateError
from p2p_dilocox.runspec import Inner

__all__ = ["InnerOptimizer", "check_bits", "learning_rate"]


def learning_rate(inner: Inner, step: float, total_steps: int) -> float:
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
    """AdamW over a rank's parameters; vectors are not decayed. Outer steps leave its state alone."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], inner: Inner, total_steps: int, *, bits: int = 32
    ) -> None:
        """bits: of each moment. 32: torch.optim.AdamW. 8: bitsandbytes (arXiv 2110.02861), in blocks of 256
        values; parameters of less than 4096 values keep 32. Raises SpecError if it is not installed."""
        self._inner, self._total_steps, self._bits = inner, total_steps, bits
        self._parameters = list(parameters)
        groups = [
            {"params": [p for p in self._parameters if p.dim() >= 2], "weight_decay": inner.weight_decay},
            {"params": [p for p in self._parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        options: dict[str, Any] = {"lr": inner.lr, "betas": inner.betas, "eps": inner.eps}
        self._adamw: torch.optim.Optimizer
        if bits == 32:
            # Fused: a third of the time on a CPU; on a GPU also without one more copy of all parameters.
            self._adamw = torch.optim.AdamW(groups, **options, fused=True)
        else:
            check_bits(bits)
            self._adamw = importlib.import_module("bitsandbytes.optim").AdamW8bit(groups, **options)

    def step(self, number: float) -> float:
        """Inner step `number` of the whole run, 0-based. Returns the learning rate it took."""
        lr = learning_rate(self._inner, number, self._total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return lr

    def state(self) -> dict[str, Tensor]:
        """The moments and the step of every parameter, by position; empty before the first step."""
        return {  # copies of the code table, which all parameters share: safetensors refuses shared memory
            f"{index}/{key}": value.clone() if key.startswith("qmap") else torch.as_tensor(value)
            for index, parameter in enumerate(self._parameters)
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises StateError if it is of an optimizer with other bits."""
        saved_bits = 32 if not state or any(name.endswith("/exp_avg") for name in state) else 8
        if state and saved_bits != self._bits:
            raise StateError(
                f"AdamW's moments are of {saved_bits} bits in the checkpoint, of {self._bits} here. Use "
                f"--adamw-bits {saved_bits}, or another --state-dir, which starts from the others' state."
            )
        for name, value in state.items():
            index, key = name.split("/")
            parameter = self._parameters[int(index)]
            if key == "step" and self._bits == 8:
                self._adamw.state[parameter][key] = int(value)
                continue
            self._adamw.state[parameter][key] = value.to(parameter.device).clone()


def check_bits(bits: int) -> None:
    """SpecError if what AdamW needs for moments of so many bits is not installed. Loads nothing."""
    if bits == 8 and importlib.util.find_spec("bitsandbytes") is None:
        raise SpecError(
            "AdamW in 8 bits needs bitsandbytes, which is not installed. Add it with pip install "
            "'p2p-dilocox[adamw8bit]', or leave out --adamw-bits 8."
        )
