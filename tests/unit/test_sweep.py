"""The committed sweep of directions, bits and H: what is on its Pareto front."""

import json
from pathlib import Path

from p2p_dilocox.pareto import pareto

CELLS = Path(__file__).parents[2] / "benchmarks" / "results" / "sweep" / "cells"


def test_the_front_has_what_nothing_beats_with_as_few_bytes() -> None:
    of = {
        "dear": (9.0, 3.0),
        "cheap": (1.0, 4.0),
        "worse": (5.0, 4.5),
        "between": (4.0, 3.5),
        "tie": (4.0, 3.6),
    }
    assert pareto(of) == ["cheap", "between", "dear"]


def test_the_default_of_dilocox_is_on_the_front_of_the_sweep() -> None:
    """With H 25: no other directions, bits and H of the sweep end as low with as few bytes."""
    cells = [json.loads(path.read_bytes()) for path in CELLS.glob("*.json")]
    front = pareto({c["settings"]: (c["points"][-1]["sent_bytes"], c["val_loss"]) for c in cells})
    assert "dilocox: inner.H = 25" in front and len(front) < len(cells)
