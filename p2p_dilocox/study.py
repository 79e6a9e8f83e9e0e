"""What a run.toml says to `compare` beside the run: [compare], how large, and [methods], of what.

    [compare]
    steps = 960
    seeds = 3
    [methods]
    fedavg = {}                                                 # a recipe as it is
    diloco-240 = { recipe = "diloco", inner = { H = 240 } }     # with other settings

`dilocox-peer compare --run` reads both. Nothing else does: such a file is no run.toml.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from p2p_dilocox.comparison import Method
from p2p_dilocox.errors import SpecError
from p2p_dilocox.settings import is_finite
from p2p_dilocox.suggest import did_you_mean

__all__ = ["Study", "read_study"]

_LEAST = {"warm": 0, "allreduce_steps": 1e-6, "away": 0}  # of others 1
_MOST = {"clusters": 64, "seeds": 100, "away": 0.9}  # as on the command line
_PARTS = ("allreduce_steps", "away", "away_steps")  # need not be whole


@dataclass(frozen=True, kw_only=True)
class Study:
    """seeds: runs of each method; of_method: of those that have a number of their own. steps: inner steps of
    a cluster. warm: inner steps of an AllReduce that all go on from. allreduce_steps, away, away_steps: see
    Setup.
    """

    clusters: int = 4
    seeds: int = 1
    steps: int = 384
    warm: int = 0
    allreduce_steps: float = 31.0
    away: float = 0.0
    away_steps: float = 50.0
    methods: Mapping[str, Method] = field(default_factory=dict)
    of_method: Mapping[str, int] = field(default_factory=dict)


def read_study(text: str, name: str = "run.toml") -> Study:
    """Raises SpecError. Whether a method's settings are right is seen when its run spec is made."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{name}: {error}") from error
    sizes = _table(tables.get("compare", {}), "[compare]", name)
    known = [f.name for f in fields(Study) if f.name not in ("methods", "of_method")]
    for key, value in sizes.items():
        if key not in known:
            raise SpecError(f"{name}: unknown key {key} in [compare]{did_you_mean(key, known)}")
        _number(value, f"compare.{key}", name)
    methods, of_method = {}, {}
    for method, given in _table(tables.get("methods", {}), "[methods]", name).items():
        settings = dict(_table(given, f"methods.{method}", name))
        recipe = settings.pop("recipe", method)
        if not isinstance(recipe, str):
            raise SpecError(f"{name}: methods.{method}.recipe = {recipe}, must be the name of a recipe")
        if "seeds" in settings:
            of_method[method] = _number(settings.pop("seeds"), f"methods.{method}.seeds", name)
        overrides = {
            table: _table(keys, f"methods.{method}.{table}", name) for table, keys in settings.items()
        }
        methods[method] = Method(recipe=recipe, overrides=overrides)
    return Study(**sizes, methods=methods, of_method=of_method)


def _table(value: Any, what: str, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{name}: {what} = {value!r}, must be a table")
    return value


def _number(value: Any, what: str, name: str) -> Any:
    key = what.rpartition(".")[2]
    whole, least, most = key not in _PARTS, _LEAST.get(key, 1), _MOST.get(key, math.inf)
    number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    if not number or not least <= value <= most or not is_finite(value):
        limit = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise SpecError(f"{name}: {what} = {value!r}, must be a {'whole ' if whole else ''}number of {limit}")
    return value
