"""Where every tensor of a stage lies in the two vectors that a round averages, and how many bits it gets.

Phase "p": the r rows of P^T of every low-rank matrix, first row 0 of all of them, then row 1 of all, and so
on; then all dense tensors. Phase "q": the rows of Q^T in the same order. A row is padded with zeros to whole
groups, so that a group of codes never mixes two directions, which would drown the weak one in the rounding of
the strong one. The rows come strongest first (`next_basis` sorts them), so the first rows of all matrices,
which may have more bits than the rest, are one stretch at the front.
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

from p2p_dilocox.compression.lowrank import is_lowrank, matrix_shape
from p2p_dilocox.compression.wire import HEADER_BYTES, chunk_bytes
from p2p_dilocox.settings import Compression

__all__ = ["CodedBytes", "Layout", "Phase", "Piece"]

Phase = Literal["p", "q"]


class Piece(NamedTuple):
    """Values [start, end) of a phase vector that are coded alike: `bits` each as a contribution,
    `return_bits` each as an average; of `top` and `return_top` below 1 that part of them, the largest. start
    is a multiple of the group, and end unless the vector ends."""

    start: int
    end: int
    bits: int
    return_bits: int
    top: float = 1.0
    return_top: float = 1.0

    def there(self, group: int) -> int:
        """Bytes of its chunk as a contribution."""
        return chunk_bytes(self.end - self.start, self.bits, group, self.top)

    def back(self, group: int) -> int:
        """Bytes of its chunk as an average."""
        return chunk_bytes(self.end - self.start, self.return_bits, group, self.return_top)


class CodedBytes(NamedTuple):
    """Bytes of both phase vectors without chunk headers: as contributed, as the average that comes back."""

    contribution: int
    average: int


@dataclass(frozen=True, slots=True)
class _Columns:
    """One factor among the low-rank values of a phase vector, which are [r, width]: `length` columns."""

    start: int
    length: int
    r: int
    width: int

    def view(self, vector: Tensor) -> Tensor:
        """The factor, [length, r], as a view of the phase vector."""
        rows = vector[: self.r * self.width].view(self.r, self.width)
        return rows[:, self.start : self.start + self.length].T


class Layout:
    """The phase vectors of one stage.

    shapes: of every tensor, by global parameter name. dense_names: tensors never factored. places: of which
    tensors only some values are averaged, by their places, int64 [k], in the flat tensor; such are dense.
    The vectors are float32, or float64 where a contribution has 64 bits (a lossless run).
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        compression: Compression,
        *,
        dense_names: frozenset[str] = frozenset(),
        places: Mapping[str, Tensor] | None = None,
    ) -> None:
        group, r = compression.group, compression.lowrank
        if group < 8 or group % 8:
            raise ValueError(f"group = {group}, must be a multiple of 8 (values that share a scale); take 64")
        self.lowrank = r
        self.group = group
        self.dtype = torch.float64 if compression.bits == 64 else torch.float32
        self.shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.places = dict(places or {})
        matrices = {
            name: matrix_shape(shape)
            for name, shape in self.shapes.items()
            if name not in self.places and is_lowrank(name, shape, r, dense_names)
        }
        self._p, p_width = _place({name: m for name, (m, _) in matrices.items()}, r, group)
        self._q, q_width = _place({name: n for name, (_, n) in matrices.items()}, r, group)
        self._dense: dict[str, slice] = {}
        p_end = r * p_width
        for name, shape in self.shapes.items():
            if name not in matrices:
                numel = len(self.places[name]) if name in self.places else math.prod(shape)
                self._dense[name] = slice(p_end, p_end + numel)
                p_end = self._dense[name].stop
        self._numel: dict[Phase, int] = {"p": p_end, "q": r * q_width}
        strong = math.ceil(r * compression.strong_fraction - 1e-9)  # 30 * 0.1 is 3.0000000000000004
        self._strong_end: dict[Phase, int] = {"p": strong * p_width, "q": strong * q_width}
        self._bits = (compression.bits, compression.return_bits)
        self._top = (compression.top, compression.return_top)
        self._strong_bits = (
            compression.strong_bits,
            max(compression.strong_bits, compression.return_bits),
        )

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
            values = dense[name].reshape(-1)
            chosen = self.places.get(name)
            vector[place].copy_(values if chosen is None else values[chosen.to(values.device)])
        return vector

    def unpack_p(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(P [m, r] by name, dense tensors by name): views of a phase "p" vector, not copies.

        Of a tensor with places only the values at these, [k].
        """
        self._check_vector("p", vector)
        factors = {name: columns.view(vector) for name, columns in self._p.items()}
        dense = {name: vector[place] for name, place in self._dense.items()}
        return factors, {
            name: values if name in self.places else values.view(self.shapes[name])
            for name, values in dense.items()
        }

    def pack_q(self, factors: Mapping[str, Tensor]) -> Tensor:
        """The vector of phase "q" from Q [n, r] of every low-rank tensor. Errors as in pack_p."""
        _same_names(factors, self._q, "factors Q")
        vector = self._new_vector("q", list(factors.values()))
        _write_factors(vector, factors, self._q)
        return vector

    def unpack_q(self, vector: Tensor) -> dict[str, Tensor]:
        """Q [n, r] by name, as views of a phase "q" vector."""
        self._check_vector("q", vector)
        return {name: columns.view(vector) for name, columns in self._q.items()}

    def cut_parts(self, phase: Phase, weights: Sequence[float]) -> list[tuple[int, int]]:
        """One (start, end) per weight: consecutive, in whole groups, together exactly the phase vector.

        weights: how much of the averaging each member does, at least one above 0. A weight of 0 gets an empty
        part; equal weights get parts whose bits, there and back, differ by those of one group at most. Every
        member cuts alike: these are IEEE operations in a fixed order.
        """
        sums = list(itertools.accumulate(weights))
        if not sums or not all(w >= 0 for w in weights) or not 0 < sums[-1] < math.inf:
            raise ValueError(f"weights = {list(weights)}, must be finite, not negative, and one above 0")
        strong, rest = self._stretches(phase)
        costs = [piece.bits + piece.return_bits for piece in (strong, rest)]
        groups = [-(-(piece.end - piece.start) // self.group) for piece in (strong, rest)]
        first = groups[0] * costs[0]
        ends = []
        for s in sums:
            cost = (first + groups[1] * costs[1]) * (s / sums[-1])
            whole = cost / costs[0] if cost < first else groups[0] + (cost - first) / costs[1]
            ends.append(min(rest.end, self.group * math.floor(whole + 0.5)))
        return list(zip([0, *ends], ends, strict=False))

    def chunks(self, phase: Phase, start: int, end: int, max_values: int) -> list[Piece]:
        """[start, end) cut into pieces of whole groups, max_values or fewer each. start: group-aligned."""
        if start < end and start % self.group:
            raise ValueError(f"start = {start}, must be a multiple of the group, {self.group}")
        if max_values < self.group:
            raise ValueError(f"max_values = {max_values}, must be at least the group, {self.group}")
        step = max_values - max_values % self.group
        return [
            stretch._replace(start=a, end=min(a + step, stretch.end, end))
            for stretch in self._stretches(phase)
            for a in range(max(start, stretch.start), min(end, stretch.end), step)
        ]

    def coded_bytes(self) -> CodedBytes:
        """Bytes of both phase vectors; add wire.HEADER_BYTES per chunk.

        Parts and chunks of whole groups add up to exactly this. Of D equal members each sends (D-1)/D of it.
        """
        stretches = [*self._stretches("p"), *self._stretches("q")]
        return CodedBytes(
            contribution=sum(s.there(self.group) - HEADER_BYTES for s in stretches),
            average=sum(s.back(self.group) - HEADER_BYTES for s in stretches),
        )

    def _stretches(self, phase: Phase) -> list[Piece]:
        """The phase vector, cut where the bits change."""
        numel, strong = self._numel[phase], self._strong_end[phase]
        if self._strong_bits == self._bits:
            strong = 0
        return [
            Piece(0, strong, *self._strong_bits, *self._top), Piece(strong, numel, *self._bits, *self._top)
        ]  # fmt: skip

    def _new_vector(self, phase: Phase, tensors: Sequence[Tensor]) -> Tensor:
        device = tensors[0].device if tensors else None
        return torch.zeros(self._numel[phase], dtype=self.dtype, device=device)

    def _check_vector(self, phase: Phase, vector: Tensor) -> None:
        if vector.dim() != 1 or len(vector) != self._numel[phase]:
            raise ValueError(f"phase {phase} vector is {list(vector.shape)}, expected [{self._numel[phase]}]")


def _place(lengths: Mapping[str, int], r: int, group: int) -> tuple[dict[str, _Columns], int]:
    """Where each factor is among rows of all of them, and how wide such a row is."""
    starts = [0, *itertools.accumulate(length + -length % group for length in lengths.values())]
    width = starts[-1]
    return {
        name: _Columns(start, length, r, width)
        for (name, length), start in zip(lengths.items(), starts, strict=False)
    }, width


def _write_factors(vector: Tensor, factors: Mapping[str, Tensor], places: Mapping[str, _Columns]) -> None:
    for name, columns in places.items():
        found, expected = tuple(factors[name].shape), (columns.length, columns.r)
        if found != expected:
            raise ValueError(f"factor of {name} is {list(found)}, expected {list(expected)}")
        columns.view(vector).copy_(factors[name])


def _same_names(given: Mapping[str, Tensor], expected: Mapping[str, object], what: str) -> None:
    if given.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise ValueError(f"{what} do not fit the layout: missing {missing}, not expected {extra}")
