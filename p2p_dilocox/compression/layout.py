"""Where every tensor of a stage lies in the two vectors that a round averages.

Phase "p": for every low-rank matrix the r rows of P^T, each padded with zeros to whole groups so that a group
of codes never mixes two directions (which would drown the weak one in the rounding of the strong one); then
all dense tensors. Phase "q": the rows of Q^T, padded alike.
With lowrank 0 everything is dense and "q" is empty.

Tensors lie in the order of their names, so clusters agree however they built their dictionaries.
"""

# m, n: rows, columns   r: lowrank   g: group   P [m, r], Q [n, r]: factors, see lowrank.py

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from p2p_dilocox.compression.intn import encoded_bytes
from p2p_dilocox.compression.lowrank import is_lowrank, matrix_shape

__all__ = ["CodedBytes", "Layout", "Phase"]

Phase = Literal["p", "q"]


class CodedBytes(NamedTuple):
    """Bytes of both phase vectors without chunk headers: as contributed, as the average that comes back."""

    contribution: int
    average: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """One factor inside a phase vector: r rows of `length` values, `stride` apart, from `start`."""

    start: int
    r: int
    length: int
    stride: int

    @property
    def end(self) -> int:
        return self.start + self.r * self.stride

    def view(self, vector: Tensor) -> Tensor:
        """The factor, [length, r], as a view of the phase vector."""
        return vector[self.start : self.end].view(self.r, self.stride)[:, : self.length].T


