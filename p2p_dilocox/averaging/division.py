"""How the members of a round divide the averaging of one stage among them. Follows from roster and run spec
alone, so that all members, and whoever reads the round later, find the same.
"""

from concurrent.futures import Executor

from torch import Tensor

from p2p_dilocox.averaging.butterfly import (
    CHUNK_VALUES,
    Averaging,
    Butterfly,
    Gather,
    Terms,
    decode_butterfly,
    decode_gather,
)
from p2p_dilocox.averaging.coded import chunk_ranges
from p2p_dilocox.averaging.rollcall import Roster
from p2p_dilocox.compression import Layout, Piece
from p2p_dilocox.compression.layout import Phase

__all__ = ["PHASES", "Division"]

PHASES: tuple[Phase, Phase] = ("p", "q")


class Division:
    """gather_up_to: with so few members everyone sends all to all, see butterfly.py."""

    def __init__(self, layout: Layout, roster: Roster, gather_up_to: int) -> None:
        self.layout, self.roster = layout, roster
        self.gathers = len(roster.members) <= max(1, gather_up_to)
        # Two that cannot dial each other cannot exchange contributions: they need a reducer between them.
        self.gathers &= len(roster.clients) < 2

    def pieces(self, phase: Phase) -> list[list[Piece]]:
        """Per part: of a butterfly one per member, of a gather the whole."""
        if self.gathers:
            return [self.layout.chunks(phase, 0, self.layout.phase_numel(phase), CHUNK_VALUES)]
        return chunk_ranges(self.layout, phase, self.roster.shares())

    def averaging(self, phase: Phase, me: int, codec: Executor) -> Averaging:
        roster, layout = self.roster, self.layout
        terms = Terms(layout.dtype, roster.weights, roster.norms, me, layout.group, codec)
        parts = self.pieces(phase)
        return Gather(parts[0], terms) if self.gathers else Butterfly(parts, terms)

    def most_bytes(self) -> int:
        """Of the encoded average, all chunks together."""
        group, copies = self.layout.group, len(self.roster.members) if self.gathers else 1
        pieces = [piece for phase in PHASES for part in self.pieces(phase) for piece in part]
        return copies * sum(max(piece.there(group), piece.back(group)) for piece in pieces)

    def decode(self, chunks: list[bytes]) -> tuple[Tensor, Tensor]:
        """The averaged vectors of both phases, as every member decoded them. Raises ValueError."""
        vectors, rest = [], chunks
        for phase in PHASES:
            pieces = [piece for part in self.pieces(phase) for piece in part]
            n, group, dtype = self.layout.phase_numel(phase), self.layout.group, self.layout.dtype
            count = len(pieces) * (len(self.roster.members) if self.gathers else 1)
            mine, rest = rest[:count], rest[count:]
            if len(mine) != count:
                raise ValueError(f"{len(mine)} chunks in phase {phase}, expected {count}")
            if self.gathers:
                vectors.append(decode_gather(mine, pieces, self.roster.weights, n, group, dtype))
            else:
                vectors.append(decode_butterfly(mine, pieces, n, group, dtype))
        if rest:
            raise ValueError(f"{len(rest)} chunks too many")
        return vectors[0], vectors[1]
