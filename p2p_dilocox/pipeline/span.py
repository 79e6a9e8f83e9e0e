"""The part of a model that one rank runs: what it holds, its forward, and what stands in for the rest."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["Entry", "PassThrough", "Span", "SpanModule", "Zero"]


class PassThrough(nn.Module):
    """Stands where another stage's module was: returns its input, in the form the real module would.

    outputs: 0 for a tensor, else the length of the tuple.
    """

    def __init__(self, replaced: nn.Module, outputs: int) -> None:
        super().__init__()
        _take_settings(self, replaced)
        self.outputs = outputs

    def forward(
        self, hidden_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> Any:  # called as the family calls layers
        return _shaped(hidden_states, self.outputs)


class Entry(PassThrough):
    """Layer 0 of a span that starts later: returns what another rank sent, whatever it is called with."""

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        received, self.received = (
            self.received,
            None,
        )  # the schedule, not the module, decides how long it lives
        assert received is not None
        return _shaped(received, self.outputs)


class Zero(nn.Module):
    """Stands where an embedding of stage 0 was, in models that add embeddings on the way to the layers."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        _take_settings(self, replaced)

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.zeros(())


def _take_settings(module: nn.Module, replaced: nn.Module) -> None:
    """Models read plain settings off their layers, such as which mask a layer wants."""
    for key, value in replaced.__dict__.items():
        if not key.startswith("_") and key != "training":
            setattr(module, key, value)


def _shaped(hidden: Tensor, outputs: int) -> Any:
    return (hidden, *[None] * (outputs - 1)) if outputs else hidden


class SpanModule(nn.Module):
    """Forward of one span: token ids or hidden -> hidden, or logits on the last.

    token ids: int64 [b, T]. hidden: float [b, T, width]. logits: float [b, T, vocab].
    """

    def __init__(self, model: PreTrainedModel, entry: Entry | None, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self.entry = entry
        self.is_last = is_last
        self.autocast_dtype: torch.dtype | None = None
        """dtype of matrix products; None: float32 throughout."""

    def forward(self, x: Tensor) -> Tensor:
        enabled = self.autocast_dtype is not None
        with torch.autocast(x.device.type, dtype=self.autocast_dtype or torch.bfloat16, enabled=enabled):
            # The head is part of the model's own forward: some families scale or cap logits there.
            body = self.model if self.is_last else self.model.base_model
            if self.entry is None:
                output = body(input_ids=x, use_cache=False)
            else:
                self.entry.received = x
                # Only shape, dtype and device of inputs_embeds matter: `entry` replaces what is made of it.
                output = body(inputs_embeds=x.detach(), use_cache=False)
        result: Tensor = output.logits if self.is_last else output.last_hidden_state
        return result


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive stages of the model, as one rank holds them."""

    module: SpanModule
    stage_parameters: dict[int, dict[str, nn.Parameter]]
    """Stage -> Hugging Face name -> parameter, for the stages of this span."""
    stages: range
    num_stages: int
    """Of the whole model."""
    num_parameters: int
    """Of the whole model; a tied tensor counts once."""
    embedding_names: frozenset[str]
    """Of the whole model: parameters of its embeddings and of its output head, which have no low rank."""
    tied_name: str | None
    """The embedding that is also the head, in every span of such a model. Stage 0 owns it."""
    tied_copy: nn.Parameter | None
    """The last stage's copy of it. None where this span holds both ends, which then are one tensor."""

    @property
    def is_first(self) -> bool:
        return self.stages.start == 0

    @property
    def is_last(self) -> bool:
        return self.stages.stop == self.num_stages
