"""The part of a model that one rank runs: what it holds, its forward, and what stands in for the rest."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from p2p_dilocox.pipeline.init import stream_of
from p2p_dilocox.pipeline.reading import apart, positions_in_documents

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


class Entry:
    """A hook before layer 0 of a span that starts later, or before what stands there: it is called with what
    another rank sent, whatever the model would have given it."""

    received: Tensor | None = None

    def __call__(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        received, self.received = (
            self.received,
            None,
        )  # the schedule, not the module, decides how long it lives
        assert received is not None
        return ((received, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": received})


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

    Dropout draws from a random stream for each layer, microbatch and inner step, whose seed follows from
    their names. So it drops the same in every cut, and again when a layer is computed again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[str, nn.Module],
        last_layer: nn.Module,
        entry: Entry | None,
        is_last: bool,
        *,
        draws: bool,
        documents: Literal["positions", "mask", ""],
    ) -> None:
        """layers: those of this span by their names in the whole model. last_layer: the last of them, or what
        stands where they would be. draws: the model drops out.
        documents: what the model must be given to keep the documents of a sequence apart; "": nothing."""
        super().__init__()
        self.model = model
        self.entry = entry
        self.is_last = is_last
        self.draws = draws
        self.documents = documents
        self.document_end: int | None = None
        """The token that ends a document, where documents are kept apart."""
        self.autocast_dtype: torch.dtype | None = None
        """dtype of matrix products; None: float32 throughout."""
        self.checkpointing = False
        """Keep the input of a layer only, and compute the layer again in the backward pass."""
        self.stream = ""
        """Names the inner step for whatever draws random numbers. The same on all ranks."""
        self._row = 0
        self._left: Tensor | None = None
        for name, layer in layers.items():
            layer.forward = functools.partial(self._run_layer, layer.forward, name)
        last_layer.register_forward_hook(self._layers_done)

    def forward(self, x: Tensor, tokens: Tensor | None = None, row: Tensor | None = None) -> Tensor:
        """x: token ids or hidden. tokens: int64 [b, T], if documents are kept apart. row: int64 [b], numbers
        of the sequences in their batch, if the model drops out."""
        self._row = int(row[0]) if row is not None else 0
        inputs: dict[str, Any] = {"use_cache": False}
        if tokens is not None and self.document_end is not None:
            inputs["position_ids"] = positions_in_documents(tokens, self.document_end)
            if self.documents == "mask":
                inputs["attention_mask"] = apart(inputs["position_ids"])
        if self.entry is None:
            inputs["input_ids"] = x
        else:
            self.entry.received = x
            # Only shape, dtype and device of inputs_embeds matter: `entry` replaces what is made of it.
            inputs["inputs_embeds"] = x.detach()
        enabled, trains = self.autocast_dtype is not None, torch.is_grad_enabled()
        dtype = self.autocast_dtype or torch.bfloat16
        with (
            # Copies of weights made without gradients, as in torch's trial run, must not serve later passes.
            torch.autocast(x.device.type, dtype=dtype, enabled=enabled, cache_enabled=trains),
            self._drawing("before the layers", x.device),
        ):
            # The head is part of the model's own forward: some families scale or cap logits there.
            output = (self.model if self.is_last else self.model.base_model)(**inputs)
        left, self._left = self._left, None
        if self.is_last:
            logits: Tensor = output.logits
            return logits
        assert left is not None
        return left  # and not last_hidden_state: a norm without parameters may have come after it

    def _run_layer(self, layer: Callable[..., Any], name: str, *args: Any, **_kwargs: Any) -> Any:
        seed = self._seed(name)  # now: when a layer is computed again, another microbatch may be under way
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(
                _draw_and_run, layer, seed, args, _kwargs, use_reentrant=False, preserve_rng_state=False
            )
        return _draw_and_run(layer, seed, args, _kwargs)

    def _layers_done(self, _layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._left = output[0] if isinstance(output, tuple) else output
        if (seed := self._seed("after the layers")) is not None:
            torch.manual_seed(seed)

    def _seed(self, name: str) -> int | None:
        if not (self.draws and self.model.training):
            return None
        return stream_of(f"{self.stream}/{self._row}/{name}")

    def _drawing(self, name: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
        seed = self._seed(name)
        return contextlib.nullcontext() if seed is None else _drawing_from(seed, device)


def _draw_and_run(
    layer: Callable[..., Any], seed: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if seed is None:
        return layer(*args, **kwargs)
    hidden = args[0] if args else kwargs["hidden_states"]
    with _drawing_from(seed, hidden.device):
        return layer(*args, **kwargs)


@contextlib.contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """torch draws from a stream of its own here, and goes on afterwards as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


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
