"""Every recipe, as it is shipped, through the trainer's own loop and the real averaging: no network."""

import math
from pathlib import Path

import pytest

from p2p_dilocox.data import load_tokens
from p2p_dilocox.data.tokens import Corpus
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.recipe import recipes
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.simulation import Place, Simulation
from tests.unit.test_simulation import TEXT, spec_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_tokens(spec_of(), tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("name", recipes())
def test_three_clusters_end_with_equal_parameters_under_every_recipe(
    name: str, tmp_path: Path, corpus: Corpus
) -> None:
    own_h = recipes()[name].inner
    text = TEXT.format(recipe=name, outer_steps=9 if own_h else 4, more="")
    text = text.replace("H = 3\n", "" if own_h else "H = 3\n")
    spec = parse_run(text)
    places = [Place(cluster_id=c) for c in "abc"]
    simulation = Simulation(spec, places, corpus, histories=tmp_path)
    simulation.run()
    digests = simulation.parameter_digests()
    assert digests[0] == digests[1] == digests[2]
    assert check_history(read_history(tmp_path / f"{c}.jsonl" for c in "abc")) == []
    losses = [point.val_loss for point in simulation.points]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
