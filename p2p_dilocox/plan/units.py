"""Quantities as people write them: 40GB, 40GiB, 100Mbps, 312TFLOPS, 1.5T."""

import math
import re

from p2p_dilocox.errors import SpecError

__all__ = ["parse_bits_per_s", "parse_bytes", "parse_count", "parse_flops"]

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {f"{prefix}i": 1024.0**n for n, prefix in enumerate("kmgt", 1)}


def parse_bytes(text: str) -> float:
    """ "40GB" is 40e9, "40GiB" 40 * 2^30; capitals do not matter, but Gb are bits. Raises SpecError, also for
    a number alone."""
    number, unit = _split(text, "40GB, 40GiB or 512MiB")
    if not unit:
        raise SpecError(f"{text!r} has no unit: write {text.strip()}GB, or {text.strip()}B if it is bytes")
    if unit.endswith("b") and unit[:1].isupper():
        raise SpecError(f"{text!r} is a number of bits; memory is counted in bytes: write {text[:-1]}B")
    prefix = unit[:-1].lower() if unit.lower().endswith("b") else "?"
    return _scaled(text, number, (_DECIMAL | _BINARY).get(prefix), "40GB, 40GiB or 512MiB")


def parse_bits_per_s(text: str) -> float:
    """ "100Mbps", "100mbit", "100Mbit/s" are 1e8, "12.5MB/s" too. Raises SpecError."""
    form = "100Mbps, 1Gbit/s or 12.5MB/s"
    number, unit = _split(text, form)
    if match := re.fullmatch(r"([kKMGT]?)B(?:/s|ps)", unit):
        return _scaled(text, number, 8 * _DECIMAL[match[1].lower()], form)
    match = re.fullmatch(r"([kmgt]?)(?:bps|b/s|bits?|bits?/s)", unit.lower())
    return _scaled(text, number, _DECIMAL[match[1]] if match else None, form)


def parse_flops(text: str) -> float:
    """Operations per second: "312TFLOPS", "312T", "312e12". Raises SpecError."""
    number, unit = _split(text, "312TFLOPS or 312e12")
    prefix = re.fullmatch(r"([kmgtp]?)(?:flops?|flop/s)?", unit.lower())
    return _scaled(text, number, _DECIMAL[prefix[1]] if prefix else None, "312TFLOPS or 312e12")


def parse_count(text: str) -> float:
    """Tokens: "300M", "20B" (10^9), "1.5T", "1e9". Raises SpecError."""
    number, unit = _split(text, "300M, 20B or 1e9")
    factor = {"b": 1e9}.get(unit.lower(), _DECIMAL.get(unit.lower()))
    return _scaled(text, number, factor, "300M, 20B or 1e9")


def _split(text: str, form: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise SpecError(f"{text!r} is not a number with a unit: write {form}")
    return float(match[1]), match[2]


def _scaled(text: str, number: float, factor: float | None, form: str) -> float:
    if factor is None:
        raise SpecError(f"{text!r} has no unit that is known here: write {form}")
    value = number * factor
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"{text!r} must be above 0 and finite")
    return value
