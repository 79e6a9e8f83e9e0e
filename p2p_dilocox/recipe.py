"""Methods of the field as compositions of the same parts. A recipe is data: a file in recipes/.

`run.toml` names one and may override any key; what it does not set comes from here. docs/recipes.md has the
parts, and which file composes which.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from p2p_dilocox.settings import Adapt, Compression, Local, Outer, Overlap, Schedule

__all__ = ["OVERLAP_DEFAULTS", "Recipe", "default_gamma", "recipes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`about`: one paragraph for a reader who chooses. `source`: where the method was published.

    `inner`: {"H": 1} where the method has no other number of inner steps.
    """

    about: str
    source: str
    inner: Mapping[str, int]
    local: Local
    outer: Outer
    schedule: Schedule
    overlap: Overlap
    compression: Compression
    adapt: Adapt


OVERLAP_DEFAULTS: dict[str, tuple[Overlap, Outer]] = {
    "arrival": (Overlap(mode="arrival", keep=0.5), Outer(lr=0.7, momentum=0.7)),
    "delay": (Overlap(mode="delay", keep=0.5), Outer(lr=0.7, momentum=0.7)),
    "boundary": (Overlap(mode="boundary", keep=0.5), Outer(lr=0.5, momentum=0.7)),
    "eager": (Overlap(mode="eager"), Outer(lr=0.4, momentum=0.5)),
    "paper": (Overlap(mode="paper"), Outer(lr=0.5, momentum=0.5)),
    "none": (Overlap(), Outer(lr=0.7, momentum=0.7)),
}
"""The longer an average is under way, the smaller the outer learning rate that is stable. Used where run.toml
asks for another overlap than its recipe has, so that one setting is enough to change it."""


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them, by name."""
    files = {file.name: file for file in (resources.files("p2p_dilocox") / "recipes").iterdir()}
    return {
        name.removesuffix(".toml"): _recipe(tomllib.loads(files[name].read_text(encoding="utf-8")))
        for name in sorted(files, key=lambda name: name.removesuffix(".toml"))
        if name.endswith(".toml")
    }


def default_gamma(feedback: str, lowrank: int) -> float:
    """How much of the error buffer to add again.

    Undamped local feedback on a low rank grows to several times the fresh movement, because momentum
    amplifies what arrives late; behind plain quantisation it stays small.
    """
    return 0.5 if feedback == "local" and lowrank > 0 else 1.0


def _recipe(tables: dict[str, Any]) -> Recipe:
    """What a file leaves out is off: no overlap, no low rank, no feedback, the same bits for everything."""
    given = tables["compression"]
    compression = {
        "return_bits": given["bits"], "strong_bits": given["bits"], "strong_fraction": 0.125,
        "gather_up_to": 0, "group": 64, "lowrank": 0, "feedback": "none",
        "return_top": given.get("top", 1.0),
    } | given  # fmt: skip
    compression.setdefault("gamma", default_gamma(compression["feedback"], compression["lowrank"]))
    return Recipe(
        about=" ".join(tables["about"].split()),
        source=tables["source"],
        inner=tables.get("inner", {}),
        local=Local(**tables.get("local", {})),
        outer=Outer(**tables["outer"]),
        schedule=Schedule(**tables.get("schedule", {})),
        overlap=Overlap(**tables.get("overlap", {})),
        compression=Compression(**compression),
        adapt=Adapt(**tables.get("adapt", {})),
    )
