"""Clusters in one process that train in step: the real outer state, layouts and codec, no network."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from p2p_dilocox.averaging.butterfly import CHUNK_VALUES
from p2p_dilocox.averaging.coded import CodedStage, StageLayouts
from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.backlog import Backlog
from p2p_dilocox.compression import Layout, Phase, pack_chunk, unpack_chunk
from p2p_dilocox.outer import OuterState
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.trainer import take_outer_steps

__all__ = ["InStep"]


class InStep:
    """`theta`: per cluster its parameters, which a test moves. A round is started and landed by hand.

    Members send all to all, and everyone averages what it decodes; so nothing is encoded twice.
    """

    def __init__(self, spec: RunSpec, start: dict[str, Tensor], num_clusters: int, num_layers: int) -> None:
        self.spec = spec
        self.theta = [{n: p.clone() for n, p in start.items()} for _ in range(num_clusters)]
        self.outers = [OuterState(spec, theta, frozenset(), "") for theta in self.theta]
        self.layouts = StageLayouts(self.outers[0], list(start), frozenset(), num_layers)
        self.ids = [str(i) for i in range(num_clusters)]
        self.ranks = [
            SimpleNamespace(
                outer=outer, cluster_id=i, local=None, adapting=None, backlog=Backlog(), share=None,
                pipeline=SimpleNamespace(parameters=theta, sync_tied_=lambda: None, sum=list),
            )
            for outer, theta, i in zip(self.outers, self.theta, self.ids, strict=True)
        ]  # fmt: skip

    def start(self, t: int) -> list[OuterStep]:
        """All contribute; what the round of outer step t gives each."""
        for outer, theta in zip(self.outers, self.theta, strict=True):
            outer.contribute(theta)
        layout = self.layouts.at(t)
        stages = [CodedStage(outer, layout) for outer in self.outers]
        p, own_p = _averaged(layout, "p", [stage.vector_p() for stage in stages])
        q, own_q = _averaged(layout, "q", [stage.vector_q(p) for stage in stages])
        weights = [1.0] * len(self.ids)
        return [
            OuterStep(t, self.ids, weights, "", "", {0: ""}, stage.decode(p, q), stage.decode(a, b))
            for stage, a, b in zip(stages, own_p, own_q, strict=True)
        ]

    def peek(self, share: float) -> None:
        for outer, theta in zip(self.outers, self.theta, strict=True):
            outer.peek_(theta, share)

    def land(self, steps: list[OuterStep]) -> None:
        for rank, step in zip(self.ranks, steps, strict=True):
            local, theta = rank.local, rank.pipeline.parameters
            with local.moved_(theta) if local else contextlib.nullcontext():
                take_outer_steps(self.spec, cast(Any, rank), Outcome(step.t, [step]))

    def move(self, step: Callable[[int, dict[str, Tensor]], None]) -> None:
        for number, theta in enumerate(self.theta):
            step(number, theta)


def _averaged(layout: Layout, phase: Phase, vectors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    owns = [torch.empty_like(vector) for vector in vectors]
    for piece in layout.chunks(phase, 0, layout.phase_numel(phase), CHUNK_VALUES):
        n = piece.end - piece.start
        for vector, own in zip(vectors, owns, strict=True):
            data = pack_chunk(vector[piece.start : piece.end], piece.bits, layout.group, piece.top)
            own[piece.start : piece.end] = unpack_chunk(
                data, n=n, bits=piece.bits, group=layout.group, top=piece.top
            )
    return torch.stack(owns).mean(0), owns
