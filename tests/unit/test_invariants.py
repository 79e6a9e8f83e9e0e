"""The checker finds each broken rule, and nothing in a history that keeps them all."""

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.errors import DataError
from p2p_dilocox.history import History
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.outer import Average


def line(t: int, cluster: str = "a", stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "run": "r", "cluster": cluster, "stage": stage, "t": t, "decision": "committed",
        "members": ["a", "b"], "weights": [1.0, 2.0], "weight_cap": 100.0,
        "norms": [3.0, 4.0], "digest": f"digest {t} {stage}",
        "parent": f"lineage {t - 1}", "lineage": f"lineage {t}", "seconds": 1.0, "deadline_s": 10.0,
    } | changes  # fmt: skip


def clean() -> list[dict[str, Any]]:
    return [line(t, cluster, stage) for cluster in "ab" for stage in (0, 1) for t in (1, 2, 3)]


def test_a_clean_history_has_no_violation() -> None:
    assert check_history(clean()) == []


def test_a_member_that_had_trained_nothing_is_no_violation() -> None:
    assert check_history([*clean(), line(4, weights=[0.0, 2.0], norms=[0.0, 4.0])]) == []


def test_a_dropped_step_an_adopted_one_and_a_late_joiner_are_no_violations() -> None:
    dropped = [
        line(4, c, s, decision="dropped", members=[], weights=[], reason="x") for c in "ab" for s in (0, 1)
    ]
    later = [line(5, c, s, parent="lineage 3") for c in "ab" for s in (0, 1)]
    adopted = [line(5, "late", s, decision="adopted", parent="lineage 3", seconds=19.0) for s in (0, 1)]
    assert check_history([*clean(), *dropped, *later, *adopted]) == []


def test_a_step_given_up_and_adopted_later_is_no_violation_but_a_second_time_it_is() -> None:
    dropped = [line(t, "b", 1, decision="dropped", members=[], weights=[], reason="x") for t in (4, 5)]
    adopted = line(4, "b", 1, decision="adopted")
    assert check_history([*clean(), *dropped, adopted, line(6, "b", 1)]) == []
    assert [v.split()[0] for v in check_history([*clean(), *dropped, adopted, adopted])] == ["V3"]
    assert [v.split()[0] for v in check_history([*clean(), *dropped, line(4, "b", 1)])] == ["V2", "V3"]


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("V1", line(3, "c", digest="other", decision="adopted")),
        ("V2", line(3, "b", 2, members=["b"])),
        ("V2", line(3, "c", 2)),
        ("V2", line(3, "b", 2, decision="dropped")),
        ("V3", line(2, "b", 1)),
        ("V3", line(4, "b", 1, parent="elsewhere")),
        ("V4", line(4, "b", 1, seconds=12.5)),
        ("V5", line(4, "b", 1, weights=[1.0, float("nan")])),
        ("V5", line(4, "b", 1, weights=[1.0, -1.0])),
        ("V5", line(4, "b", 1, weights=[0.0, 0.0])),
        ("V5", line(4, "b", 1, weights=[1.0, 100.5])),
        ("V5", line(4, "b", 1, norms=[3.0, 31.0])),
        ("V5", line(4, "b", 1, norms=[3.0, float("nan")])),
    ],
)
def test_each_rule_is_checked(rule: str, broken: dict[str, Any]) -> None:
    found = check_history([*clean(), broken])
    assert found
    assert {violation.split()[0] for violation in found} == {rule}


def test_a_torn_last_line_is_left_out_and_any_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2))[:40])
    assert [record["t"] for record in read_history([path])] == [1]
    path.write_text("not json\n" + json.dumps(line(2)) + "\n")
    with pytest.raises(DataError, match="line 1"):
        read_history([path])


def test_what_was_usual_before_a_restart_is_read_from_the_history(tmp_path: Path) -> None:
    """Rule V5 as check_history reads it: a cluster that starts again has not forgotten it."""
    path = tmp_path / "history" / "rank0.jsonl"
    history = History(path, "run", "a" * 16, [0, 1], 9.0)
    assert history.norms() == []
    average = Average()
    for t, (weights, norms) in enumerate([([5.0, 0.0], [2.0, 1.0]), ([5.0, 5.0], [3.0, 4.0])], start=1):
        step = OuterStep(t, ["a" * 16, "b" * 16], weights, "", "d", {0: "d", 1: "e"}, average, average, norms)
        history.write(Outcome(t, [step]), "lineage")
    history.write(Outcome(3, reason="nobody there"), "lineage")
    history.close()
    again = History(path, "run", "a" * 16, [0, 1], 9.0)
    assert again.norms() == [[2.0], [3.0, 4.0]]
    assert again.last_dropped() == 3
    # The others had committed it, and this cluster had averaged with them and kept the result (rule V2).
    for t in (3, 4):
        ids, lists = ["a" * 16, "b" * 16], ([5.0, 5.0], [3.0, 4.0])
        step = OuterStep(t, ids, lists[0], "", "d", {0: "d", 1: "e"}, average, average, lists[1], 10.0)
        again.write(Outcome(t, [step]), "lineage")
    again.close()
    found = list(read_history([path]))
    decisions = [(record["t"], record["decision"]) for record in found if record["stage"] == 0]
    assert decisions[2:] == [(3, "dropped"), (3, "adopted"), (4, "committed")]
    assert again.last_dropped() == 0


def test_a_cluster_that_comes_back_with_fewer_processes_has_broken_no_rule(tmp_path: Path) -> None:
    lines = {
        "rank0": [*(line(t, time=t) for t in (1, 2, 3)), line(3, stage=1, time=3.0)],
        "rank1": [line(t, stage=1, time=t + 0.1) for t in (1, 2)],
    }
    for name, of_rank in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in of_rank))
    assert check_history(read_history(tmp_path / name for name in lines)) == []