class Layout:
    """The phase vectors of one stage.

    shapes: of every tensor, by global parameter name. lowrank: r, 0 for none. group: values per scale, a
    multiple of 8 so that whole groups are whole bytes. dense_names: tensors never factored. dtype: of the
    vectors; float64 for a lossless run (bits 64).
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        lowrank: int,
        group: int,
        dense_names: frozenset[str] = frozenset(),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if group < 8 or group % 8:
            raise ValueError(f"group = {group}, must be a multiple of 8 (values that share a scale); take 64")
        self.lowrank = lowrank
        self.group = group
        self.dtype = dtype
        self.shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self._p: dict[str, _Rows] = {}
        self._q: dict[str, _Rows] = {}
        self._dense: dict[str, slice] = {}
        p_end = q_end = 0
        for name, shape in self.shapes.items():
            if is_lowrank(name, shape, lowrank, dense_names):
                m, n = matrix_shape(shape)
                self._p[name] = _Rows(p_end, lowrank, m, _round_up(m, group))
                self._q[name] = _Rows(q_end, lowrank, n, _round_up(n, group))
                p_end, q_end = self._p[name].end, self._q[name].end
        for name, shape in self.shapes.items():
            if name not in self._p:
                self._dense[name] = slice(p_end, p_end + math.prod(shape))
                p_end = self._dense[name].stop
        self._numel: dict[Phase, int] = {"p": p_end, "q": q_end}

    @property
    def lowrank_names(self) -> tuple[str, ...]:
        """Tensors sent as factors, in the order of their names."""
        return tuple(self._p)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Tensors sent as they are, in the order of their names."""
        return tuple(self._dense)

    def phase_numel(self, phase: Phase) -> int:
        """Values in a phase vector, padding included."""
        return self._numel[phase]

    def pack_p(self, factors: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> Tensor:
        """The vector of phase "p", [phase_numel("p")] on the device of its tensors.

        factors: P [m, r] of every low-rank tensor. dense: every other tensor, in its own shape.
        Raises ValueError unless the names and shapes are exactly those of the layout.
        """
        _same_names(factors, self._p, "factors P")
        _same_names(dense, self._dense, "dense tensors")
        vector = self._new_vector("p", [*factors.values(), *dense.values()])
        _write_factors(vector, factors, self._p)
        for name, place in self._dense.items():
            if tuple(dense[name].shape) != self.shapes[name]:
                raise ValueError(f"{name} is {list(dense[name].shape)}, expected {list(self.shapes[name])}")
            vector[place].view(self.shapes[name]).copy_(dense[name])
        return vector

    def unpack_p(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(P [m, r] by name, dense tensors by name): views of a phase "p" vector, not copies."""
        self._check_vector("p", vector)
        factors = {name: rows.view(vector) for name, rows in self._p.items()}
        return factors, {name: vector[place].view(self.shapes[name]) for name, place in self._dense.items()}

    def pack_q(self, factors: Mapping[str, Tensor]) -> Tensor:
        """The vector of phase "q" from Q [n, r] of every low-rank tensor. Errors as in pack_p."""
        _same_names(factors, self._q, "factors Q")
        vector = self._new_vector("q", list(factors.values()))
        _write_factors(vector, factors, self._q)
        return vector

    def unpack_q(self, vector: Tensor) -> dict[str, Tensor]:
        """Q [n, r] by name, as views of a phase "q" vector."""
        self._check_vector("q", vector)
        return {name: rows.view(vector) for name, rows in self._q.items()}

    def cut_parts(self, phase: Phase, weights: Sequence[float]) -> list[tuple[int, int]]:
        """One (start, end) per weight: consecutive, in whole groups, together exactly the phase vector.

        weights: how much of the averaging each member does, at least one above 0. A weight of 0 gets an empty
        part; equal weights get parts that differ by one group at most. Every member cuts alike: these are
        IEEE operations in a fixed order.
        """
        sums = list(itertools.accumulate(weights))
        if not sums or not all(w >= 0 for w in weights) or not 0 < sums[-1] < math.inf:
            raise ValueError(f"weights = {list(weights)}, must be finite, not negative, and one above 0")
        numel = self._numel[phase]
        groups = -(-numel // self.group)
        ends = [min(numel, self.group * math.floor(groups * (s / sums[-1]) + 0.5)) for s in sums]
        return list(zip([0, *ends], ends, strict=False))

    def chunks(self, start: int, end: int, max_values: int) -> list[tuple[int, int]]:
        """[start, end) cut into pieces of whole groups, max_values or fewer each. start: group-aligned."""
        if start % self.group:
            raise ValueError(f"start = {start}, must be a multiple of the group, {self.group}")
        if max_values < self.group:
            raise ValueError(f"max_values = {max_values}, must be at least the group, {self.group}")
        step = max_values - max_values % self.group
        return [(a, min(a + step, end)) for a in range(start, end, step)]

    def coded_bytes(self, bits: int, return_bits: int) -> CodedBytes:
        """Bytes of both phase vectors at `bits` and at `return_bits`; add wire.HEADER_BYTES per chunk.

        Parts and chunks of whole groups add up to exactly this. Of D equal members each sends (D-1)/D of it.
        """
        numels = self._numel.values()
        return CodedBytes(
            contribution=sum(encoded_bytes(numel, bits, self.group) for numel in numels),
            average=sum(encoded_bytes(numel, return_bits, self.group) for numel in numels),
        )

    def _new_vector(self, phase: Phase, tensors: Sequence[Tensor]) -> Tensor:
        device = tensors[0].device if tensors else None
        return torch.zeros(self._numel[phase], dtype=self.dtype, device=device)

    def _check_vector(self, phase: Phase, vector: Tensor) -> None:
        if vector.dim() != 1 or len(vector) != self._numel[phase]:
            raise ValueError(f"phase {phase} vector is {list(vector.shape)}, expected [{self._numel[phase]}]")


def _write_factors(vector: Tensor, factors: Mapping[str, Tensor], places: Mapping[str, _Rows]) -> None:
    for name, rows in places.items():
        found, expected = tuple(factors[name].shape), (rows.length, rows.r)
        if found != expected:
            raise ValueError(f"factor of {name} is {list(found)}, expected {list(expected)}")
        rows.view(vector).copy_(factors[name])


def _same_names(given: Mapping[str, Tensor], expected: Mapping[str, object], what: str) -> None:
    if given.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise ValueError(f"{what} do not fit the layout: missing {missing}, not expected {extra}")


def _round_up(value: int, step: int) -> int:
    return value + -value % step
