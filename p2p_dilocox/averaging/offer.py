"""What a cluster says of its contribution when it answers the roll call."""

from dataclasses import dataclass

__all__ = ["Offer"]


@dataclass(frozen=True)
class Offer:
    """The same on all ranks of a cluster.

    weight: tokens trained since the last offer, 0 if there is nothing to average. norm: L2 norm of the whole
    pseudo-gradient, all stages together. fingerprint: of the anchor it starts from, () if not known.
    lowrank: the rank that the cluster wants for each stage, 0 or () where it does not know; H likewise. See
    adapting.py.
    """

    weight: float
    norm: float = 0.0
    fingerprint: tuple[float, ...] = ()
    lowrank: tuple[int, ...] = ()
    H: int = 0
