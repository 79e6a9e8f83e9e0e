"""A stage's pseudo-gradient on its way through a round:
low-rank factors first, then the second factor (PowerSGD).

    phase p   P_i = M_i Q and all dense tensors  -> average -> P_hat, orthonormal, from the same bytes on
    every cluster
    phase q   Q_i = M_i^T P_hat                  -> average -> M is P_hat Q^T on average

Pure arithmetic for the codec thread; nothing here waits.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from p2p_dilocox.averaging.butterfly import CHUNK_VALUES
from p2p_dilocox.compression import (
    Layout,
    Piece,
    as_matrix,
    back_project,
    next_basis,
    orthonormalise,
    project,
)
from p2p_dilocox.compression.layout import Phase
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.selection import selected

__all__ = ["CodedStage", "StageLayouts", "chunk_ranges", "codec_thread", "coded_stages", "merged"]


def codec_thread() -> ThreadPoolExecutor:
    """One thread with one torch thread: matrix products give other
    bits with another number of threads (measured)."""
    return ThreadPoolExecutor(1, "codec", initializer=torch.set_num_threads, initargs=(1,))


class StageLayouts:
    """The layouts of one stage: what it averages depends on the outer step, see selection.py."""

    def __init__(
        self, outer: OuterState, names: list[str], dense_names: frozenset[str], num_layers: int
    ) -> None:
        self._spec, self._dense_names, self._num_layers = outer.spec, dense_names, num_layers
        self._shapes = {name: tuple(outer.anchor[name].shape) for name in names}
        self._sizes = {name: outer.anchor[name].numel() for name in names}
        self._whole = Layout(self._shapes, outer.spec.compression, dense_names=dense_names)

    def at(self, t: int, lowrank: int = 0) -> Layout:
        """Of outer step t. lowrank: fewer directions than the run spec has, 0 for as many."""
        if 0 < lowrank < self._whole.lowrank:
            compression = replace(self._spec.compression, lowrank=lowrank)
            dense = frozenset(self._whole.dense_names)  # what was dense stays so
            return Layout(self._shapes, compression, dense_names=dense)
        chosen = selected(self._spec, t, self._sizes, self._num_layers)
        places = {name: values for name, values in chosen.items() if values is not None}
        if len(chosen) == len(self._sizes) and not places:
            return self._whole
        shapes = {name: self._shapes[name] for name in chosen}
        return Layout(shapes, self._spec.compression, dense_names=self._dense_names, places=places)


def chunk_ranges(layout: Layout, phase: Phase, weights: Sequence[float]) -> list[list[Piece]]:
    """Per member the chunks of its part, together the phase vector in order.

    weights: how much of the averaging each member does, as in `Layout.cut_parts`.
    """
    parts = layout.cut_parts(phase, weights)
    return [layout.chunks(phase, start, end, CHUNK_VALUES) for start, end in parts]


class CodedStage:
    """One stage in one round. `outer.residual` holds M and is not changed before the round is over; M is
    `outer.part` of it.

    All products and factorisations run on the device of the parameters; the phase vectors are on the host.
    """

    def __init__(self, outer: OuterState, layout: Layout) -> None:
        self._outer = outer
        self.layout = layout
        self._p_hat: dict[str, Tensor] = {}

    def vector_p(self) -> Tensor:
        """float32 (float64 if lossless) [phase_numel("p")]."""
        outer, factors = self._outer, {}
        for name in self.layout.lowrank_names:
            matrix = as_matrix(outer.residual[name])
            basis = next_basis(outer.basis[name].to(matrix.device))[:, : self.layout.lowrank]
            factors[name] = project(matrix, basis.to(matrix.dtype))
        dense = {name: outer.undelivered[name] for name in self.layout.dense_names}
        return self.layout.pack_p(factors, dense).mul_(outer.part).cpu()

    def vector_q(self, average_p: Tensor) -> Tensor:
        """[phase_numel("q")], from the averaged vector of phase p."""
        self.orthonormalise(average_p)
        residual = self._outer.residual
        factors = {name: back_project(as_matrix(residual[name]), p) for name, p in self._p_hat.items()}
        return self.layout.pack_q(factors).mul_(self._outer.part).cpu()

    def orthonormalise(self, average_p: Tensor) -> None:
        """Fix P_hat, from the averaged vector of phase p."""
        factors, _ = self.layout.unpack_p(average_p)
        self._p_hat = {name: orthonormalise(p.to(self._outer.device)) for name, p in factors.items()}

    def decode(self, vector_p: Tensor, vector_q: Tensor) -> Average:
        """What a pair of vectors stands for: the average, or our own contribution as others decode it.

        Needs the P_hat of this round: call `vector_q` or `orthonormalise` first.
        """
        _, dense = self.layout.unpack_p(vector_p)
        factors = {n: (self._p_hat[n], q) for n, q in self.layout.unpack_q(vector_q).items()}
        return Average(factors, dense, self.layout.places)


def coded_stages(
    outer: OuterState, layouts: Mapping[int, StageLayouts], t: int, lowrank: Sequence[int]
) -> dict[int, CodedStage]:
    """lowrank: of every stage of the model, () or 0 for the run spec's."""
    return {s: CodedStage(outer, of_s.at(t, *lowrank[s : s + 1])) for s, of_s in layouts.items()}


def merged(averages: list[Average]) -> Average:
    """One average for all stages that a rank holds."""
    whole = Average()
    for average in averages:
        whole.factors.update(average.factors)
        whole.dense.update(average.dense)
        whole.places.update(average.places)
    return whole
