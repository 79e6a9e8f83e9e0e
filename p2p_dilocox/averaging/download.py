"""A state from several donors at once, piece by piece: each piece is checked when it comes, so a donor that
lies, dies or is too slow costs a piece, and the others go on. What was fetched stays for another try."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dilocox.averaging.company import CALL_FAILED
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.states import stage_file
from p2p_dilocox.errors import NotTrustedError, UnreachableError
from p2p_dilocox.pieces import FileDigest, piece_bytes
from p2p_dilocox.swarm.messages import Ask, RankAddress, StateOffer, peer_of_stage
from p2p_dilocox.swarm.patience import within

__all__ = ["Donor", "fetch_state"]

_AT_ONCE = 2  # pieces under way from one donor
_FAILURES = 3  # calls in a row after which a donor is given up
_AGAIN_S = 0.2
_STUCK_S = 5.0  # after which a piece is fetched from another donor as well
_SLOWEST_BYTES_PER_S = 16_000
_Piece = tuple[int, int]  # stage, number


@dataclass
class Donor:
    """name: of the cluster, for people. trouble: why it was given up, or what failed last."""

    name: str
    ranks: list[RankAddress]
    pieces: int = 0
    trouble: str = ""

    def peer_of(self, stage: int) -> str:
        peer = peer_of_stage(self.ranks, stage)
        if peer is None:
            raise NotTrustedError(f"cluster {self.name} has nobody for stage {stage}")
        return peer


@dataclass
class _Work:
    """open: pieces that nobody fetches. under_way: by whom each of the others is fetched; since: when that
    began, by the event loop's clock."""

    files: Mapping[int, FileDigest]
    open: deque[_Piece]
    under_way: dict[_Piece, list[Donor]] = field(default_factory=dict)
    since: dict[_Piece, float] = field(default_factory=dict)
    received: int = 0
    total: int = 0

    def take(self, donor: Donor) -> _Piece | None:
        """A piece that nobody fetches; at the end one that only somebody else does, who may be stuck."""
        now = asyncio.get_running_loop().time()
        if self.open:
            piece = self.open.popleft()
        else:
            stuck = [
                p
                for p, by in self.under_way.items()
                if donor not in by and len(by) < 2 and now - self.since[p] > _STUCK_S
            ]
            if not stuck:
                return None
            piece = stuck[0]
        self.since[piece] = now
        self.under_way.setdefault(piece, []).append(donor)
        return piece

    def give_back(self, piece: _Piece, donor: Donor) -> None:
        by = self.under_way.get(piece, [])
        if donor in by:
            by.remove(donor)
        if piece in self.under_way and not by:
            del self.under_way[piece]
            self.open.append(piece)


async def fetch_state(
    service: Service,
    offer: StateOffer,
    donors: list[Donor],
    limits: Mapping[int, int],
    directory: Path,
    progress: Callable[[int, int], None],
) -> dict[int, Path]:
    """The files of the stages in `limits`, in `directory`, each with the digest of the offer.

    limits: by stage, the most bytes its file may have. progress: called with bytes received and in all.
    Raises NotTrustedError if a file is too large, UnreachableError if no donor is left, OSError.
    """
    files = {stage: offer.files[str(stage)] for stage in limits}
    for stage, limit in limits.items():
        if files[stage].size > limit:
            raise NotTrustedError(
                f"the state of outer step {offer.t} has {files[stage].size} bytes in stage {stage}, "
                f"at most {limit} are due"
            )
    directory.mkdir(parents=True, exist_ok=True)
    paths = {stage: directory / f"{files[stage].root[:32]}-{stage_file(stage)}" for stage in files}
    for old in set(directory.iterdir()) - set(paths.values()):
        if any(old.name.endswith(stage_file(stage)) for stage in files):
            old.unlink(missing_ok=True)
    work = _Work(files, deque(), total=sum(digest.size for digest in files.values()))
    for stage, path in paths.items():
        missing = await asyncio.to_thread(_missing, path, files[stage])
        work.open += [(stage, piece) for piece in missing]
        work.received += files[stage].size - sum(files[stage].length(piece) for piece in missing)
    progress(work.received, work.total)
    tasks = [
        asyncio.create_task(_fetch_from(service, offer.t, donor, work, paths, progress))
        for donor in donors
        for _ in range(_AT_ONCE)
    ]
    try:
        while work.open or work.under_way:
            if all(task.done() for task in tasks):
                reasons = "; ".join(f"{donor.name}: {donor.trouble}" for donor in donors)
                raise UnreachableError(
                    f"{work.received:,} of {work.total:,} bytes of outer step {offer.t}, "
                    f"then no donor was left: {reasons}"
                )
            await asyncio.wait(tasks, timeout=0.2)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return paths


async def _fetch_from(
    service: Service,
    t: int,
    donor: Donor,
    work: _Work,
    paths: Mapping[int, Path],
    progress: Callable[[int, int], None],
) -> None:
    failures = 0
    while (work.open or work.under_way) and failures < _FAILURES:
        piece = work.take(donor)
        if piece is None:  # others are at the last ones
            await asyncio.sleep(_AGAIN_S)
            continue
        stage, number = piece
        digest = work.files[stage]
        try:
            limit_s = 30 + digest.length(number) / _SLOWEST_BYTES_PER_S
            content = await within(_fetch_piece(service, t, donor, stage, number, digest), limit_s)
        except NotTrustedError as error:  # it lies, or its disk does: nothing of it any more
            donor.trouble, failures = str(error), _FAILURES
            work.give_back(piece, donor)
        except CALL_FAILED as error:
            donor.trouble = str(error) or f"nothing within {limit_s:.0f} s"
            failures += 1
            work.give_back(piece, donor)
            await asyncio.sleep(_AGAIN_S)
        else:
            failures = 0
            if piece in work.under_way:  # else another donor was quicker
                await asyncio.to_thread(_put, paths[stage], number * piece_bytes(digest.size), content)
                if work.under_way.pop(piece, None) is not None:
                    work.received += len(content)
                    donor.pieces += 1
                    progress(work.received, work.total)


async def _fetch_piece(
    service: Service, t: int, donor: Donor, stage: int, number: int, digest: FileDigest
) -> bytes:
    ask, content = Ask(t=t, stage=stage, piece=number), bytearray()
    async for part in service.fetch(donor.peer_of(stage), "state", ask, digest.length(number)):
        content += part
    if not digest.fits(number, content):
        raise NotTrustedError(f"piece {number} of stage {stage} is not what the members signed")
    return bytes(content)


def _missing(path: Path, digest: FileDigest) -> list[int]:
    """The pieces that are not in the file yet, which is made as long as it will be."""
    with path.open("a+b") as file:
        old = file.seek(0, 2)
        file.truncate(digest.size)
        if not old:
            return list(range(len(digest.pieces)))
        file.seek(0)
        step = piece_bytes(digest.size)
        return [n for n in range(len(digest.pieces)) if not digest.fits(n, file.read(step))]


def _put(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
