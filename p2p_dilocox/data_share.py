"""A cluster's part in sharing the data out: by what it heard last, told in its heartbeat, kept on disk."""

import contextlib
from pathlib import Path

from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.data import Batches, Claim, Leases
from p2p_dilocox.errors import StateError
from p2p_dilocox.pipeline import Pipeline
from p2p_dilocox.settings import RunSpec
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.messages import DataClaim

__all__ = ["DataShare", "open_data_share"]


class DataShare:
    """Rank 0 takes the shards for all ranks."""

    def __init__(self, leases: Leases, progress: Progress) -> None:
        self._leases, self._progress, self._t, self._again = leases, progress, 0, False

    def lease(self, t: int, batches: Batches, pipeline: Pipeline) -> None:
        """See to it that all ranks train on the same shard in outer step t. Waits for no other cluster."""
        if t != self._t:
            number = self._take(t).to_bytes(8, "little") if pipeline.rank == 0 else b""
            batches.lease(t, int.from_bytes(pipeline.broadcast(number), "little"))
            self._t = t

    def _take(self, t: int) -> int:
        others = self._progress.others_data.items()
        claims = {c: Claim(d.done, d.ahead, tuple(d.held)) for c, d in others}
        number = self._leases.take(t, claims)
        self._tell()
        return number

    def finish(self, t: int) -> int | None:
        """The round of outer step t has landed: its shard, if it had one."""
        number = self._leases.finish(t)
        self._tell()
        return number

    def news(self, t: int, number: int, num_shards: int) -> str:
        """A sentence when the data is gone through again, once; else "". number: the shard of outer step
        t."""
        if self._again or number < num_shards:
            return ""
        self._again = True
        return (
            f"outer step {t} was trained on shard {number % num_shards} of {num_shards} in pass "
            f"{number // num_shards + 1} over the data: all of it has been taken, and it goes round"
        )

    def _tell(self) -> None:
        claim = self._leases.claim()
        self._progress.data = DataClaim(done=claim.done, ahead=claim.ahead, held=list(claim.held))


def open_data_share(spec: RunSpec, state: Path, cluster: str, progress: Progress) -> DataShare | None:
    """None if the run takes random windows. A full or damaged disk costs what was known, not the training."""
    if spec.data.order == "random":
        return None
    path = state / "shards.json"

    def save(text: str) -> None:
        with contextlib.suppress(StateError):
            write_atomic(path, text)

    try:
        leases = Leases(cluster, save, path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        leases = Leases(cluster, save)
    return DataShare(leases, progress)
