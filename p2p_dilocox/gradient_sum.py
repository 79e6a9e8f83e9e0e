"""What takes the place of the inner optimizer where clusters average gradients: parameters wait for a round.

AdamW itself is the outer step then (`adamw_` in outer_step.py), with the settings of [inner], the same on
every cluster. With H inner steps per outer step their gradients are averaged: H is gradient accumulation.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from p2p_dilocox.inner import InnerOptimizer, learning_rate
from p2p_dilocox.outer import OuterState
from p2p_dilocox.pipeline import Pipeline
from p2p_dilocox.settings import RunSpec, total_inner_steps

__all__ = ["GradientSum", "build_inner"]


class GradientSum:
    """Has the interface of InnerOptimizer. A step adds the gradient over H to `outer.undelivered`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], outer: OuterState) -> None:
        self._parameters, self._outer = parameters, outer

    def step(self, number: float) -> float:
        """Returns the learning rate that the outer step of inner step `number` takes."""
        spec = self._outer.spec
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._outer.add_gradients(grads, 1.0 / spec.inner.H)
        return learning_rate(spec.inner, number - number % spec.inner.H, total_inner_steps(spec))

    def state(self) -> dict[str, Tensor]:
        """Nothing: the moments are the outer state's."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Nothing to load."""


def build_inner(
    spec: RunSpec, pipeline: Pipeline, outer: OuterState, *, bits: int = 32
) -> InnerOptimizer | GradientSum:
    """bits: of AdamW's moments, where a cluster has its own."""
    if spec.outer.average == "gradient":
        return GradientSum(pipeline.parameters, outer)
    return InnerOptimizer(pipeline.all_parameters, spec.inner, total_inner_steps(spec), bits=bits)
