"""`history.jsonl`: one line per outer step and stage: what a rank took part in, and what was decided."""

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from p2p_dilocox.averaging.outcome import Outcome
from p2p_dilocox.line_file import LineFile

__all__ = ["History"]

_LOG = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 18


class History:
    """Appends to one file, a line at a time; a line is written whole or not at all. On a full disk lines are
    missing, and the log says so: training goes on.

    Keys: time (Unix s), run, cluster, stage, t, decision (committed, adopted or dropped), seconds and
    deadline_s of the round, members, weights (trained tokens, in the members' order) and the most one may
    have, norms of the members' pseudo-gradients, digest (sha256 of the stage's encoded average), parent and
    lineage, sent_bytes and received_bytes of the rank, attempts, reason.
    """

    def __init__(
        self, path: Path, run_id: str, cluster: str, stages: Iterable[int], deadline_s: float
    ) -> None:
        self._path, self._file = path, LineFile(path)
        self._run_id, self._cluster, self._stages = run_id, cluster, list(stages)
        self._deadline_s = deadline_s
        self._dropped = self.last_dropped()

    def norms(self) -> list[list[float]]:
        """Of the members of the last rounds that this rank committed, before this start too (rule V5)."""
        found: list[list[float]] = []
        for line in self._tail():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if line["decision"] == "committed" and line["stage"] == self._stages[0]:
                    weighed = zip(line["norms"], line["weights"], strict=True)
                    found.append([float(norm) for norm, weight in weighed if weight > 0])
        return found

    def last_dropped(self) -> int:
        """The outer step of the last line, if that was dropped; 0 otherwise."""
        last: dict[str, Any] = {}
        for line in self._tail():
            last = line
        dropped = last.get("decision") == "dropped" and isinstance(last.get("t"), int)
        return int(last["t"]) if dropped else 0

    def _tail(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            file.seek(max(0, self._path.stat().st_size - _TAIL_BYTES))
            for text in file.read().split(b"\n"):
                with contextlib.suppress(ValueError):
                    if isinstance(line := json.loads(text), dict):
                        yield line

    def write(self, outcome: Outcome, lineage: str) -> None:
        """lineage: after the outcome's steps were applied."""
        common = {
            "time": round(time.time(), 3), "run": self._run_id, "cluster": self._cluster,
            "sent_bytes": outcome.sent_bytes, "received_bytes": outcome.received_bytes,
            "attempts": outcome.attempts,
            "seconds": round(outcome.seconds, 3), "deadline_s": self._deadline_s,
        }  # fmt: skip
        for stage in self._stages:
            if not outcome.steps:
                self._dropped = outcome.t
                self._line(
                    common | {"stage": stage, "t": outcome.t, "decision": "dropped", "reason": outcome.reason}
                )
            for step in outcome.steps:
                self._line(
                    common
                    | {
                        "stage": stage,
                        "t": step.t,
                        # One that was given up, and that the others have committed, is adopted.
                        "decision": "adopted" if step.own is None or step.t <= self._dropped else "committed",
                        "members": step.members,
                        "weights": step.weights,
                        "weight_cap": step.weight_cap,
                        "norms": step.norms,
                        "digest": step.stage_digests[stage],
                        "parent": step.parent,
                        "lineage": lineage if step is outcome.steps[-1] else "",
                    }
                )

    def close(self) -> None:
        self._file.close()

    def _line(self, record: dict[str, object]) -> None:
        try:
            self._file.write(json.dumps(record))
        except OSError as error:
            _LOG.warning("no line of outer step %s in %s: %s", record["t"], self._path, error.strerror)
