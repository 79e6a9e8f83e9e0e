"""The run spec: run.toml to frozen dataclasses. Checked as a whole, so that one attempt shows all mistakes.

The settings and their ranges are in settings.py, rules between keys
in consistency.py, defaults of methods in recipe.py."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from p2p_dilocox.consistency import RULES, warnings_for
from p2p_dilocox.errors import SpecError
from p2p_dilocox.recipe import OVERLAP_DEFAULTS, Recipe, default_gamma, recipes
from p2p_dilocox.settings import (
    Adapt,
    Checkpoint,
    Compression,
    Data,
    Deadlines,
    Eval,
    Inner,
    Local,
    Model,
    Outer,
    Overlap,
    Rule,
    Run,
    RunSpec,
    Schedule,
    is_finite,
    tokens_per_outer_step,
    total_inner_steps,
)
from p2p_dilocox.suggest import did_you_mean
from p2p_dilocox.toml_lines import key_lines

__all__ = [
    "Adapt", "Checkpoint", "Compression", "Data", "Deadlines", "Eval", "Inner", "Local", "Model", "Outer",
    "Overlap", "Run", "RunSpec", "Schedule", "load_run_file", "meaning", "parse_run", "parse_run_as",
    "read_run_text", "shipped_runs", "tokens_per_outer_step", "total_inner_steps", "warnings_for",
]  # fmt: skip

_TABLES: dict[str, type] = get_type_hints(RunSpec)
_OF_METHODS = {f.name for f in fields(Recipe)} & _TABLES.keys() - {"inner"}
_OF_COMPARISONS = {"compare", "methods"}
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    bool: "true or false",
    dict: "a table",
}


def load_run_file(path: Path | str) -> RunSpec:
    """The run spec in a file, or a shipped one by its name alone ("demo"). Raises SpecError."""
    return parse_run(read_run_text(path), name=Path(path).name)


def read_run_text(path: Path | str) -> str:
    """What `load_run_file` parses, unparsed: these are the characters an organiser signs. Raises SpecError.

    path: a file; or, without a directory and without .toml, the name of a shipped run. Line ends become
    newlines and a byte order mark is dropped: an editor on Windows must not change what is signed.
    """
    path = Path(path)
    if path.parent == Path() and path.suffix != ".toml":
        if path.name not in shipped_runs():
            raise SpecError(
                f"no shipped run is called {_show(path.name)}; there are {', '.join(shipped_runs())}. "
                "The name of a file ends in .toml"
            )
        path = Path(str(resources.files("p2p_dilocox.bootstrap") / "runs" / f"{path.name}.toml"))
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory; a run.toml file is needed") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{_show(str(path))} cannot be read: {error}") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(
            f"{path.name} line {line}: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from error


def shipped_runs() -> list[str]:
    """Names of the run specs that come with this package."""
    directory = resources.files("p2p_dilocox.bootstrap") / "runs"
    return sorted(
        file.name.removesuffix(".toml") for file in directory.iterdir() if file.name.endswith(".toml")
    )


def parse_run(text: str, *, name: str = "run.toml") -> RunSpec:
    """The run spec that `text` describes, with the defaults of its recipe filled in.

    Raises SpecError with one line per mistake, in the order of the file:
    `<name> line 14: H = 0, must be at least 1 (inner steps per outer step)`.
    """
    return _read(_tables(text, name), key_lines(text), name)


def parse_run_as(
    text: str,
    recipe: str,
    *,
    seed: int,
    inner_steps: int,
    overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    name: str = "run.toml",
) -> RunSpec:
    """The run of `text` by another method: the same model, data and inner optimizer, all else as `recipe` and
    then `overrides` have it, and as many outer steps as `inner_steps` inner steps make. So that all train on
    as many tokens, one that adapts has its H pinned, and no H is larger than `inner_steps`. Raises SpecError
    as parse_run does.
    """
    of_others = _OF_METHODS | _OF_COMPARISONS
    tables = {k: v for k, v in _tables(text, name).items() if k not in of_others}
    method, inner = recipes().get(recipe), dict(tables.get("inner", {}))
    H = inner.get("H")
    if method is not None and isinstance(H, int):
        # A whole turn of fragments, or a method's own number, takes the place of the run's H.
        inner["H"] = method.inner.get("H", max(1, H // method.schedule.fragments))
    tables["inner"] = inner
    tables |= {table: {**tables.get(table, {}), **keys} for table, keys in overrides.items()}
    if isinstance(H := tables["inner"].get("H"), int):
        tables["inner"]["H"] = H = min(H, inner_steps)
    if method is not None and tables.get("adapt", {}).get("rule", method.adapt.rule) != "none":
        tables["adapt"] = {**tables.get("adapt", {}), "H_min": H, "H_max": H}
    run = {**tables.get("run", {}), "recipe": recipe, "seed": seed, "outer_steps": max(1, inner_steps)}
    run["outer_steps"] = _outer_steps(_read({**tables, "run": run}, {}, name), inner_steps)
    return _read({**tables, "run": run}, {}, name)


def _outer_steps(spec: RunSpec, inner_steps: int) -> int:
    """So many make `inner_steps`, or as many less as they must."""
    startup = min(spec.adapt.startup_steps, inner_steps // spec.adapt.startup_H)
    return max(1, startup + (inner_steps - startup * spec.adapt.startup_H) // spec.inner.H)


def _tables(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(_syntax_error(text, name, error)) from error
    except RecursionError:
        raise SpecError(f"{name}: brackets are nested too deeply") from None


def _read(tables: dict[str, Any], lines: Mapping[tuple[str, ...], int], name: str) -> RunSpec:
    reader = _Reader(tables, lines)
    spec = reader.read()
    if reader.problems:
        raise SpecError("\n".join(f"{name}{where}: {what}" for where, what in reader.in_order()))
    return spec


def meaning(table: str, key: str) -> str:
    """What a setting is, in a few words: meaning("inner", "H") == "inner steps per outer step"."""
    return _annotation(_TABLES[table], key)[2]


class _Reader:
    """Collects the problems of one run spec while it is built."""

    def __init__(self, tables: dict[str, Any], lines: Mapping[tuple[str, ...], int]) -> None:
        self.tables = tables
        self.lines = lines
        self.problems: list[tuple[int, str]] = []
        self.wrong: set[str] = set()
        """Keys, as "table.key", whose value cannot be relied on."""

    def read(self) -> RunSpec:
        """The spec. Where there are problems it holds values of the wrong type and must not be used."""
        for table in self.tables:
            if table not in _TABLES:
                self.report((table,), f"unknown table [{_key(table)}]{did_you_mean(table, _TABLES)}")
        defaults = self.defaults_of_recipe()
        sections = {
            table: self.section(table, kind, defaults.get(table, {})) for table, kind in _TABLES.items()
        }
        spec = RunSpec(**sections)
        for keys, rule in RULES:
            if self.wrong.isdisjoint(keys):
                for blamed, sentence in rule(spec):
                    table, key = blamed.split(".")
                    value = getattr(sections[table], key)
                    self.report((table, key), self.subject(table, key, value) + sentence)
        return spec

    def section(self, table: str, kind: type, defaults: Mapping[str, Any]) -> Any:
        given = self.tables.get(table, {})
        if not isinstance(given, dict):
            self.report((table,), f"{table} = {_show(given)}, must be a table: write [{table}]")
            self.wrong.update(f"{table}.{f.name}" for f in fields(kind))
            given = {f.name: None for f in fields(kind)}
            return kind(**given)
        names = [f.name for f in fields(kind)]
        for key in given:
            if key not in names:
                self.report((table, key), f"unknown key {_key(key)} in [{table}]{did_you_mean(key, names)}")
        values: dict[str, Any] = {}
        missing: list[str] = []
        for setting in fields(kind):
            key = setting.name
            if key in given:
                values[key] = self.value(table, key, given[key])
            elif key in defaults:
                values[key] = defaults[key]
            elif setting.default is MISSING and setting.default_factory is MISSING:
                missing.append(key)
                values[key] = None
        self.wrong.update(f"{table}.{key}" for key in missing)
        if missing and table in self.tables:
            for key in missing:
                self.report((table,), f"[{table}] needs {key} ({meaning(table, key)})")
        elif missing:
            self.report((), f"the table [{table}] is missing; it needs {', '.join(missing)}")
        return kind(**values)

    def value(self, table: str, key: str, given: Any) -> Any:
        """`given` as the type of its field; reported if it is of
        another type or breaks the rule of the field."""
        kind, rule, about = _annotation(_TABLES[table], key)
        value, limit = _convert(given, kind)
        if limit is None and rule is not None and not rule.holds(value):
            limit = rule.limit
        if limit is not None:
            self.wrong.add(f"{table}.{key}")
            self.report((table, key), f"{self.subject(table, key, given)}must be {limit} ({about})")
        return value

    def defaults_of_recipe(self) -> dict[str, dict[str, Any]]:
        """Defaults of outer, overlap and compression. They follow what run.toml changes: another overlap
        brings its own outer learning rate, a rank of 0 its own gamma, more bits for all directions as many
        for the strongest."""
        name, known = self._given("run", "recipe", "dilocox"), recipes()
        if isinstance(name, str) and name not in known:
            self.wrong.add("run.recipe")
            self.report(
                ("run", "recipe"),
                f"recipe = {_show(name)}, must be one of {', '.join(known)}{did_you_mean(name, known)}",
            )
        recipe = known[name if isinstance(name, str) and name in known else "dilocox"]
        overlap, outer = recipe.overlap, recipe.outer
        mode = self._given("overlap", "mode", overlap.mode)
        if mode != overlap.mode and isinstance(mode, str):
            overlap, outer = OVERLAP_DEFAULTS.get(mode, (overlap, outer))
        compression = asdict(recipe.compression)
        lowrank = self._given("compression", "lowrank", recipe.compression.lowrank)
        feedback = self._given("compression", "feedback", recipe.compression.feedback)
        if isinstance(lowrank, int) and isinstance(feedback, str):
            compression["gamma"] = default_gamma(feedback, lowrank)
        compression["return_top"] = self._given("compression", "top", recipe.compression.return_top)
        bits = self._given("compression", "bits", None)
        if isinstance(bits, int):
            compression["strong_bits"] = max(bits, recipe.compression.strong_bits)
            compression["return_bits"] = bits
        return {
            "inner": dict(recipe.inner),
            "local": asdict(recipe.local),
            "outer": asdict(outer),
            "schedule": asdict(recipe.schedule),
            "overlap": asdict(overlap),
            "compression": compression,
            "adapt": asdict(recipe.adapt),
        }

    def _given(self, table: str, key: str, default: Any) -> Any:
        section = self.tables.get(table)
        return section.get(key, default) if isinstance(section, dict) else default

    def subject(self, table: str, key: str, value: Any) -> str:
        """`key = value, ` to start a message; with its table where that key has no line of its own."""
        if isinstance(value, dict):
            return f"[{table}.{key}] "
        return f"{key if (table, key) in self.lines else f'{table}.{key}'} = {_show(value)}, "

    def report(self, path: tuple[str, ...], what: str) -> None:
        """Blames the line of `path`, or of the nearest thing around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        self.problems.append((self.lines.get(path, 0), what))

    def in_order(self) -> list[tuple[str, str]]:
        ordered = sorted(self.problems, key=lambda problem: problem[0])
        return [(f" line {line}" if line else "", what) for line, what in ordered]


