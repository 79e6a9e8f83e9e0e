"""Tensors to small messages and back. Pure: no clock, no sockets, no state of its own.

lowrank.py   a matrix as two thin factors (PowerSGD)
layout.py    the factors and dense tensors of a stage as two vectors, cut into parts
intn.py      floats as few-bit codes with one scale per group
wire.py      one coded chunk as bytes with a header
"""

from p2p_dilocox.compression.intn import BITS, decode, encode, encoded_bytes, round_trip
from p2p_dilocox.compression.layout import CodedBytes, Layout, Phase, Piece
from p2p_dilocox.compression.lowrank import (
    add_outer_,
    as_matrix,
    back_project,
    initial_basis,
    is_lowrank,
    matrix_shape,
    next_basis,
    orthonormalise,
    project,
    subtract_outer_,
)
from p2p_dilocox.compression.wire import HEADER_BYTES, chunk_bytes, pack_chunk, unpack_chunk

__all__ = [
    "BITS",
    "HEADER_BYTES",
    "CodedBytes",
    "Layout",
    "Phase",
    "Piece",
    "add_outer_",
    "as_matrix",
    "back_project",
    "chunk_bytes",
    "decode",
    "encode",
    "encoded_bytes",
    "initial_basis",
    "is_lowrank",
    "matrix_shape",
    "next_basis",
    "orthonormalise",
    "pack_chunk",
    "project",
    "round_trip",
    "subtract_outer_",
    "unpack_chunk",
]
