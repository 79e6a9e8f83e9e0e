"""The model of a run as a plan needs it: shapes per rank, and what a microbatch takes on each."""

import math
from dataclasses import fields

import torch

from p2p_dilocox.model_config import load_model_config
from p2p_dilocox.pipeline import build_span, cut_layers, read_skeleton
from p2p_dilocox.plan.activations import Activations, measure_activations
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.traffic import ModelTensors, tensors_of

__all__ = ["PlannedModel"]

Shapes = dict[str, tuple[int, ...]]


class PlannedModel:
    """Reads the model once; activations are found when asked for, once per kind of rank and microbatch."""

    def __init__(self, spec: RunSpec) -> None:
        """Raises ModelError, SpecError."""
        self.config = load_model_config(spec.model)
        self._skeleton = read_skeleton(self.config)
        self.tensors: ModelTensors = tensors_of(spec, self._skeleton)
        self._cuts = cut_layers(self._skeleton, spec.model.stages, spec.model.cut)
        self.multiplications = sum(self._skeleton.work())
        """With parameters, per token; of a mixture those of the experts that a token has."""
        self._measured: dict[tuple[object, ...], Activations] = {}

    def shapes(self, spec: RunSpec, cluster: Cluster, rank: int) -> Shapes:
        """The tensors that a rank owns, by name."""
        stages = cluster.placement(spec).stages_of(rank)
        return {name: shape for stage in stages for name, shape in self.tensors.stages[stage].items()}

    def tied_copy(self, spec: RunSpec, cluster: Cluster, rank: int) -> tuple[int, ...] | None:
        """The shape of the copy of a tied embedding, on the rank that has the last stage, not the first."""
        name, stages = self.tensors.tied_name, cluster.placement(spec).stages_of(rank)
        if name is None or 0 in stages or spec.model.stages - 1 not in stages:
            return None
        return self.tensors.stages[0][name]

    def hidden_bytes(self, spec: RunSpec) -> int:
        """A microbatch's hidden state, float32, as it goes from rank to rank."""
        sequences = spec.inner.batch_size // spec.inner.microbatches
        return 4 * sequences * spec.data.seq_len * int(self.config.hidden_size)

    def activations(self, spec: RunSpec, cluster: Cluster, rank: int) -> Activations:
        """Of one microbatch, in the chunk of the rank in which it takes most."""
        placement = cluster.placement(spec)
        chunks = [self._chunk(spec, cluster, placement.chunks[chunk]) for chunk in placement.chunks_of(rank)]
        return Activations(*(max(getattr(c, f.name) for c in chunks) for f in fields(Activations)))

    def _chunk(self, spec: RunSpec, cluster: Cluster, stages: range) -> Activations:
        """Chunks in the middle that own as much and have as many layers are alike."""
        layers = sum(len(self._cuts[stage]) for stage in stages)
        owned = sum(math.prod(s) for stage in stages for s in self.tensors.stages[stage].values())
        sequences = spec.inner.batch_size // spec.inner.microbatches
        documents = spec.data.packing == "documents"
        place = (stages.start == 0, stages.stop == len(self._cuts), layers, owned)
        how = (cluster.bf16(spec), spec.inner.checkpointing, documents)
        kind = (*place, sequences, spec.data.seq_len, *how)
        if kind not in self._measured:
            first, last, meta = stages[0], stages[-1], torch.device("meta")
            span = build_span(
                self._skeleton, first, last, self._cuts, seed=0, device=meta, documents=documents
            )
            span.module.autocast_dtype = torch.bfloat16 if cluster.bf16(spec) else None
            span.module.checkpointing = spec.inner.checkpointing
            span.module.document_end = 0 if documents else None
            self._measured[kind] = measure_activations(span, sequences, spec.data.seq_len)
        return self._measured[kind]
