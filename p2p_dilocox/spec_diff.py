"""Two run specs, field by field."""

import json
from dataclasses import asdict
from typing import Any

from p2p_dilocox.runspec import RunSpec

__all__ = ["spec_diff"]

_MOST = 8


def spec_diff(there: RunSpec, here: RunSpec) -> str:
    """What differs, as a sentence; "" if they mean the same."""
    found = list(_differences(asdict(there), asdict(here), ""))
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for key in sorted(there.keys() | here.keys()):
        before, after = there.get(key), here.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} is {json.dumps(before)} there and {json.dumps(after)} here")
    return found
