"""Simulated clusters keep the rules of real ones; simulated time is arithmetic that can be done by hand."""

from pathlib import Path

import pytest

from p2p_dilocox.averaging.snapshot import snapshot_bytes
from p2p_dilocox.data import load_tokens
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.runspec import RunSpec, parse_run, tokens_per_outer_step
from p2p_dilocox.simulation import Absence, Link, Place, Simulation

TEXT = """
[run]
id = "simulated"
recipe = "{recipe}"
outer_steps = {outer_steps}
[model]
stages = 2
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
[data]
seq_len = 16
[inner]
H = 3
batch_size = 2
microbatches = 2
lr = 1e-2
warmup_steps = 2
[deadlines]
round_s = 20.0
[eval]
every = 1
batches = 1
{more}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_tokens(spec_of(), tmp_path_factory.mktemp("tokens"))


def spec_of(recipe: str = "dilocox", outer_steps: int = 4, more: str = "") -> RunSpec:
    return parse_run(TEXT.format(recipe=recipe, outer_steps=outer_steps, more=more))


def simulated(
    spec: RunSpec, places: list[Place], corpus: Corpus, histories: Path | None = None
) -> Simulation:
    simulation = Simulation(spec, places, corpus, histories=histories)
    simulation.run()
    return simulation


def members_by_step(histories: Path, cluster_id: str) -> dict[int, tuple[str, list[str]]]:
    lines = read_history([histories / f"{cluster_id}.jsonl"])
    return {r["t"]: (r["decision"], r.get("members", [])) for r in lines if r["stage"] == 0}


def test_a_synchronous_run_takes_its_steps_and_its_bytes_at_link_speed(corpus: Corpus) -> None:
    """3 clusters, 4 outer steps of 3 inner steps of 2 s; the slowest uplink has 0.1 Mbit/s, each message
    takes 0.05 s; in fp32 each sends (and its reducer returns) two thirds of 4 bytes per parameter, twice.
    """
    slow = Link(uplink_mbps=0.1, downlink_mbps=1.0, latency_s=0.05)
    places = [Place(cluster_id=c, step_s=2.0, link=slow) for c in "abc"]
    simulation = simulated(spec_of("diloco"), places, corpus)
    values = sum(p.numel() for p in simulation.clusters[0].rank.pipeline.parameters.values())
    each = 2 * 2 / 3 * 4 * values
    assert simulation.sent_bytes == pytest.approx(4 * each, rel=0.01)
    assert simulation.seconds == pytest.approx(4 * (3 * 2.0 + 8 * each / 0.1e6 + 8 * 0.05), rel=0.01)
    assert simulation.utilisation == pytest.approx(4 * 3 * 2.0 / simulation.seconds)
    assert simulation.tokens == 3 * 4 * tokens_per_outer_step(simulation.spec)
    assert [(p.t, p.tokens) for p in simulation.points] == [
        (t, t * 3 * tokens_per_outer_step(simulation.spec)) for t in range(5)
    ]
    assert simulation.points[-1].val_loss < simulation.points[0].val_loss


def test_overlap_hides_the_transfer(corpus: Corpus) -> None:
    """A round of 2 s behind 6 s of inner steps costs nothing but the last one; waited for, all four do."""

    def seconds(mode: str) -> float:
        spec = spec_of("dilocox-dense", more=f"[overlap]\nmode = '{mode}'\n")
        link = Link(latency_s=2.0 / 8, uplink_mbps=1e6, downlink_mbps=1e6)
        places = [Place(cluster_id=c, step_s=2.0, link=link) for c in "abc"]
        return simulated(spec, places, corpus).seconds

    assert seconds("arrival") == pytest.approx(4 * 6 + 2, abs=0.01)
    assert seconds("none") == pytest.approx(4 * (6 + 2), abs=0.01)


def test_one_that_is_gone_costs_the_others_no_outer_step_and_comes_back_to_their_history(
    corpus: Corpus, tmp_path: Path
) -> None:
    away = Place(cluster_id="c", absences=(Absence(4.5, 10.0),))
    places = [Place(cluster_id="a"), Place(cluster_id="b"), away]
    simulation = simulated(spec_of(outer_steps=8), places, corpus, tmp_path)
    steps = members_by_step(tmp_path, "a")
    assert [steps[t][0] for t in range(1, 9)] == ["committed"] * 8
    assert steps[1][1] == ["a", "b", "c"] and steps[2][1] == ["a", "b"] and steps[8][1] == ["a", "b", "c"]
    assert check_history(read_history(tmp_path.glob("*.jsonl"))) == []
    assert simulation.parameter_digests()[1:] == simulation.parameter_digests()[:1] * 2


def test_one_whose_download_takes_outer_steps_is_in_every_round_once_it_is_there(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Gone for half a second, then 40 s behind its link while the others take outer steps of 3 s."""
    spec = spec_of(outer_steps=30)
    outer = Simulation(spec, [Place(cluster_id="a")], corpus).clusters[0].rank.outer
    mbps = 8e-6 * snapshot_bytes(outer, list(outer.anchor)) / 40.0
    link = Link(downlink_mbps=mbps)
    away = Place(cluster_id="c", link=link, absences=(Absence(4.5, 5.0),))
    simulated(spec, [Place(cluster_id="a"), Place(cluster_id="b"), away], corpus, tmp_path)
    steps = members_by_step(tmp_path, "a")
    with_it = [t for t in range(2, 31) if "c" in steps[t][1]]
    assert with_it and with_it == list(range(with_it[0], 31)) and with_it[0] > 6
    assert check_history(read_history(tmp_path.glob("*.jsonl"))) == []


def test_one_that_is_too_slow_for_the_roll_call_follows_the_others(corpus: Corpus, tmp_path: Path) -> None:
    """3 steps of 9 s against 3 s and the 8 s (0.4 round_s) that a roll call waits."""
    places = [Place(cluster_id="a"), Place(cluster_id="b"), Place(cluster_id="slow", step_s=9.0)]
    simulation = simulated(spec_of(outer_steps=6), places, corpus, tmp_path)
    assert all(members == ["a", "b"] for _, members in members_by_step(tmp_path, "a").values())
    assert {decision for decision, _ in members_by_step(tmp_path, "slow").values()} == {"adopted"}
    assert check_history(read_history(tmp_path.glob("*.jsonl"))) == []
    assert simulation.parameter_digests()[1:] == simulation.parameter_digests()[:1] * 2


def test_the_same_spec_gives_the_same_run(corpus: Corpus) -> None:
    runs = [simulated(spec_of(), [Place(cluster_id=c) for c in "ab"], corpus) for _ in range(2)]
    assert runs[0].points == runs[1].points
    assert runs[0].parameter_digests() == runs[1].parameter_digests()


def test_places_that_cannot_be_are_refused(corpus: Corpus) -> None:
    for places in ([], [Place(cluster_id="a")] * 2, [Place(cluster_id="a", absences=(Absence(1, 2),))]):
        with pytest.raises(ValueError, match="at least one, each once"):
            Simulation(spec_of(), places, corpus)
    with pytest.raises(ValueError, match="above 0"):
        Link(uplink_mbps=0.0)
