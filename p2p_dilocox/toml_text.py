"""Tables as TOML, for a run spec that a program makes: tomllib only reads."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["toml_text"]


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """What tomllib.loads gives back. A table inside of a table is written on one line."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
