"""Checkpoints of a cluster as they are read: the newest one that is complete and undamaged."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2p_dilocox.averaging.snapshot import read_snapshot
from p2p_dilocox.averaging.states import stage_file, steps_in
from p2p_dilocox.checkpoint.store import OUTER_OWN, PARTIAL, SUMS, Manifest, Place, names_of_stages
from p2p_dilocox.errors import NotTrustedError, StateError
from p2p_dilocox.pieces import digest_file
from p2p_dilocox.trainer import Rank

__all__ = ["Saved", "anchors", "load_rank", "load_stages", "newest", "newest_first", "read_saved", "tidy"]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    place: Place


def newest(
    directory: Path, spec_digest: str, complain: Callable[[Path, str], None] = lambda _step, _why: None
) -> Saved | None:
    """The newest checkpoint of this run whose files are what its manifest says; None if there is none."""
    return next(newest_first(directory, spec_digest, complain), None)


def newest_first(
    directory: Path, spec_digest: str, complain: Callable[[Path, str], None] = lambda _step, _why: None
) -> Iterator[Saved]:
    """All such checkpoints. complain: called with each other one on the way, and what is wrong with it."""
    for step in steps_in(directory):
        try:
            manifest = _manifest(step)
            if manifest.spec != spec_digest:
                raise StateError(f"{step} is a checkpoint of another run")
            for name, digest in manifest.files.items():
                if not (step / name).is_file():
                    raise StateError(f"{step / name} is missing")
                if (step / name).stat().st_size != digest.size or digest_file(step / name) != digest:
                    raise StateError(f"{step / name} is damaged: it is not what was written")
        except (OSError, StateError) as error:
            complain(step, str(error))
        else:
            yield Saved(step, manifest.place)


def read_saved(step: Path) -> Saved:
    """A checkpoint that another rank has checked. Raises StateError."""
    return Saved(step, _manifest(step).place)


def tidy(directory: Path, damaged: list[Path]) -> None:
    """Once, before training: remove what was half-written, and set damaged ones aside so that they do not
    count as kept; of those set aside before nothing stays."""
    for pattern in (f"{PARTIAL}*", "damaged-*"):
        for left in directory.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
    for step in damaged:
        step.rename(step.with_name(f"damaged-{step.name}"))


def load_rank(saved: Saved, rank: Rank) -> bool:
    """Put a checkpoint back; training goes on as if nothing had been. False if this rank's part was made by
    another number of processes or another schedule: then only what clusters share is put back. Raises
    StateError if that does not fit the run's model.
    """
    load_stages({s: saved.path / stage_file(s) for s in set(rank.pipeline.stage_of.values())}, rank)
    place = saved.place
    if place.num_ranks != rank.pipeline.num_ranks:
        return False
    path = saved.path / f"rank{rank.index}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read {path}: {error}") from error
    targets: dict[str, Tensor] = {f"theta/{n}": p for n, p in rank.pipeline.parameters.items()}
    for part in OUTER_OWN:
        targets |= {f"{part}/{n}": t for n, t in getattr(rank.outer, part).items()}
    targets |= {f"local/{n}": t for n, t in (rank.local.tensors() if rank.local else {}).items()}
    inner = {n.removeprefix("inner/"): tensors.pop(n) for n in list(tensors) if n.startswith("inner/")}
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in targets.items()}:
        return False
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    rank.inner.load_state(inner)
    rank.pipeline.sync_tied_()
    rank.t, rank.h, rank.unsent_tokens = place.t, place.h, place.unsent_tokens
    return True


def load_stages(files: Mapping[int, Path], rank: Rank) -> None:
    """Take anchor, outer momentum and basis of the stages we hold; theta_i starts from the anchor. All or
    nothing. Raises StateError."""
    names = names_of_stages(rank.pipeline.stage_of)
    try:
        snapshots = [read_snapshot(files[stage], rank.outer, names[stage]) for stage in names]
    except NotTrustedError as error:
        raise StateError(f"this state does not fit the run's model: {error}") from error
    with torch.no_grad():
        for snapshot in snapshots:
            snapshot.load_into(rank.outer)
        for name, parameter in rank.pipeline.parameters.items():
            parameter.copy_(rank.outer.anchor[name])
        if rank.local:
            rank.local.reset_(rank.pipeline.parameters)
    rank.pipeline.sync_tied_()
    rank.unsent_tokens = 0
    rank.t, rank.h = rank.outer.t + 1, 0


def anchors(saved: Saved) -> dict[str, Tensor]:
    """The whole model's anchor, float32 by parameter name, from all stages' files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(saved.path.glob("stage*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name.startswith("anchor/"):
                    tensors[name.removeprefix("anchor/")] = file.get_tensor(name)
    return tensors


def _manifest(step: Path) -> Manifest:
    path = step / "manifest.json"
    try:
        sums = [line.split("  ", 1) for line in (step / SUMS).read_text("ascii").splitlines()]
        for digest, name in sums:
            if hashlib.sha256((step / name).read_bytes()).hexdigest() != digest:
                raise StateError(f"{step / name} is damaged: it is not what was written")
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
