"""The machine a plan is made for."""

from dataclasses import dataclass

from p2p_dilocox.placement import Placement, place
from p2p_dilocox.settings import RunSpec

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks of one cluster, all of one kind. Schedule and microbatches, which are a cluster's choice too, are
    those of the run spec that goes with it."""

    ranks: int
    device: str = "cuda"
    """"cuda" or "cpu"."""
    offload: bool = False
    """Anchor, momentum and error buffers in main memory, as `join --offload` has them."""
    adamw_bits: int = 32
    """Of each of AdamW's moments, as for `join --adamw-bits`."""

    def placement(self, spec: RunSpec) -> Placement:
        """Raises SpecError."""
        return place(spec.inner.schedule, spec.model.stages, self.ranks)

    def bf16(self, spec: RunSpec) -> bool:
        return spec.inner.precision == "bf16" or (spec.inner.precision == "auto" and self.device == "cuda")
