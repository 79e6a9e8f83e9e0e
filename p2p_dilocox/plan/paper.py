"""Figures printed in the DiLoCoX paper (arXiv 2506.21263), recomputed from one set of assumptions.

What the paper prints is data here, a prediction is a formula, and nothing is chosen per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "ASSUMPTIONS", "CASES", "GPU_BYTES", "Case", "Fit", "Rate", "memory", "ring_bytes", "speed",
    "sync_example",
]  # fmt: skip

GPU_BYTES = 40 * 2**30
LINK_BITS_PER_S = 1e9
H = 125
BATCH_TOKENS = 16384
PEAK_FLOPS, MFU = 312e12, 0.043

ASSUMPTIONS = (
    "1 Gbit/s in and out of a cluster; H 125",
    "two clusters, of 8 GPUs each for OPT-1.3B and of 80 each for 107B: no method holds 107B in 8 GPUs of "
    "40 GB, and 78 layers with embedding and head are 80 stages",
    "AllReduce: 16-bit gradients at every step, not overlapped",
    "CocktailSGD: 4 bits of 0.1 * 0.08 of the values, for 107B of 0.1 * 0.04, positions not counted (the "
    "paper's 500x and 1,000x); at every step, not overlapped",
    "DiLoCoX: 4 bits for 16, and half of it with rank 2048 for 107B (the paper's 2x), behind H steps",
    f"inferred from the printed figures, once for all of them: {BATCH_TOKENS:,} tokens per step of both "
    f"clusters, and {MFU:.1%} of an A800's {PEAK_FLOPS / 1e12:.0f} TFLOPS with the pipeline's bubbles, at 6 "
    "operations per parameter and token",
    "memory, bytes per parameter: 16 for float32 parameters, gradients and AdamW; CocktailSGD 4 more for the "
    "common copy and 4 / D for a reducer's error; OpenDiLoCo 8 more; DiLoCoX 12 more, as in this program. "
    "Without activations, spread evenly over a cluster's GPUs; OpenDiLoCo, which has no pipeline, over the 8 "
    "of one server. This program, with activations and the fullest stage: plan qwen1.5-107b-paper --memory "
    "40GiB --offload, which fits",
)


@dataclass(frozen=True, slots=True)
class Case:
    """parameters: of the shipped run spec called `run`. gpus: of a cluster. cocktail, dilocox: bytes that
    these send, as a part of those of 16-bit gradients. printed: tokens per second by method."""

    name: str
    run: str
    parameters: int
    gpus: int
    cocktail: float
    dilocox: float
    printed: Mapping[str, float]


CASES = (
    Case(
        "OPT-1.3B", "opt-1.3b-paper", 1_315_758_080, 8, 0.1 * 0.08 * 4 / 16, 4 / 16,
        MappingProxyType({"allreduce": 745.0, "cocktailsgd": 16161.0, "dilocox": 23880.0}),
    ),
    Case(
        "Qwen1.5-107B", "qwen1.5-107b-paper", 108_491_952_128, 80, 0.1 * 0.04 * 4 / 16, 4 / 16 / 2,
        MappingProxyType({
            "allreduce": 10.4, "cocktailsgd": 2427.0, "dilocox": 3728.0, "dilocox, no overlap": 2197.0,
            "dilocox, no compression": 1168.0,
        }),
    ),
)  # fmt: skip
CLUSTERS, SERVER_GPUS = 2, 8


@dataclass(frozen=True, slots=True)
class Rate:
    case: str
    method: str
    tokens_per_s: float
    printed: float

    @property
    def deviation(self) -> float:
        return self.tokens_per_s / self.printed - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """gpu_bytes: of a method's state on one of `gpus`."""

    case: str
    method: str
    gpus: int
    gpu_bytes: float

    @property
    def fits(self) -> bool:
        return self.gpu_bytes <= GPU_BYTES


def ring_bytes(parameters: float, clusters: int, bytes_per_value: float) -> float:
    """What each of D clusters sends in an AllReduce: 2 (D - 1) / D of the vector (section 2.4.1)."""
    return 2 * (clusters - 1) / clusters * bytes_per_value * parameters


def sync_example() -> tuple[float, float]:
    """Section 2.4.1: bytes and hours of a float32 AllReduce of 100e9 parameters, 3 clusters, 1 Gbit/s."""
    sent = ring_bytes(100e9, 3, 4)
    return sent, 8 * sent / LINK_BITS_PER_S / 3600


def speed(case: Case) -> list[Rate]:
    """Tokens per second of both clusters, for every method of which the paper prints them."""
    whole_s = 8 * ring_bytes(case.parameters, CLUSTERS, 2) / LINK_BITS_PER_S
    step_s = BATCH_TOKENS * 6 * case.parameters / (CLUSTERS * case.gpus * PEAK_FLOPS * MFU)
    round_s = whole_s * case.dilocox
    seconds_per_step = {
        "allreduce": step_s + whole_s,
        "cocktailsgd": step_s + whole_s * case.cocktail,
        "dilocox": max(step_s, round_s / H),
        "dilocox, no overlap": step_s + round_s / H,
        "dilocox, no compression": max(step_s, whole_s / H),
    }
    return [
        Rate(case.name, method, BATCH_TOKENS / seconds_per_step[method], printed)
        for method, printed in case.printed.items()
    ]


def memory(case: Case) -> list[Fit]:
    """Bytes of state per GPU; for a case with larger clusters than one server, also as clusters of one."""
    per_parameter = {"allreduce": 16.0, "cocktailsgd": 20 + 4 / CLUSTERS, "opendiloco": 24.0, "dilocox": 28.0}
    layouts = {case.gpus, SERVER_GPUS}
    return [
        Fit(case.name, method, gpus, each * case.parameters / gpus)
        for gpus in sorted(layouts)
        for method, each in per_parameter.items()
        if method != "opendiloco" or gpus == SERVER_GPUS
    ]
