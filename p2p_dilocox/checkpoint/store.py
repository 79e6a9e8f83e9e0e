"""Checkpoints of a cluster as they are written: in the background, complete or absent.

STATE/checkpoints/step-<t>+<n>/   after outer step t and n inner steps; without +n right after the outer step.
                                  A whole outer step after t counts as the most that it may have
    stage<j>.safetensors          anchor, outer momentum, basis: equal on all clusters, what joiners fetch
    rank<r>.safetensors           parameters, inner optimizer, what was not delivered: this cluster's own
    offer                         that outer step t was committed, and our signature on the stages' files
    manifest.json                 where training goes on, and the sha256 of each file's pieces
    manifest.sha256               of manifest.json and offer, for `sha256sum -c`

All ranks of a cluster write into one directory with a number of its own, and rank 0 gives it its real name
once all are done. They wait for each other by files, so that nobody's training waits for a disk.
"""

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.snapshot import snapshot_file, take_snapshot
from p2p_dilocox.averaging.states import OFFER, make_offer, stage_file, steps_in
from p2p_dilocox.events import Checkpointed, CheckpointFailed, Event
from p2p_dilocox.pieces import FileDigest
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.tensor_file import write_tensors
from p2p_dilocox.trainer import Rank

__all__ = ["OUTER_OWN", "PARTIAL", "SUMS", "CheckpointStore", "Manifest", "Place", "names_of_stages"]

OUTER_OWN = ("own_momentum", "undelivered", "counted")  # this cluster's alone
PARTIAL = ".partial-"
SUMS = "manifest.sha256"
_OTHERS_S = 600.0  # rank 0 waits so long for the files of the others
_LOOK_S = 0.05


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where training goes on: outer step t, h of its inner steps done; outer_t, lineage, members: of the last
    committed round."""

    t: int
    h: int
    unsent_tokens: int
    outer_t: int
    lineage: str
    members: list[str]
    num_ranks: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """spec: digest of the run spec, which ties a checkpoint to its run."""

    spec: str
    place: Place
    files: dict[str, FileDigest]


@dataclass(frozen=True)
class _Content:
    """Copies in main memory: training goes on meanwhile. number: of the save, the same on all ranks. files:
    name -> tensors, metadata."""

    name: str
    number: int
    place: Place
    files: dict[str, tuple[dict[str, Tensor], dict[str, str]]]


class CheckpointStore:
    """Saves a rank; all ranks of a cluster call `save` at the same step. keep: complete ones on disk.
    inner_steps: the most that an outer step of the run may have."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        spec_digest: str,
        keep: int,
        inner_steps: int,
        key: SigningKey,
        kept: KeptRounds,
        report: Callable[[Event], None],
    ) -> None:
        self.directory, self._keep, self._inner_steps = directory, keep, inner_steps
        self._run_id, self._spec_digest, self._key, self._kept = run_id, spec_digest, key, kept
        self._report = report
        self._writer: threading.Thread | None = None
        self._failed = self._saves = self._cleared = 0

    def set_aside(self) -> Path:
        """Keep all checkpoints, but resume from none of them. Returns where they are now."""
        self.wait(_OTHERS_S)
        self._kept.forget_after(0)
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}-aside-{number}")).exists():
            number += 1
        if self.directory.exists():
            self.directory.rename(aside)
        return aside

    def save(self, rank: Rank) -> None:
        """Copy this rank's state to main memory and write it in the background; one at a time.

        If it cannot be written, the disk is full say, the step is not kept, the earlier ones stay, and
        training goes on with a warning.
        """
        started = time.monotonic()
        after = (rank.t - 1 - rank.outer.t) * self._inner_steps + rank.h
        name = f"step-{rank.outer.t}" + (f"+{after}" if after > 0 else "")
        self._saves += 1
        if self._writer is not None and self._writer.is_alive():
            self._refuse(self._partial(self._saves), rank.index)
            self._fail(rank.index, rank.outer.t, "the last one is still being written")
            return
        content = _Content(name, self._saves, _place(rank), _copies(rank))
        self._writer = threading.Thread(
            target=self._write, args=(content, rank.index, started), name="checkpoint"
        )
        self._writer.start()

    def wait(self, limit_s: float = _OTHERS_S) -> None:
        """Until what is being written is there, or is given up."""
        if self._writer is not None:
            self._writer.join(limit_s)

    def _write(self, content: _Content, rank: int, started: float) -> None:
        partial = self._partial(content.number)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            files = {}
            while content.files:
                name, (tensors, metadata) = content.files.popitem()
                files[name] = write_tensors(partial / name, tensors, metadata)
            unfinished = partial / f".rank{rank}.unfinished"
            _write_synced(unfinished, msgspec.json.encode(files))
            unfinished.rename(partial / f".rank{rank}.json")  # rank 0 reads it as soon as it is there
            if rank == 0:
                step = self._complete(content, partial)
                seconds = time.monotonic() - started
                self._report(Checkpointed(rank=0, t=content.place.outer_t, path=str(step), seconds=seconds))
        except OSError as error:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                self._refuse(partial, rank)
            self._fail(rank, content.place.outer_t, f"{error.strerror} ({self.directory})")

    def _complete(self, content: _Content, partial: Path) -> Path:
        """Rank 0: once all ranks have written theirs. Raises OSError."""
        files = _gather(partial, content.place.num_ranks)
        for number in range(self._cleared + 1, content.number):  # one that a rank has refused
            shutil.rmtree(self._partial(number), ignore_errors=True)
        self._cleared = content.number - 1
        step = self.directory / content.name
        if (step / "manifest.json").exists():  # we came back to it, and leave before anything has changed
            shutil.rmtree(partial, ignore_errors=True)
            return step
        proof = self._kept.proof(content.place.outer_t)
        texts: dict[str, bytes] = {}
        if proof is not None:
            stages = {
                stage: files[stage_file(stage)] for stage in range(len(files)) if stage_file(stage) in files
            }
            offer = make_offer(self._key, self._run_id, content.place.lineage, proof, stages)
            texts[OFFER] = offer.pack()
        manifest = Manifest(spec=self._spec_digest, place=content.place, files=files)
        texts["manifest.json"] = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        sums = [f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in texts.items()]
        for name, text in {**texts, SUMS: "".join(sums).encode()}.items():
            _write_synced(partial / name, text)
        _sync_directory(partial)
        partial.rename(step)
        _sync_directory(self.directory)
        steps = steps_in(self.directory)
        for old in steps[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept.prune(min(_outer_t(s) for s in steps[: self._keep]))
        return step

    def _partial(self, number: int) -> Path:
        return self.directory / f"{PARTIAL}{number}"

    def _refuse(self, partial: Path, rank: int) -> None:
        """Tell rank 0 not to wait for our file; an empty file fits on most full disks."""
        try:
            partial.mkdir(parents=True, exist_ok=True)
            (partial / f".rank{rank}.failed").touch()
        except OSError:
            pass  # rank 0 gives up in time

    def _fail(self, rank: int, t: int, why: str) -> None:
        self._failed += 1
        message = f"no checkpoint of outer step {t}: {why}. Earlier ones stay, training goes on"
        self._report(CheckpointFailed(rank=rank, t=t, failed=self._failed, message=message))


def _gather(partial: Path, num_ranks: int) -> dict[str, FileDigest]:
    """What each rank says of its files. Raises OSError if one has failed, or is silent for too long."""
    deadline = time.monotonic() + _OTHERS_S
    files: dict[str, FileDigest] = {}
    for rank in range(num_ranks):
        said = partial / f".rank{rank}.json"
        while not said.exists():
            if (partial / f".rank{rank}.failed").exists():
                raise OSError(errno.EIO, f"rank {rank} could not write its part")
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"rank {rank} has not written its part in {_OTHERS_S:.0f} s")
            time.sleep(_LOOK_S)
        files |= msgspec.json.decode(said.read_bytes(), type=dict[str, FileDigest])
        said.unlink()
    return dict(sorted(files.items()))


