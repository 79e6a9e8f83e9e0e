"""What the stages read of a batch. Every stage works it out from the same tokens, so nothing but the hidden
state has to cross a boundary.

b: sequences   T: tokens of a sequence that predict the next one
"""

import torch
from torch import Tensor

__all__ = ["NO_TOKEN", "apart", "inputs_and_targets", "positions_in_documents"]

NO_TOKEN = -1
"""In a batch: padding. As a target: not to be predicted."""


def inputs_and_targets(tokens: Tensor, document_end: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [b, T] each, of tokens [b, T + 1]. Padding stands at the end of a sequence.

    No input sees what follows it, so padding needs no mask: it may be any token, and is never a target.
    document_end: if documents are kept apart, the token that ends one. What follows it is no target then:
    nothing that may be looked at tells how a document begins.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if document_end is not None:
        targets = targets.masked_fill(inputs == document_end, NO_TOKEN)
    return inputs.clamp(min=0), targets


def positions_in_documents(inputs: Tensor, document_end: int) -> Tensor:
    """Position of each token in its document, int64 [b, T]. The first document of a row begins at 0, wherever
    it was cut."""
    index = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    begins = torch.zeros_like(inputs)
    begins[:, 1:] = torch.where(inputs[:, :-1] == document_end, index[:, 1:], 0)
    return index - begins.cummax(dim=1).values


def apart(positions: Tensor) -> Tensor:
    """Who may look at whom: bool [b, 1, T, T], True for earlier tokens of the same document and the token
    itself. positions: as above."""
    index = torch.arange(positions.shape[1], device=positions.device)
    begins = index - positions
    same = begins[:, :, None] == begins[:, None, :]
    return (same & (index[:, None] >= index[None, :]))[:, None]
