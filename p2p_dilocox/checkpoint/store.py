"""Checkpoints of a cluster: one safetensors file per rank,
complete or absent, newest first when it comes back.

STATE/checkpoints/step-<t>/rank<r>.safetensors   parameters, inner and outer optimizer, what was not delivered
STATE/checkpoints/step-<t>/manifest.json         written last, with each file's sha256: without it the step
is not there
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from p2p_dilocox.errors import StateError
from p2p_dilocox.events import Checkpointed, Warned
from p2p_dilocox.trainer import Rank

__all__ = ["CheckpointStore", "Saved", "anchors", "load_rank", "newest", "newest_first"]

_OUTER = ("anchor", "momentum", "second_moment", "own_momentum", "undelivered", "counted", "basis")
_PARTIAL = ".partial-"
_STEP = re.compile(r"step-(\d{1,9})")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. `place`: t and h to go on from, the
    outer state's t, lineage and members."""

    path: Path
    place: dict[str, object]


class CheckpointStore:
    """Saves a rank; all ranks of a cluster call `save` at the same
    step. `spec_digest` ties a checkpoint to its run."""

    def __init__(self, directory: Path, spec_digest: str, keep: int) -> None:
        self.directory, self._spec_digest, self._keep = directory, spec_digest, keep

    def set_aside(self) -> Path:
        """Keep all checkpoints, but resume from none of them. Returns where they are now."""
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}-drifted-{number}")).exists():
            number += 1
        if self.directory.exists():
            self.directory.rename(aside)
        return aside

    def save(self, rank: Rank) -> None:
        """Write this rank's file; rank 0 completes the step once all files are there.

        If one cannot be written, the disk is full say, the step is not kept, the earlier ones stay, and
        training goes on with a warning.
        """
        started = time.monotonic()
        partial = self.directory / f"{_PARTIAL}{rank.outer.t}"
        name = f"rank{rank.index}.safetensors"
        content = save(_tensors(rank))
        digest = ""
        try:
            partial.mkdir(parents=True, exist_ok=True)
            _write_synced(partial / name, content)
            digest = hashlib.sha256(content).hexdigest()
        except OSError as error:
            self._warn(rank, error)
        everywhere = rank.pipeline.gather(json.dumps([name, digest]).encode())
        if rank.index != 0:
            return
        files = dict(json.loads(answer) for answer in everywhere)
        try:
            if all(files.values()):
                step = self._complete(rank, partial, files)
                seconds = time.monotonic() - started
                rank.report(Checkpointed(rank=0, t=rank.outer.t, path=str(step), seconds=seconds))
        except OSError as error:
            self._warn(rank, error)
        for leftover in self.directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _complete(self, rank: Rank, partial: Path, files: dict[str, str]) -> Path:
        manifest = {"spec": self._spec_digest, "files": files, "place": _place(rank)}
        _write_synced(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
        step = self.directory / f"step-{rank.outer.t}"
        if step.exists():  # of the same outer step, some inner steps earlier
            step.rename(self.directory / f"{_PARTIAL}before-{rank.outer.t}")
        partial.rename(step)
        for old in _steps(self.directory)[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return step

    def _warn(self, rank: Rank, error: OSError) -> None:
        message = f"no checkpoint of outer step {rank.outer.t}: {error.strerror} ({self.directory})"
        rank.report(Warned(rank=rank.index, message=message))


def newest(directory: Path, spec_digest: str) -> Saved | None:
    """The newest complete checkpoint of this run whose files have the
    sha256 of their manifest; None if there is none."""
    return next(newest_first(directory, spec_digest), None)


def newest_first(directory: Path, spec_digest: str) -> Iterator[Saved]:
    """All such checkpoints."""
    for step in _steps(directory):
        try:
            manifest = json.loads((step / "manifest.json").read_text())
            whole = all(_sha256(step / name) == digest for name, digest in manifest["files"].items())
            if whole and manifest["spec"] == spec_digest:
                yield Saved(step, manifest["place"])
        except (OSError, ValueError, KeyError, AttributeError):
            continue


def load_rank(saved: Saved, rank: Rank) -> None:
    """Put a checkpoint back. Raises StateError if it was made by a cluster of another shape."""
    path = saved.path / f"rank{rank.index}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read {path}: {error}") from error
    inner: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {f"theta/{n}": p for n, p in rank.pipeline.parameters.items()}
    for part in _OUTER:
        targets |= {f"{part}/{n}": t for n, t in getattr(rank.outer, part).items()}
    targets |= {f"local/{n}": t for n, t in (rank.local.tensors() if rank.local else {}).items()}
    for name, tensor in tensors.items():
        if name.startswith("inner/"):
            inner[name.removeprefix("inner/")] = tensor
        elif name not in targets or targets[name].shape != tensor.shape:
            raise StateError(
                f"{path} has {name}, which does not fit this cluster. Use the --devices it was made with."
            )
        else:
            with torch.no_grad():
                targets.pop(name).copy_(tensor)
    if targets:
        raise StateError(f"{path} lacks {min(targets)}. Use the --devices this checkpoint was made with.")
    rank.inner.load_state(inner)
    rank.pipeline.sync_tied_()
    place, outer = saved.place, rank.outer
    outer.t, outer.lineage = int(str(place["outer_t"])), str(place["lineage"])
    outer.members = [str(m) for m in place["members"]]  # type: ignore[attr-defined]
    rank.t, rank.h = int(str(place["t"])), int(str(place["h"]))
    rank.unsent_tokens = int(str(place["unsent_tokens"]))


def anchors(saved: Saved) -> dict[str, Tensor]:
    """The whole model's anchor, float32 by parameter name, from all ranks' files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(saved.path.glob("rank*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name.startswith("anchor/"):
                    tensors[name.removeprefix("anchor/")] = file.get_tensor(name)
    return tensors


def _tensors(rank: Rank) -> dict[str, Tensor]:
    tensors = {f"theta/{n}": p.detach().cpu().contiguous() for n, p in rank.pipeline.parameters.items()}
    for part in _OUTER:
        tensors |= {f"{part}/{n}": t.cpu().contiguous() for n, t in getattr(rank.outer, part).items()}
    local = rank.local.tensors() if rank.local else {}
    tensors |= {f"local/{n}": t.cpu().contiguous() for n, t in local.items()}
    return tensors | {f"inner/{n}": t.cpu().contiguous() for n, t in rank.inner.state().items()}


def _place(rank: Rank) -> dict[str, object]:
    outer = rank.outer
    return {
        "t": rank.t, "h": rank.h, "unsent_tokens": rank.unsent_tokens,
        "outer_t": outer.t, "lineage": outer.lineage, "members": outer.members,
    }  # fmt: skip


def _steps(directory: Path) -> list[Path]:
    """Checkpoint directories, newest first."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), p) for p in directory.iterdir() if (m := _STEP.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