def _copies(rank: Rank) -> dict[str, tuple[dict[str, Tensor], dict[str, str]]]:
    own = {f"theta/{n}": _copy(p) for n, p in rank.pipeline.parameters.items()}
    for part in OUTER_OWN:
        own |= {f"{part}/{n}": _copy(t) for n, t in getattr(rank.outer, part).items()}
    own |= {f"local/{n}": _copy(t) for n, t in (rank.local.tensors() if rank.local else {}).items()}
    own |= {f"inner/{n}": _copy(t) for n, t in rank.inner.state().items()}
    files: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {f"rank{rank.index}.safetensors": (own, {})}
    for stage, names in names_of_stages(rank.pipeline.stage_of).items():
        files[stage_file(stage)] = snapshot_file(take_snapshot(rank.outer, names))
    return files


def names_of_stages(stage_of: Mapping[str, int]) -> dict[int, list[str]]:
    """Per stage its parameters, in the order of the model."""
    return {s: [n for n in stage_of if stage_of[n] == s] for s in sorted(set(stage_of.values()))}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _place(rank: Rank) -> Place:
    outer = rank.outer
    return Place(
        t=rank.t, h=rank.h, unsent_tokens=rank.unsent_tokens, outer_t=outer.t, lineage=outer.lineage,
        members=outer.members, num_ranks=rank.pipeline.num_ranks,
    )  # fmt: skip


def _outer_t(step: Path) -> int:
    return int(step.name.removeprefix("step-").split("+")[0])


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
