"""`dilocox-peer compare`: processes of its own, and files that a reader opens."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2p_dilocox.peers.cli import main
from tests.unit.test_comparison import TEXT


def peer(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_two_recipes_side_by_side_as_table_json_csv_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(TEXT)
    shared = ("--run", tmp_path / "run.toml", "--clusters", "2", "--steps", "8", "--out", tmp_path / "out")
    done = peer("compare", "fedavg", "dilocox", "--json", *shared)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.output.splitlines()]
    assert {r["recipe"] for r in records} == {"fedavg", "dilocox"}
    for key in ("val_loss", "wire_bytes_per_outer_step", "compression_vs_fp16", "utilisation"):
        assert all(isinstance(r[key], float) for r in records)
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        assert [row["recipe"] for row in csv.DictReader(file)] == [r["recipe"] for r in records]
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    points = json.loads((tmp_path / "out" / "comparison.json").read_text())[0]["points"]
    assert [p["t"] for p in points] == [0, 1, 2]

    monkeypatch.setattr("p2p_dilocox.peers.compare.unstable", lambda _spec, n: [f"{n} too many"])
    again = peer("compare", "fedavg", "dilocox", *shared)  # from the files of the first call
    assert "warning: fedavg: 2 too many\nwarning: dilocox: 2 too many\n" in again.stderr
    rows = [line.split() for line in again.stdout.splitlines()]
    assert [row[0] for row in rows[:3]] == ["recipe", records[0]["recipe"], records[1]["recipe"]]
    assert rows[1][1] == f"{records[0]['val_loss']:.4f}"


def test_a_recipe_that_does_not_exist_costs_no_run(tmp_path: Path) -> None:
    done = peer("compare", "fedavk", "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert "did you mean 'fedavg'" in done.output
    assert not (tmp_path / "out").exists()
