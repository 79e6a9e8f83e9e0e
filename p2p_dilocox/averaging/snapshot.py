"""The state that a joiner needs of one stage: anchor, outer
momentum and basis, with the place in history they belong to.

Not the error buffer: that is what one cluster has not delivered, and no business of another.
"""

import json
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.outer import OuterState

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]

_PARTS = ("anchor", "momentum", "second_moment", "basis")


@dataclass(frozen=True)
class Snapshot:
    t: int
    lineage: str
    members: list[str]
    tensors: dict[str, dict[str, Tensor]]  # part -> name -> tensor

    def load_into(self, outer: OuterState) -> None:
        """Replace the state of these tensors; the residual of what they were is forgotten."""
        for part in _PARTS:
            outer.replace(part, self.tensors[part])
        outer.t, outer.lineage, outer.members = self.t, self.lineage, self.members


def write_snapshot(outer: OuterState, names: list[str]) -> bytes:
    """safetensors of the named tensors, float32. The caller keeps the state from changing meanwhile."""
    tensors = {
        f"{part}/{name}": getattr(outer, part)[name].detach().cpu().contiguous()
        for part in _PARTS
        for name in names
        if name in getattr(outer, part)
    }
    place = {"t": outer.t, "lineage": outer.lineage, "members": outer.members}
    return bytes(save(tensors, metadata={"place": json.dumps(place)}))


def snapshot_bytes(outer: OuterState, names: list[str]) -> int:
    """Most that a snapshot of these tensors may have, in bytes."""
    numel: int = sum(
        getattr(outer, part)[n].numel() for part in _PARTS for n in names if n in getattr(outer, part)
    )
    return 4 * numel + 65536 + 512 * len(names)


def read_snapshot(data: bytes, like: OuterState, names: list[str]) -> Snapshot:
    """Check a donor's snapshot against our own state's names and
    shapes. Raises NotTrustedError for any difference."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        place = json.loads(header["__metadata__"]["place"])
        t, lineage, members = int(place["t"]), str(place["lineage"]), [str(m) for m in place["members"]]
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise NotTrustedError(f"the donor's state is malformed: {error}") from error
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for part in _PARTS:
        own: dict[str, Tensor] = getattr(like, part)
        for name in names:
            if name not in own:
                continue
            tensor = tensors.pop(f"{part}/{name}", None)
            if tensor is None or tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise NotTrustedError(
                    f"the donor's {part} of {name} is {found}, expected {list(own[name].shape)}"
                )
            if not torch.isfinite(tensor).all():
                raise NotTrustedError(f"the donor's {part} of {name} is not finite")
            parts[part][name] = tensor
    if tensors:
        raise NotTrustedError(f"the donor sent {len(tensors)} tensors too many, {min(tensors)!r} among them")
    return Snapshot(t, lineage, members, parts)
