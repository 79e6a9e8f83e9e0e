"""A model that was trained for a while, as the common start of simulated runs: without one, methods that
average seldom are compared in the phase that suits them least.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from p2p_dilocox.data import Batches
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.pipeline import Pipeline, Span, build_span, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.runspec import RunSpec

__all__ = ["load_start", "warm_start", "whole_model"]


def whole_model(spec: RunSpec) -> tuple[Pipeline, Span, int]:
    """All stages in this process: the pipeline, what it runs, and the number of layers."""
    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    cpu = torch.device("cpu")
    span = build_span(
        skeleton, 0, len(cuts) - 1, cuts, seed=spec.run.seed, device=cpu,
        documents=spec.data.packing == "documents",
        weights=Path(spec.model.path) if spec.model.start == "weights" else None,
    )  # fmt: skip
    return Pipeline(spec, [span], 0, 1, cpu), span, sum(map(len, cuts))


def warm_start(spec: RunSpec, corpus: Corpus, steps: int) -> dict[str, Tensor]:
    """The parameters after `steps` inner steps of one cluster. Without AdamW's moments: some methods keep
    them per cluster and some for all.
    """
    pipeline, _, _ = whole_model(spec)
    inner = InnerOptimizer(pipeline.all_parameters, spec.inner, steps)
    batches = Batches(corpus, spec, "start")
    for h in range(steps):
        pipeline.forward_backward(batches.batch(1, h))
        pipeline.clip_()
        inner.step(h)
    return {name: parameter.detach() for name, parameter in pipeline.parameters.items()}


@torch.no_grad()
def load_start(start: Mapping[str, Tensor], pipeline: Pipeline) -> None:
    """In place. Raises KeyError if it is the start of another model."""
    for name, parameter in pipeline.parameters.items():
        parameter.copy_(start[name])
    pipeline.sync_tied_()
