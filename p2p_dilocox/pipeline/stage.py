"""The pipeline of a cluster, as one of its ranks uses it: forward, backward, clipping, evaluation.

B: sequences of a batch   T: tokens of a sequence that predict the next one
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from p2p_dilocox.errors import ClusterError
from p2p_dilocox.pipeline.reading import NO_TOKEN, inputs_and_targets
from p2p_dilocox.pipeline.schedule import Microbatches, alone, over_ranks, without_gradients
from p2p_dilocox.pipeline.span import Span
from p2p_dilocox.pipeline.tied import tied_end
from p2p_dilocox.placement import place
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.tokenizer import end_of_document

__all__ = ["Pipeline", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One inner step in numbers, the same on every rank."""

    loss: float
    """Mean over the cluster's batch, nats per token."""
    grad_norm: float
    """Of the whole model, before clipping. Not finite: gradients are gone, the optimizer does nothing."""
    extra: list[float]
    """What the ranks passed to `clip_`, summed over ranks."""


class Pipeline:
    """The model of a cluster, cut over its ranks. All ranks make the same calls in the same order.

    With one rank torch.distributed is not touched. With more, its default process group must exist, with gloo
    for CPU and nccl for CUDA; the timeout given there bounds every wait here. A call that another rank does
    not answer raises ClusterError. The pipeline is of no use afterwards.
    """

    def __init__(
        self, spec: RunSpec, spans: Sequence[Span], rank: int, num_ranks: int, device: torch.device
    ) -> None:
        """spans: the chunks of this rank by the placement of spec.inner.schedule, see `build_chunks`."""
        self.spans = spans
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.inner = spec.inner
        # Where gradients are averaged, it is the average that is clipped.
        self.clip_norm = math.inf if spec.outer.average == "gradient" else spec.inner.clip_norm
        self.num_parameters = spans[0].num_parameters
        self._placement = place(spec.inner.schedule, spec.model.stages, num_ranks)
        self.parameters: dict[str, nn.Parameter] = {}
        """What this rank owns, under Hugging Face names, stage after stage, in the order of the model."""
        self.stage_of: dict[str, int] = {}
        for span in spans:
            for stage, parameters in sorted(span.stage_parameters.items()):
                self.parameters.update(parameters)
                self.stage_of.update(dict.fromkeys(parameters, stage))
        self.all_parameters = list(self.parameters.values())
        """What the inner optimizer updates: `parameters`, and the copy of a tied embedding."""
        self.all_parameters += [span.tied_copy for span in spans if span.tied_copy is not None]
        bf16 = spec.inner.precision == "bf16" or (spec.inner.precision == "auto" and device.type == "cuda")
        apart = spec.data.packing == "documents"
        self._document_end = end_of_document(spec.data.tokenizer) if apart else None
        for span in spans:
            span.module.autocast_dtype = torch.bfloat16 if bf16 else None
            span.module.checkpointing = spec.inner.checkpointing
            span.module.document_end = self._document_end
        self._tied = tied_end(spans, num_ranks)
        self._schedules: dict[tuple[torch.Size, bool], Microbatches] = {}
        self._loss: Tensor | None = None

    def forward_backward(self, tokens: Tensor, stream: str = "") -> None:
        """Gradients of the mean loss, in `.grad` of `all_parameters`; earlier gradients are dropped.

        tokens: int64 [B, T + 1], the same on every rank, NO_TOKEN behind the end of a shorter sequence; B a
        multiple of inner.microbatches. stream: names this inner step for dropout, the same on every rank. The
        loss comes with the result of `clip_`, so that an inner step has one round of waiting for all ranks.
        """
        for parameter in self.all_parameters:
            parameter.grad = None
        # An autocast around that of the spans keeps their bf16 copies of weights until the step is done: one
        # copy, not one per microbatch in flight. It is off itself, for the backward passes.
        with self._answered("a training step"), torch.autocast(self.device.type, enabled=False):
            for span in self.spans:
                span.module.stream = stream
            self._loss = self._run(tokens, training=True)
            if self._tied:
                self._tied.sum_grads_()

    @torch.no_grad()
    def clip_(self, extra: Sequence[float] = ()) -> StepResult:
        """Scale the gradients so that the norm of the whole model's gradient is at most inner.clip_norm.

        extra: as many numbers on every rank; they are summed in the same all-reduce. If the norm is not
        finite all ranks drop their gradients: an inner optimizer
        then leaves parameters and moments as they are.
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)).double()
        loss = self._loss if self._loss is not None else torch.zeros((), device=self.device)
        local = torch.stack([norms.square().sum(), loss.double()])
        grad_sq, mean_loss, *sums = self._sum(
            torch.cat([local, torch.tensor(extra, dtype=torch.float64, device=self.device)])
        )
        norm = math.sqrt(grad_sq)  # a negative sum is impossible; inf and nan pass through
        every = [p.grad for p in self.all_parameters if p.grad is not None]
        if not math.isfinite(norm):
            for parameter in self.all_parameters:
                parameter.grad = None
        elif norm > self.clip_norm:
            torch._foreach_mul_(every, self.clip_norm / norm)
        return StepResult(loss=mean_loss, grad_norm=norm, extra=sums)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats per token over int64 [B, T + 1] batches, the same on every rank. Keeps gradients.

        Raises ValueError if there is no batch.
        """
        total, num_targets = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with self._answered("an evaluation"):
            for tokens in batches:
                loss = self._run(tokens, training=False)
                targets = int((inputs_and_targets(tokens, self._document_end)[1] != NO_TOKEN).sum())
                if loss is not None:
                    total += loss * targets
                num_targets += targets
        if num_targets == 0:
            raise ValueError("evaluate was given no token to predict, at least 1 is needed")
        return self._sum(total[None])[0] / num_targets

    def sync_tied_(self) -> None:
        """After parameters were overwritten: the copy of a tied
        embedding becomes the owner's, bit for bit."""
        if self._tied:
            with self._answered("sending the tied embedding"):
                self._tied.sync_()

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each number, in float64; as many numbers on every rank."""
        return self._sum(torch.tensor(values, dtype=torch.float64, device=self.device))

    def broadcast(self, data: bytes, src: int = 0) -> bytes:
        """The bytes of rank `src`, on every rank; what the others pass is ignored."""
        if self.num_ranks == 1:
            return data
        with self._answered("a broadcast"):
            length = torch.tensor([len(data)], device=self.device)
            dist.broadcast(length, src)
            size = int(length.item())
            buffer = bytearray(data if self.rank == src else size) or bytearray(1)
            content = torch.frombuffer(buffer, dtype=torch.uint8).to(self.device)
            dist.broadcast(content, src)
            return content.cpu().numpy().tobytes()[:size]

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank passed, in the order of ranks, on every rank."""
        return [self.broadcast(data, src) for src in range(self.num_ranks)]

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.sum([0.0])

    def _run(self, tokens: Tensor, *, training: bool) -> Tensor | None:
        microbatches = self.inner.microbatches
        if len(tokens) % microbatches:
            raise ValueError(
                f"a batch of {len(tokens)} sequences, must be a multiple of inner.microbatches = "
                f"{microbatches}: only equal microbatches average to the mean loss"
            )
        key = (tokens.shape, training)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(training=training)
        for span in self.spans:
            span.module.train(training)
        tokens = tokens.to(self.device, non_blocking=True)
        inputs, targets = inputs_and_targets(tokens, self._document_end)
        beside = {"tokens": inputs} if self._document_end is not None else {}
        if self.spans[0].module.draws and training:
            beside["row"] = torch.arange(len(tokens), device=self.device)
        return self._schedules[key](inputs, targets, beside)

    def _schedule(self, *, training: bool) -> Microbatches:
        modules, microbatches = [span.module for span in self.spans], self.inner.microbatches
        if self.num_ranks == 1:
            return alone(modules[0], microbatches, training=training)
        chunks = dict(zip(self._placement.chunks_of(self.rank), modules, strict=True))
        if not training:
            return without_gradients(chunks, self._placement, microbatches, self.rank)
        schedule = self.inner.schedule
        return over_ranks(chunks, self._placement, microbatches, self.device, schedule=schedule)

    def _sum(self, values: Tensor) -> list[float]:
        """One all-reduce of float64 [n]. Its result has the same bits on every rank."""
        if self.num_ranks > 1:
            with self._answered("adding up numbers of all ranks"):
                dist.all_reduce(values)
        result: list[float] = values.tolist()
        return result

    @contextlib.contextmanager
    def _answered(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.num_ranks == 1 or not _from_network(error):
                raise
            raise ClusterError(
                f"rank {self.rank} of {self.num_ranks} lost another rank of this cluster during {doing}: "
                f"{str(error).splitlines()[0][:200]}. Its own error is in its log; the cluster has to start "
                "again from its last checkpoint or from the swarm"
            ) from error


def _from_network(error: RuntimeError) -> bool:
    """gloo raises plain RuntimeErrors that carry their place in gloo's source."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "onnection" in str(error)
