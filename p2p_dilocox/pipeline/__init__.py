"""One model over the ranks of a cluster: how it is cut, initialised and run."""

from p2p_dilocox.model_config import load_model_config as config_from_spec
from p2p_dilocox.pipeline.chunks import build_chunks
from p2p_dilocox.pipeline.cut import build_span, cut_layers
from p2p_dilocox.pipeline.skeleton import Skeleton, read_skeleton
from p2p_dilocox.pipeline.span import Span
from p2p_dilocox.pipeline.stage import Pipeline, StepResult

__all__ = [
    "Pipeline", "Skeleton", "Span", "StepResult", "build_chunks", "build_span", "config_from_spec",
    "cut_layers", "read_skeleton",
]  # fmt: skip
