"""What a microbatch takes on a rank, found by running the rank's part of the model without values.

No formula per family: the model's own forward and backward run on torch's fake tensors, which have shapes
and storages but no memory, and every storage is counted while it lives. So logits, saved inputs, copies of
weights in bf16 and recomputation are in it as they are in a real step.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from p2p_dilocox.errors import ModelError
from p2p_dilocox.pipeline import Span
from p2p_dilocox.plan.experts import share_experts_equally

__all__ = ["Activations", "in_flight", "measure_activations", "step_bytes"]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one microbatch on one rank, parameters not included."""

    kept: int
    """From its forward to its backward, beside what all microbatches share: copies of weights in bf16."""
    first: int
    """Most while it goes forward and back and the gradients come into being; they are included, and what is
    shared."""
    later: int
    """Most while it goes forward and back and adds to gradients that are there; those are not included, what
    is shared is."""
    hidden: int
    """What it sends to the next rank; 0 on the last."""


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that live now (`now`) and at most did (`peak`), but for those of `known`."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def measure_activations(span: Span, microbatch: int, seq_len: int) -> Activations:
    """Of a span on the meta device (`build_span`), which is of no use afterwards. Takes 0.1 s per layer.

    microbatch: sequences. The span's settings count: autocast dtype, checkpointing, documents apart. Raises
    ModelError for a model whose shapes depend on its data.
    """
    module = span.module
    share_experts_equally(module.model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", enabled=False):  # as Pipeline
            module.to_empty(device="cpu")
            return _two_microbatches(module, span, microbatch, seq_len)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        why = str(error).splitlines()[0][:200]
        raise ModelError(f"the activations of this model cannot be counted: {why}") from error


def _two_microbatches(module: nn.Module, span: Span, microbatch: int, seq_len: int) -> Activations:
    targets = torch.zeros(microbatch, seq_len, dtype=torch.long)
    tokens = targets if span.module.document_end is not None else None
    if span.is_first:
        inputs = targets
    else:
        width = span.module.model.config.hidden_size
        inputs = torch.zeros(microbatch, seq_len, width, requires_grad=True)
    live = _LiveBytes([*module.parameters(), *module.buffers()])
    grads, found, hidden = 0, [], 0
    for _ in range(2):
        before = live.peak = live.now
        with live:
            output = module(inputs, tokens=tokens)
            result = output
            if span.is_last:
                result = functional.cross_entropy(output.float().flatten(0, 1), targets.flatten())
                if span.is_first:  # torch's schedules keep what a stage has returned, `alone` does not
                    output = result
            hidden = 0 if span.is_last else output.untyped_storage().nbytes()
            kept = live.now - before
            result.backward(None if span.is_last else torch.ones_like(result))
            del output, result
        inputs.grad = None
        found.append((kept, live.peak - grads))
        grads = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    return Activations(kept=found[1][0], first=found[0][1], later=found[1][1], hidden=hidden)


def in_flight(schedule: str, microbatches: int, rank: int, ranks: int, chunks: int = 1) -> int:
    """Passes of a microbatch through a chunk of which a rank keeps activations at once, at most.

    chunks: of this rank. As torch orders them; with zero bubbles also those whose weights wait for gradients.
    """
    if ranks == 1:
        return 1
    if schedule == "gpipe":
        return microbatches
    at_once = microbatches // max(1, microbatches // ranks)
    most = {
        "1f1b": ranks - rank,
        "interleaved-1f1b": (chunks - 1) * at_once + 2 * (ranks - 1 - rank) + 1,
        "interleaved-zero-bubble": (chunks - 1) * at_once + ranks,
        "zbv": 2 * ranks,
    }
    return min(chunks * microbatches, most[schedule])


def step_bytes(of_one: Activations, gradients: int, passes: int, flying: int) -> int:
    """Most that forward, backward and gradients together take in an inner step of so many passes."""
    first = of_one.first + (flying - 1) * of_one.kept
    if passes == 1:
        return max(first, gradients)
    # With gradients there, one more is in flight only if not all were in flight at once.
    later = gradients + of_one.later + (min(flying, passes - 1) - 1) * of_one.kept
    return max(first, later)
