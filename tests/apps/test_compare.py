"""`dilocox-peer compare`: processes of its own, and files that a reader opens."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2p_dilocox.comparison import Setup
from p2p_dilocox.data import load_tokens
from p2p_dilocox.peers.cli import main
from p2p_dilocox.shaped_links import why_not
from p2p_dilocox.simulation import Place, Simulation
from p2p_dilocox.swarm.identity import SigningKey
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


def test_links_that_cannot_be_cost_no_run(tmp_path: Path) -> None:
    for rate in ("fast", "1.2.3mbit", "0mbit"):
        done = peer("compare", "fedavg", "--link", rate, "--out", tmp_path / "out")
        assert done.exit_code == 2 and f"{rate!r}, must be a number above 0 and kbit" in done.output
    assert "Give --warm 0" in peer("compare", "--link", "1mbit", "--warm", "5").output


@pytest.mark.swarm
def test_real_clusters_on_shaped_links_give_the_same_table(tmp_path: Path) -> None:
    """One cell, beside the same simulated: the same start and tokens, and the bytes that it sends."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "run.toml").write_text(TEXT)
    shared = ("--run", tmp_path / "run.toml", "--clusters", "2", "--steps", "8", "--out", tmp_path / "out")
    done = [peer("compare", "diloco", "--json", *shared, *more) for more in ((), ("--link", "20mbit"))]
    assert [d.exit_code for d in done] == [0, 0], done[1].output
    simulated, real = (json.loads(d.stdout) for d in done)
    assert real.keys() == simulated.keys()
    for key in ("start_loss", "tokens", "outer_steps", "H"):
        assert real[key] == simulated[key], key
    setup, places = Setup(text=TEXT, clusters=2, inner_steps=8), []
    for name in ("cluster-a", "cluster-b"):  # what a cluster trains on follows from its id
        its = SigningKey.load_or_create(tmp_path / "out" / "linked" / f"{name}.key")
        places.append(Place(cluster_id=its.cluster_id))
    spec = setup.spec("diloco", 0)
    simulation = Simulation(spec, places, load_tokens(spec, tmp_path / "out" / "tokens"))
    simulation.run()
    assert real["val_loss"] == pytest.approx(simulation.points[-1].val_loss, abs=1e-4)
    sent = simulated["wire_bytes_per_outer_step"]
    assert sent <= real["wire_bytes_per_outer_step"] < 1.02 * sent
    assert real["seconds"] > 2 * 8 * sent / 20e6  # two rounds, and nothing is done meanwhile
    assert 0 < real["utilisation"] < 1
    points = json.loads((tmp_path / "out" / "comparison.json").read_text())[0]["points"]
    assert [p["t"] for p in points] == [0, 1, 2]
    again = peer("compare", "diloco", "--json", *shared, "--link", "20mbit")
    assert json.loads(again.stdout) == real  # from its file
