"""A cluster profile: with what machine a volunteer contributes. Local, never signed, never sent."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from p2p_dilocox.errors import SpecError
from p2p_dilocox.placement import SCHEDULES

__all__ = ["Profile", "load_profile", "shipped_profiles"]

_SHIPPED = Path(__file__).parent / "clusters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    devices: str = "auto"
    """As for --devices."""
    threads: int | None = None
    """Torch threads per process; None: cores / processes."""
    listen: str = "/ip4/0.0.0.0/tcp/0"
    """Multiaddress of rank 0; rank r takes port + r. Port 0: any free port."""
    announce: str | None = None
    """Multiaddress under which others reach rank 0; rank r is at port + r."""
    schedule: str | None = None
    """Order of microbatches, of placement.SCHEDULES; None: the run's inner.schedule."""
    microbatches: int | None = None
    """Pieces of a batch; None: the run's inner.microbatches."""
    adamw_bits: int = 32
    """Of AdamW's two moments: 32 or 8."""
    hours: str | None = None
    """Local times between which it trains: "22:00-07:00", several with commas."""
    upload_rate: str | None = None
    """Bytes per second that it sends at most to other clusters: "500kB"."""
    month_bytes: str | None = None
    """Bytes that it may send and receive in a calendar month: "50GB"."""
    gpu_c: int | None = None
    """Degrees Celsius at which its GPUs rest."""
    offload: bool = False
    """Keep anchor, outer momentum and error buffers in main memory instead of on a GPU."""


def load_profile(name: str) -> Profile:
    """The profile in the file `name`, or the shipped one of that name. Raises SpecError."""
    path = Path(name) if name.endswith(".toml") else _SHIPPED / f"{name}.toml"
    if not name.endswith(".toml") and name not in shipped_profiles():
        raise SpecError(
            f"no cluster profile {name!r}: give a .toml file or one of {', '.join(shipped_profiles())}."
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read the cluster profile {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    types = {
        "devices": str, "threads": int, "listen": str, "announce": str, "schedule": str, "microbatches": int,
        "adamw_bits": int, "offload": bool,
        "hours": str, "upload_rate": str, "month_bytes": str, "gpu_c": int,
    }  # fmt: skip
    assert set(types) == {field.name for field in fields(Profile)}
    for key, value in values.items():
        if key not in types:
            raise SpecError(f"{path}: unknown key {key!r}; known are {', '.join(types)}.")
        if type(value) is not types[key]:
            raise SpecError(f"{path}: {key} = {value!r} must be of type {types[key].__name__}.")
    for key in ("threads", "microbatches"):
        if values.get(key, 1) < 1:
            raise SpecError(f"{path}: {key} = {values[key]}, must be at least 1.")
    if values.get("adamw_bits", 32) not in (8, 32):
        raise SpecError(f"{path}: adamw_bits = {values['adamw_bits']}, must be 8 or 32.")
    if values.get("schedule", SCHEDULES[0]) not in SCHEDULES:
        raise SpecError(f"{path}: schedule = {values['schedule']!r}, must be one of {', '.join(SCHEDULES)}.")
    return Profile(**values)


def shipped_profiles() -> list[str]:
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))
