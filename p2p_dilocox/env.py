"""The environment variables that are read, all of them here."""

import os
from pathlib import Path

__all__ = ["fault"]


def fault() -> str:
    """DILOCOX_FAULT, see fault_points.py; "" in an installed package: a checkout has the tests beside it."""
    in_checkout = (Path(__file__).parents[1] / "tests" / "faults").is_dir()
    return os.environ.get("DILOCOX_FAULT", "") if in_checkout else ""
