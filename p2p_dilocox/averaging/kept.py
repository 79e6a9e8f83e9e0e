"""Committed rounds on disk: for clusters that were not in them, and for this one when it comes back.

rounds/<t>/proof      the Result
rounds/<t>/stage<j>   the encoded average: each chunk after its length, so the sha256 is what was voted on
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from p2p_dilocox.averaging.catchup import Proven
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.lineage import round_digest
from p2p_dilocox.swarm.messages import Result, unpack

__all__ = ["KeptRounds"]

_MOST_ROUNDS = 64
_MOST_BYTES = 256 << 20


class KeptRounds:
    """All ranks of a cluster write to one directory; its lead alone writes proofs and removes rounds. Each
    file is whole or not there."""

    def __init__(self, directory: Path, *, lead: bool = True) -> None:
        self._directory, self._lead = directory, lead
        self._newest: tuple[int, Result | None, dict[int, list[bytes]]] = (0, None, {})

    def remember(self, t: int, result: Result | None, chunks: dict[int, list[bytes]]) -> None:
        """chunks: by stage. Raises OSError if the disk is full; it is known still, until the next."""
        self._newest = (t, result, chunks)
        folder = self._folder(t)
        if chunks or self._lead:
            folder.mkdir(parents=True, exist_ok=True)
        for stage, of_stage in chunks.items():
            _write(folder / f"stage{stage}", [p for c in of_stage for p in (len(c).to_bytes(4, "little"), c)])
        if result is not None and self._lead:  # last: who reads it finds the averages
            _write(folder / "proof", [result.pack()])

    def average_of(self, t: int, stage: int) -> list[bytes]:
        """The encoded average of a committed round. Raises NotTrustedError if it is not kept."""
        newest, _, chunks = self._newest
        if newest == t and stage in chunks:
            return chunks[stage]
        try:
            content = (self._folder(t) / f"stage{stage}").read_bytes()
        except OSError:
            raise NotTrustedError(f"outer step {t}, stage {stage} is not kept here") from None
        found, at = [], 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 4], "little")
            found.append(content[at + 4 : at + 4 + length])
            at += 4 + length
        return found

    def verified(self, t: int, stage: int, digest: str) -> list[bytes] | None:
        """The encoded average if it is here and has this digest."""
        try:
            chunks = self.average_of(t, stage)
        except NotTrustedError:
            return None
        return chunks if round_digest(chunks) == digest else None

    def result_after(self, t: int) -> Result:
        """The first kept round after outer step t; its parent tells whether it is the next. NotTrustedError
        if none.
        """
        for k in self._steps():
            if k > t and (result := self.proof(k)) is not None:
                return result
        raise NotTrustedError(f"no round after outer step {t} is kept here")

    def newest_proof(self) -> Result | None:
        return next((p for t in reversed(self._steps()) if (p := self.proof(t)) is not None), None)

    def proof(self, t: int) -> Result | None:
        """That outer step t was committed."""
        if self._newest[0] == t and self._newest[1] is not None:
            return self._newest[1]
        try:
            return unpack((self._folder(t) / "proof").read_bytes(), Result)
        except (OSError, NotTrustedError):
            return None

    def chain(self, t: int, lineage: str, read: Callable[[Result], Proven], most: int) -> list[Result]:
        """The rounds that follow from (t, lineage), one after the other, all of whose stages are here and are
        what was voted on; at most `most`. read: checks a result.
        """
        found: list[Result] = []
        for k in self._steps():
            if k <= t or len(found) == most:
                continue
            try:
                result = self.proof(k)
                proven = read(result) if result is not None else None
                if proven is None or proven.roster.parent != lineage:
                    break
                if any(self.verified(k, stage, digest) is None for stage, digest in proven.digests.items()):
                    break
            except NotTrustedError:
                break
            found.append(result)  # type: ignore[arg-type]
            lineage = proven.lineage
        return found

    def lineages(self, read: Callable[[Result], Proven]) -> dict[int, str]:
        """After each of the newest 64 rounds. read: checks a result."""
        found: dict[int, str] = {}
        for t in self._steps()[-_MOST_ROUNDS:]:
            with contextlib.suppress(NotTrustedError):
                if (result := self.proof(t)) is not None:
                    found[t] = read(result).lineage
        return found

    def prune(self, floor: int) -> None:
        """Forget rounds that a joiner does not need: those up to outer step `floor`, whose state is kept, but
        for the newest 64 of them or 256 MiB."""
        size = 0
        for number, t in enumerate(reversed(self._steps())):
            size += self._size(t)
            if t <= floor and (number >= _MOST_ROUNDS or size > _MOST_BYTES):
                shutil.rmtree(self._folder(t), ignore_errors=True)

    def bytes_after(self, t: int) -> int:
        """On disk, of the rounds after outer step t."""
        return sum(self._size(k) for k in self._steps() if k > t)

    def forget_after(self, t: int) -> None:
        """These belong to a history that this cluster has given up, or are not whole."""
        self._newest = (0, None, {})
        for k in self._steps() if self._lead else ():
            if k > t:
                shutil.rmtree(self._folder(k), ignore_errors=True)

    def forget_but(self, t: int) -> None:
        """The others belong to another history, or are older than a state that was fetched."""
        for k in self._steps() if self._lead else ():
            if k != t:
                shutil.rmtree(self._folder(k), ignore_errors=True)

    def _size(self, t: int) -> int:
        return sum(file.stat().st_size for file in self._folder(t).glob("*"))

    def _folder(self, t: int) -> Path:
        return self._directory / str(t)

    def _steps(self) -> list[int]:
        known = {self._newest[0]} if self._newest[0] else set()
        if self._directory.is_dir():
            known |= {int(p.name) for p in self._directory.iterdir() if p.name.isdecimal()}
        return sorted(known)


def _write(path: Path, parts: list[bytes]) -> None:
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