def _annotation(section: type, key: str) -> tuple[Any, Rule | None, str]:
    """Type, rule and meaning of a field."""
    hint = get_type_hints(section, include_extras=True)[key]
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    rule = next((extra for extra in extras if isinstance(extra, Rule)), None)
    return kind, rule, next((extra for extra in extras if isinstance(extra, str)), "")


def _convert(value: Any, kind: Any) -> tuple[Any, str | None]:
    """`value` of TOML as `kind`, and what it should have been if it is not of that kind."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is tuple:
        length = None if arguments[-1] is Ellipsis else len(arguments)
        wanted = f"a list of {length or ''} {_PLURALS[arguments[0]]}".replace("  ", " ")
        if not isinstance(value, list) or (length is not None and len(value) != length):
            return value, wanted
        converted = [_convert(item, arguments[0]) for item in value]
        wrong = next((limit for _, limit in converted if limit is not None), None)
        return tuple(item for item, _ in converted), wrong and wanted
    if origin is dict:
        wrong_value = _not_plain(value)
        if isinstance(value, dict) and wrong_value is not None:
            return value, f"a table of plain values; it contains {_show(wrong_value)}"
        return value, None if isinstance(value, dict) else _TYPE_NAMES[dict]
    accepted = (int, float) if origin is float else (origin,)
    if type(value) not in accepted:
        return value, _TYPE_NAMES[origin]
    if origin in (int, float) and not is_finite(value):
        return value, "finite" if origin is float else "a number of at most 64 bits"
    return float(value) if origin is float else value, None


_PLURALS = {int: "whole numbers", float: "numbers", str: "texts in quotes"}


def _not_plain(value: Any) -> Any | None:
    """The first date, NaN or infinity in a nested table, which no config of a model can mean; else None."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return next((bad for item in value if (bad := _not_plain(item)) is not None), None)
    if isinstance(value, bool | str):
        return None
    return None if isinstance(value, int | float) and is_finite(value) else value


def _show(value: Any) -> str:
    """A value as TOML writes it, on one line, without control characters, cut if long."""
    if isinstance(value, tuple):
        value = list(value)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    text = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text, text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _key(name: str) -> str:
    """A key as TOML writes it: bare if it can be."""
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else _show(name)


def _syntax_error(text: str, name: str, error: tomllib.TOMLDecodeError) -> str:
    """tomllib's message with the line in front and the text of that line behind."""
    message, _, place = str(error).partition(" (at ")
    lines = text.splitlines() or [""]
    number = int(place.split()[1].rstrip(",")) if place.startswith("line ") else len(lines)
    if message == "Cannot overwrite a value":
        message = "a key may be set only once"
    return f"{name} line {number}: {message}: {_show(lines[min(number, len(lines)) - 1].strip())[1:-1]}"
