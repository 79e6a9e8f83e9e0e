"""A mixture of experts without a router's choice: for shapes only.

Hugging Face's experts look which tokens chose them, and there are no tokens here. So each expert gets equally
many, in the steps of their own loop.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["share_experts_equally"]

_NAME = "dilocox_equal_shares"


def share_experts_equally(model: PreTrainedModel) -> None:
    """Changes `model`; one without experts stays as it is."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _equal_shares)
    model.config._experts_implementation = _NAME


def _equal_shares(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden: [tokens, width]. chosen: int64 [tokens, k]. weights: [tokens, k]."""
    total = torch.zeros_like(hidden)
    share = -(-chosen.numel() // experts.num_experts)
    for expert in range(experts.num_experts):
        rows = torch.zeros(share, dtype=torch.long, device=hidden.device)
        mixed = functional.linear(hidden[rows], experts.gate_up_proj[expert])
        mixed = functional.linear(experts._apply_gate(mixed), experts.down_proj[expert])
        mixed = mixed * weights[rows, 0, None]
        total.index_add_(0, rows, mixed.to(total.dtype))
    return total
