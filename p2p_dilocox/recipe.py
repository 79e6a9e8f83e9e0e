"""Methods of the field as named defaults of the same parts: outer optimizer, overlap, compression.

A recipe is data. `run.toml` names one and may override any key; what it does not set comes from here.
"""

from dataclasses import dataclass

from p2p_dilocox.settings import Compression, Outer, Overlap

__all__ = ["OVERLAP_DEFAULTS", "RECIPES", "Recipe", "default_gamma"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`about`: one paragraph for a reader who chooses. `source`: arXiv id of the method."""

    about: str
    source: str
    outer: Outer
    overlap: Overlap
    compression: Compression


def default_gamma(feedback: str, lowrank: int) -> float:
    """How much of the error buffer to add again.

    Undamped local feedback on a low rank grows to several times the fresh movement, because momentum
    amplifies what arrives late; behind plain quantisation it stays small.
    """
    return 0.5 if feedback == "local" and lowrank > 0 else 1.0


OVERLAP_DEFAULTS: dict[str, tuple[Overlap, Outer]] = {
    "arrival": (Overlap(mode="arrival", keep=0.5), Outer(lr=0.7, momentum=0.7)),
    "boundary": (Overlap(mode="boundary", keep=0.5), Outer(lr=0.5, momentum=0.7)),
    "paper": (Overlap(mode="paper", keep=0.0), Outer(lr=0.5, momentum=0.5)),
    "none": (Overlap(mode="none", keep=0.0), Outer(lr=0.7, momentum=0.7)),
}
"""The longer an average is under way, the smaller the outer learning rate that is stable. Used where run.toml
asks for another overlap than its recipe has, so that one setting is enough to change it."""


def _lossy(lowrank: int, strong_bits: int = 4, feedback: str = "local") -> Compression:
    """docs/recipes.md has what each of these settings was measured to be worth."""
    gamma = default_gamma(feedback, lowrank)
    return Compression(
        bits=4, return_bits=4, strong_bits=strong_bits, strong_fraction=0.125, gather_up_to=2, group=64,
        lowrank=lowrank, feedback=feedback, gamma=gamma,
    )  # fmt: skip


def _floats(bits: int) -> Compression:
    return Compression(
        bits=bits, return_bits=bits, strong_bits=bits, strong_fraction=0.125, gather_up_to=0, group=64,
        lowrank=0, feedback="none", gamma=1.0,
    )  # fmt: skip


_ARRIVAL, _ARRIVAL_OUTER = OVERLAP_DEFAULTS["arrival"]
_PAPER, _PAPER_OUTER = OVERLAP_DEFAULTS["paper"]
_SYNCHRONOUS, _ = OVERLAP_DEFAULTS["none"]

RECIPES: dict[str, Recipe] = {
    "dilocox": Recipe(
        about="Local AdamW steps on a pipeline per cluster; pseudo-gradients leave as low-rank factors "
        "in 4 bits, the strongest eighth in 8, and are averaged behind the next inner steps. Unlike "
        "the paper, an average is applied as soon as it is there and each cluster keeps its own "
        "error, which is what makes an outer learning rate of 0.7 stable.",
        source="arXiv:2506.21263",
        outer=_ARRIVAL_OUTER, overlap=_ARRIVAL, compression=_lossy(lowrank=64, strong_bits=8),
    ),
    "dilocox-dense": Recipe(
        about="dilocox without the low rank: every value of the pseudo-gradient, in 4 bits. For small "
        "models and fast links: no direction is lost, at twice the bytes of a rank of a quarter.",
        source="arXiv:2506.21263",
        outer=_ARRIVAL_OUTER, overlap=_ARRIVAL, compression=_lossy(lowrank=0),
    ),
    "dilocox-paper": Recipe(
        about="Algorithm 2 to the letter: every average is applied exactly one outer step late, local "
        "movement starts from the anchor again, and the error is measured against the average. "
        "For comparison: it loses to dilocox at equal bytes, and an outer momentum of 0.9 makes "
        "it diverge above a learning rate of 0.24.",
        source="arXiv:2506.21263",
        outer=_PAPER_OUTER, overlap=_PAPER, compression=_lossy(lowrank=64, feedback="paper"),
    ),
    "diloco": Recipe(
        about="The method all others start from: H local AdamW steps, then a synchronous average of "
        "whole pseudo-gradients in 32 bits and one Nesterov step.",
        source="arXiv:2311.08105",
        outer=Outer(lr=0.7, momentum=0.9), overlap=_SYNCHRONOUS, compression=_floats(32),
    ),
    "opendiloco": Recipe(
        about="diloco as the first public run over the Internet had it: pseudo-gradients travel in 16 "
        "bits.",
        source="arXiv:2407.07852",
        outer=Outer(lr=0.7, momentum=0.9), overlap=_SYNCHRONOUS, compression=_floats(16),
    ),
    "fedavg": Recipe(
        about="Federated averaging: the outer step replaces the parameters by the mean over the "
        "clusters. Plain SGD with learning rate 1 does exactly that.",
        source="arXiv:1602.05629",
        outer=Outer(lr=1.0, momentum=0.0, nesterov=False), overlap=_SYNCHRONOUS, compression=_floats(32),
    ),
}  # fmt: skip
