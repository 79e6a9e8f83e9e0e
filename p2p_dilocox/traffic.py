"""What a round of averaging should send, from the codec's sizes alone; and what fp16 averaging would send.

The demo and the tests compare these figures with the bytes counted on sockets.
"""

from collections.abc import Iterator

import torch

from p2p_dilocox.averaging.coded import chunk_ranges
from p2p_dilocox.averaging.division import PHASES
from p2p_dilocox.compression import Layout
from p2p_dilocox.pipeline import Skeleton, build_span, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.runspec import RunSpec
from p2p_dilocox.selection import fragment_of

__all__ = ["ModelTensors", "fp16_bytes", "model_tensors", "round_bytes", "tensors_of"]


class ModelTensors:
    """The averaged tensors of a run by stage, without their values."""

    def __init__(
        self,
        stages: dict[int, dict[str, tuple[int, ...]]],
        dense_names: frozenset[str],
        *,
        tied_name: str | None,
        num_layers: int,
    ) -> None:
        """tied_name: the embedding that is also the output head. num_layers: of the whole model."""
        self.stages = stages
        self.dense_names = dense_names
        self.tied_name = tied_name
        self.num_layers = num_layers

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shapes in self.stages.values() for shape in shapes.values())


def model_tensors(spec: RunSpec) -> ModelTensors:
    """Names and shapes per stage; nothing is allocated."""
    return tensors_of(spec, read_skeleton(config_from_spec(spec.model)))


def tensors_of(spec: RunSpec, skeleton: Skeleton) -> ModelTensors:
    """The same of a model that has been read."""
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    documents = spec.data.packing == "documents"
    meta = torch.device("meta")
    span = build_span(skeleton, 0, len(cuts) - 1, cuts, seed=spec.run.seed, device=meta, documents=documents)
    shapes = {
        stage: {name: tuple(p.shape) for name, p in parameters.items()}
        for stage, parameters in span.stage_parameters.items()
    }
    num_layers, dense = cuts[-1].stop, spec.compression.never_factored(span.embedding_names)
    return ModelTensors(shapes, dense, tied_name=span.tied_name, num_layers=num_layers)


def round_bytes(spec: RunSpec, tensors: ModelTensors, num_clusters: int) -> float:
    """Bytes that a cluster sends in one round, the mean over its members, and over fragments where these take
    turns: encoded chunks only.

    Each member sends the others their parts of its contribution, and the average of its own part; where few
    enough gather, all of its contribution to each.
    """
    others, gathers = num_clusters - 1, num_clusters <= spec.compression.gather_up_to
    shares = [1.0] * (1 if gathers else num_clusters)
    total = 0
    for shapes in _averaged(spec, tensors):
        layout = Layout(shapes, spec.compression, dense_names=tensors.dense_names)
        for phase in PHASES:
            for part in chunk_ranges(layout, phase, shares):
                for piece in part:
                    there, back = piece.there(layout.group), piece.back(layout.group)
                    total += others * (num_clusters * there if gathers else there + back)
    return total / num_clusters / spec.schedule.fragments


def _averaged(spec: RunSpec, tensors: ModelTensors) -> Iterator[dict[str, tuple[int, ...]]]:
    """What rounds average, of each stage and fragment; of a drawn fraction as many values as are drawn on
    average."""
    schedule = spec.schedule
    for shapes in tensors.stages.values():
        if schedule.fraction < 1:
            yield {n: (round(schedule.fraction * torch.Size(s).numel()),) for n, s in shapes.items()}
        else:
            for turn in range(schedule.fragments):
                of_fragment = (n for n in shapes if fragment_of(n, tensors.num_layers, schedule) == turn)
                yield {n: shapes[n] for n in of_fragment}


def fp16_bytes(num_parameters: int, num_clusters: int) -> float:
    """What a member of a ring or butterfly AllReduce sends: 2 (D - 1) / D of the values, 2 bytes each."""
    return 2 * (num_clusters - 1) / num_clusters * 2 * num_parameters
