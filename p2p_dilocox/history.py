"""`history.jsonl`: one line per outer step and stage: what a rank took part in, and what was decided."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

from p2p_dilocox.averaging.round import Outcome

__all__ = ["History"]


class History:
    """Appends to one file, a line at a time; a line is written whole or not at all as far as the kernel goes.

    Keys: time (Unix s), run, cluster, stage, t, decision (committed, adopted or dropped), seconds and
    deadline_s of the round, members, weights (trained tokens, in the members' order), digest (sha256 of the
    stage's encoded average), parent and lineage, sent_bytes and received_bytes of the rank, attempts, reason.
    """

    def __init__(
        self, path: Path, run_id: str, cluster: str, stages: Iterable[int], deadline_s: float
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._run_id, self._cluster, self._stages = run_id, cluster, list(stages)
        self._deadline_s = deadline_s

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
                self._line(
                    common | {"stage": stage, "t": outcome.t, "decision": "dropped", "reason": outcome.reason}
                )
            for step in outcome.steps:
                self._line(
                    common
                    | {
                        "stage": stage,
                        "t": step.t,
                        "decision": "adopted" if step.own is None else "committed",
                        "members": step.members,
                        "weights": step.weights,
                        "digest": step.stage_digests[stage],
                        "parent": step.parent,
                        "lineage": lineage if step is outcome.steps[-1] else "",
                    }
                )

    def close(self) -> None:
        self._file.close()

    def _line(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
