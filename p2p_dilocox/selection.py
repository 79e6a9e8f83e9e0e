"""Which parameters the round of an outer step averages: all, a fragment of the layers, or a drawn fraction.

It follows from run spec and outer step alone, so all members of a round choose alike without a word, and so
does whoever reads the round later. The last round of a run averages everything: it ends in one model.
"""

import hashlib
import re

import numpy as np
import torch
from torch import Tensor

from p2p_dilocox.settings import RunSpec, Schedule

__all__ = ["drawn", "fragment_of", "partial", "selected"]

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def selected(spec: RunSpec, t: int, names: dict[str, int], num_layers: int) -> dict[str, Tensor | None]:
    """The parameters that outer step t averages: name -> the flat places of a drawn fraction, int64 [k], or
    None for the whole tensor.

    names: name -> number of values. num_layers: of the whole model.
    """
    schedule = spec.schedule
    if t >= spec.run.outer_steps:
        return dict.fromkeys(names)
    if schedule.fraction < 1:
        return {n: drawn(spec.run.seed, t, n, numel, schedule.fraction) for n, numel in names.items()}
    turn = (t - 1) % schedule.fragments
    return {n: None for n in names if fragment_of(n, num_layers, schedule) == turn}


def partial(schedule: Schedule) -> bool:
    """Whether a round averages less than everything."""
    return schedule.fraction < 1 or schedule.fragments > 1


def fragment_of(name: str, num_layers: int, schedule: Schedule) -> int:
    """Streaming DiLoCo (arXiv 2501.18512): layers l with equal l mod P (strided), or neighbours (sequential).

    What comes before the layers is of the first fragment; final norm and head, which come after, of the last.
    """
    number = _LAYER.search(name)
    if number is None:
        return 0 if "emb" in name or ".wte" in name or ".wpe" in name else schedule.fragments - 1
    layer = int(number[1])
    if schedule.order == "strided":
        return layer % schedule.fragments
    return layer * schedule.fragments // num_layers


def drawn(seed: int, t: int, name: str, numel: int, fraction: float) -> Tensor:
    """Flat places, int64 [k], ascending: each value with probability `fraction` (SPARTA's Bernoulli mask).

    Philox is specified to the bit and numpy keeps its stream, so every machine draws the same.
    """
    key = hashlib.sha256(f"p2p_dilocox places {seed} {t} {name}".encode()).digest()[:16]
    stream = np.random.Philox(key=int.from_bytes(key, "little"))
    numbers = stream.random_raw((numel + 1) // 2).astype("<u8", copy=False).view("<u4")[:numel]
    return torch.from_numpy(np.flatnonzero(numbers < round(fraction * 2**32)))
