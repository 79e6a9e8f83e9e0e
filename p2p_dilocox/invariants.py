"""The rules V1 to V5 of a run, checked over histories of its clusters. Pure: lines in, violations out."""

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from p2p_dilocox.averaging.exclusion import NormCap
from p2p_dilocox.errors import DataError

__all__ = ["check_history", "read_history"]

Line = dict[str, Any]
SLACK_S = 2.0  # what a process on a busy machine may take beyond the deadline to notice that it has passed
FOLLOWED = 2.0  # a cluster that follows a round waits for the others' deadline too, which began after its own


def read_history(paths: Iterable[Path]) -> list[Line]:
    """All lines of some history files, in the order of each and oldest first: a cluster that comes back with
    another number of processes has a stage in another file. Raises DataError for a line that is none.

    A last line without an end is what a killed rank left: it is not looked at.
    """
    files: list[list[Line]] = []
    for path in paths:
        files.append([])
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the history {path}: {error}") from error
        for number, line in enumerate(text.split("\n")[:-1], start=1):
            try:
                record = json.loads(line)
                _ = record["run"], record["cluster"], record["stage"], record["t"], record["decision"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} line {number} is no line of a history: {error!r}") from error
            files[-1].append(record)
    return list(heapq.merge(*files, key=lambda line: line.get("time", 0.0)))


def check_history(lines: list[Line]) -> list[str]:
    """Every violation as a sentence that starts with the rule's name. No violation: an empty list.

    V1  all that committed (stage, t) applied the same bytes     V2  one member list, for all stages
    V3  outer steps only grow, each follows from the one before  V4  no round took longer than its deadline
    V5  weights are at most what can be trained, norms at most ten times the usual
    """
    applied = [line for line in lines if line["decision"] in ("committed", "adopted")]
    return [
        *_same_bytes(applied),
        *_one_roll_call(applied, lines),
        *_growing(lines),
        *_in_time(lines),
        *_weights(applied),
        *_norms(applied),
    ]


def _same_bytes(applied: list[Line]) -> Iterator[str]:
    digests: dict[tuple[str, int, int], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in applied:
        digests[line["run"], line["t"], line["stage"]][line["digest"]].add(line["cluster"])
    for (run, t, stage), by_digest in sorted(digests.items()):
        if len(by_digest) > 1:
            sides = " and ".join(f"{d[:12]} by {', '.join(sorted(c))}" for d, c in sorted(by_digest.items()))
            yield f"V1 run {run}, outer step {t}, stage {stage}: {sides}"


def _one_roll_call(applied: list[Line], lines: list[Line]) -> Iterator[str]:
    rolls: dict[tuple[str, int], dict[tuple[str, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    for line in applied:
        rolls[line["run"], line["t"]][tuple(sorted(line["members"]))].add(line["stage"])
        if line["decision"] == "committed" and line["cluster"] not in line["members"]:
            yield f"V2 outer step {line['t']}: {line['cluster']} committed a round that it was not in"
    for (run, t), by_members in sorted(rolls.items()):
        if len(by_members) > 1:
            sides = " and ".join(
                f"[{', '.join(m)}] for stages {sorted(s)}" for m, s in sorted(by_members.items())
            )
            yield f"V2 run {run}, outer step {t} has more than one member list: {sides}"
    outcomes = defaultdict(set)
    for line in lines:
        outcomes[line["run"], line["t"], line["cluster"]].add(line["decision"])
    for (run, t, cluster), decisions in sorted(outcomes.items()):
        if {"committed", "dropped"} <= decisions:
            yield f"V2 run {run}, outer step {t}: {cluster} committed some stages and dropped others"


def _growing(lines: list[Line]) -> Iterator[str]:
    """A cluster may give an outer step up as dropped and learn later that the others committed it: what it
    adopts follows its last applied step.
    """
    last: dict[tuple[str, str, int], int] = {}
    applied: dict[tuple[str, str, int], tuple[int, str]] = {}
    for line in lines:
        key = (line["run"], line["cluster"], line["stage"])
        t, lineage = applied.get(key, (0, ""))
        before = t if line["decision"] == "adopted" else last.get(key, 0)
        if line["t"] <= before:
            where = f"V3 cluster {line['cluster']}, stage {line['stage']}"
            yield f"{where}: outer step {line['t']} after {before}"
        if line["decision"] == "committed" and lineage and line["t"] == t + 1 and line["parent"] != lineage:
            yield f"V3 cluster {line['cluster']}: outer step {line['t']} does not follow from its step {t}"
        last[key] = max(last.get(key, 0), line["t"])
        if line["decision"] != "dropped":
            applied[key] = line["t"], line.get("lineage", "")


def _in_time(lines: list[Line]) -> Iterator[str]:
    for line in lines:
        seconds, deadline_s = line.get("seconds", 0.0), line.get("deadline_s", math.inf)
        limit_s = deadline_s * (1.0 if line["decision"] == "committed" else FOLLOWED) + SLACK_S
        if seconds > limit_s:
            yield f"V4 cluster {line['cluster']}, outer step {line['t']}: {seconds} s of at most {limit_s} s"


def _weights(applied: list[Line]) -> Iterator[str]:
    for line in applied:
        where = f"V5 cluster {line['cluster']}, outer step {line['t']}"
        most = line.get("weight_cap", math.inf)
        if bad := [w for w in line["weights"] if not 0 <= w <= most]:
            yield f"{where}: weight {bad[0]}, must be from 0 to {most}"
        elif line["weights"] and not sum(line["weights"]) > 0:
            yield f"{where}: nobody had trained anything"


def _norms(applied: list[Line]) -> Iterator[str]:
    """A cluster may only have averaged with members whose pseudo-gradients were not too long for what it
    knew.
    """
    caps: dict[tuple[str, str, int], NormCap] = defaultdict(NormCap)
    for line in applied:
        if line["decision"] != "committed" or "norms" not in line:
            continue
        known = caps[line["run"], line["cluster"], line["stage"]]
        norms = [n for n, w in zip(line["norms"], line["weights"], strict=True) if w > 0]
        cap = known.cap(norms)
        if bad := [n for n in line["norms"] if not 0 <= n <= cap]:
            where = f"V5 cluster {line['cluster']}, outer step {line['t']}"
            yield f"{where}: norm {bad[0]}, usual is {cap:.4g} at most"
        known.remember(norms)
