"""[compare] and [methods]: what a study is made of, and that the ones that are shipped can run."""

from pathlib import Path

import pytest

from p2p_dilocox.comparison import Method, Setup
from p2p_dilocox.errors import SpecError
from p2p_dilocox.study import read_study

STUDIES = sorted((Path(__file__).parents[2] / "benchmarks" / "studies").glob("*.toml"))


def test_sizes_and_methods_are_read() -> None:
    found = read_study(
        """
        [compare]
        steps = 960
        allreduce_steps = 2.5
        [methods]
        fedavg = {}
        mine = { recipe = "diloco", seeds = 2, inner = { H = 240 } }
        """
    )
    assert (found.steps, found.allreduce_steps, found.seeds, found.clusters) == (960, 2.5, 1, 4)
    assert found.methods == {
        "fedavg": Method(recipe="fedavg"),
        "mine": Method(recipe="diloco", overrides={"inner": {"H": 240}}),
    }
    assert found.of_method == {"mine": 2}
    assert read_study("[run]").methods == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[compare]\nstep = 1", "unknown key step in .compare., did you mean"),
        ("[compare]\nsteps = 0", "compare.steps = 0, must be a whole number of at least 1"),
        ("[compare]\nclusters = 65", "compare.clusters = 65, must be a whole number of 1 to 64"),
        (f"[compare]\nsteps = {10**400}", "must be a whole number of at least 1"),
        ("[compare]\nallreduce_steps = inf", "compare.allreduce_steps = inf, must be a number"),
        ("[compare]\naway = 0.95", "compare.away = 0.95, must be a number of 0 to 0.9"),
        ("[compare]\naway_steps = 0.5", "compare.away_steps = 0.5, must be a number of at least 1"),
        ("[compare]\nclusters = 2.5", "compare.clusters = 2.5, must be a whole number"),
        ("methods = 3", r"\[methods\] = 3, must be a table"),
        ("[methods]\na = 3", "methods.a = 3, must be a table"),
        ("[methods]\na = { inner = 3 }", "methods.a.inner = 3, must be a table"),
        ("[methods]\na = { recipe = 3 }", "methods.a.recipe = 3, must be the name of a recipe"),
        ("[methods]\na = { seeds = 0 }", "methods.a.seeds = 0, must be a whole number"),
        ("[compare", "run.toml: "),
    ],
)
def test_what_it_cannot_be_is_said(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_study(text)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_can_run(path: Path) -> None:
    """All methods train on the same tokens, to the last whole outer step."""
    text = path.read_text(encoding="utf-8")
    study = read_study(text)
    setup = Setup(text=text, methods=study.methods, inner_steps=study.steps)
    assert study.methods
    for name in study.methods:
        setup.spec(name, 0)
