"""The committed sweep of compressors: what is on its Pareto front."""

import json
from pathlib import Path

import pytest

from benchmarks.sweep_front import DEFAULT, points
from p2p_dilocox.pareto import pareto

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "sweep.json"


def test_the_front_has_what_nothing_beats_with_as_few_bytes() -> None:
    of = {
        "dear": (9.0, 3.0),
        "cheap": (1.0, 4.0),
        "worse": (5.0, 4.5),
        "between": (4.0, 3.5),
        "tie": (4.0, 3.6),
    }
    assert pareto(of) == ["cheap", "between", "dear"]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_default_of_dilocox_is_on_the_front_of_the_sweep(model: str) -> None:
    """The default when it was run: embeddings whole, feedback local."""
    assert DEFAULT in pareto(points(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"], model))
