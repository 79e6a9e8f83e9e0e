"""A safetensors file, written tensor by tensor: no second copy of its content, and its digest on the way."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from p2p_dilocox.pieces import FileDigest, PieceHasher

__all__ = ["write_tensors"]

_SLICE_BYTES = 1 << 22
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileDigest:
    """Write `tensors` (in main memory) to `path`, in the order of their names, and make it last (fsync).

    The same tensors and metadata give the same bytes. Raises OSError.
    """
    names = sorted(tensors)
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hasher = PieceHasher(8 + len(text) + offset)
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            hasher.update(part)
            file.write(part)
        for name in names:
            flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(flat), _SLICE_BYTES):
                hasher.update(flat[start : start + _SLICE_BYTES])
                file.write(flat[start : start + _SLICE_BYTES])
        file.flush()
        os.fsync(file.fileno())
    return hasher.digest()
