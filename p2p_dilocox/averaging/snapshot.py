"""The state of one stage as a file: anchor, outer momentum and basis, with their place in history.

Not the error buffer: that is what one cluster has not delivered, and no business of another.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.outer import OuterState

__all__ = ["Snapshot", "read_snapshot", "snapshot_bytes", "snapshot_file", "take_snapshot"]

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


def take_snapshot(outer: OuterState, names: list[str]) -> Snapshot:
    """Copies of the named tensors in main memory."""
    parts = {
        part: {n: of_part[n].detach().to("cpu", copy=True) for n in names if n in of_part}
        for part in _PARTS
        for of_part in [getattr(outer, part)]
    }
    return Snapshot(outer.t, outer.lineage, sorted(outer.members), parts)


def snapshot_file(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file of a snapshot."""
    tensors = {f"{part}/{n}": t for part, of_part in snapshot.tensors.items() for n, t in of_part.items()}
    place = {"t": snapshot.t, "lineage": snapshot.lineage, "members": snapshot.members}
    return tensors, {"place": json.dumps(place)}


def snapshot_bytes(outer: OuterState, names: list[str]) -> int:
    """Most that a snapshot of these tensors may have, in bytes."""
    numel: int = sum(
        getattr(outer, part)[n].numel() for part in _PARTS for n in names if n in getattr(outer, part)
    )
    return 4 * numel + 65536 + 512 * len(names)


def read_snapshot(path: Path, like: OuterState, names: list[str]) -> Snapshot:
    """Check the file of a stage against our own state's names and shapes. Raises NotTrustedError for any
    difference."""
    try:
        with safe_open(path, "pt") as file:
            place = json.loads((file.metadata() or {})["place"])
            t, lineage, members = int(place["t"]), str(place["lineage"]), [str(m) for m in place["members"]]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise NotTrustedError(f"the state in {path.name} is malformed: {error}") from error
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for part in _PARTS:
        own: dict[str, Tensor] = getattr(like, part)
        for name in names:
            if name not in own:
                continue
            tensor = tensors.pop(f"{part}/{name}", None)
            if tensor is None or tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise NotTrustedError(f"{part} of {name} is {found}, expected {list(own[name].shape)}")
            if not torch.isfinite(tensor).all():
                raise NotTrustedError(f"{part} of {name} is not finite")
            parts[part][name] = tensor
    if tensors:
        raise NotTrustedError(f"{path.name} has {len(tensors)} tensors too many, {min(tensors)!r} is one")
    return Snapshot(t, lineage, members, parts)
