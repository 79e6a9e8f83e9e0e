"""An AllReduce of gradients at every step as what it is: one cluster that trains on the batches of all.

The yardstick of every comparison, at a fifth of the time: clusters that never differ are computed once, and
their rounds, of which nothing is lost, are not played message by message.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from p2p_dilocox.anchor_mean import build_anchor_mean
from p2p_dilocox.data import Batches
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.runspec import RunSpec
from p2p_dilocox.settings import total_inner_steps
from p2p_dilocox.simulation.links import round_s
from p2p_dilocox.simulation.places import Place, Point
from p2p_dilocox.simulation.start import load_start, whole_model
from p2p_dilocox.traffic import model_tensors, round_bytes

__all__ = ["Together", "never_differ"]


def never_differ(spec: RunSpec) -> bool:
    """Whether all clusters have equal parameters at every step, and their averages are exact."""
    exact = spec.compression.lowrank == 0 and min(spec.compression.bits, spec.compression.return_bits) >= 32
    whole = spec.schedule.fraction == 1.0 and spec.schedule.fragments == 1 and spec.compression.top == 1.0
    at_once = spec.overlap.mode == "none" and spec.inner.H == 1 and spec.adapt.rule == "none"
    steady = spec.adapt.startup_steps == 0 and spec.local.every == 0 and spec.data.order == "random"
    return spec.outer.average == "gradient" and exact and whole and at_once and steady


class Together:
    """As `Simulation`, for a spec that `never_differ`, and places with the same step_s and no absences."""

    def __init__(
        self,
        spec: RunSpec,
        places: Sequence[Place],
        corpus: Corpus,
        *,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.spec, self.places = spec, places
        self.pipeline, _, _ = whole_model(spec)
        if start is not None:
            load_start(start, self.pipeline)
        self.batches = [Batches(corpus, spec, place.cluster_id) for place in places]
        self.on_step: Callable[[int], None] = lambda _inner_steps: None
        self.points: list[Point] = []
        self.seconds, self.tokens, self.sent_bytes, self.utilisation = 0.0, 0, 0.0, 0.0
        self._anchors = build_anchor_mean(spec)

    def run(self) -> None:
        spec, places, steps = self.spec, self.places, self.spec.run.outer_steps
        inner = InnerOptimizer(self.pipeline.all_parameters, spec.inner, total_inner_steps(spec))
        sent = round_bytes(spec, model_tensors(spec), len(places)) if len(places) > 1 else 0.0
        each = [round(sent)] * len(places)
        waits_s = round_s([place.link for place in places], each, each)
        self._evaluate(0)
        for t in range(1, steps + 1):
            tokens = torch.cat([batches.batch(t, 0) for batches in self.batches])
            self.pipeline.forward_backward(tokens)
            self.pipeline.clip_()
            inner.step(t - 1)
            self.pipeline.sync_tied_()
            self.tokens += tokens[:, 1:].numel()
            self.sent_bytes += sent
            self.seconds += places[0].step_s + waits_s
            if self._anchors:
                self._anchors.take(t, self.pipeline.parameters)
            self.on_step(t * len(places))
            if t == steps or t % spec.eval.every == 0:
                self._evaluate(t)
        self.utilisation = steps * places[0].step_s / self.seconds

    def _evaluate(self, t: int) -> None:
        batches = self.batches[0].valid_batches(self.spec.eval.batches)
        loss, mean_loss = self.pipeline.evaluate(batches), None
        mean = self._anchors.mean() if self._anchors else None
        if mean is not None:
            before = {name: p.detach().clone() for name, p in self.pipeline.parameters.items()}
            load_start(mean, self.pipeline)
            mean_loss = self.pipeline.evaluate(batches)
            load_start(before, self.pipeline)
        self.points.append(Point(t, self.seconds, self.tokens, self.sent_bytes, loss, mean_loss))
