"""How long a round takes on links of given speeds."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Link", "round_s"]

_ONE_WAY_TRIPS = 8  # roll call, its answer, two phases there and back, votes, their count


@dataclass(frozen=True, kw_only=True)
class Link:
    """A cluster's line to the others. Speeds in Mbit/s, latency one way in seconds."""

    uplink_mbps: float = 100.0
    downlink_mbps: float = 100.0
    latency_s: float = 0.02

    def __post_init__(self) -> None:
        if not (self.uplink_mbps > 0 and self.downlink_mbps > 0 and self.latency_s >= 0):
            raise ValueError(f"{self}: speeds must be above 0 and the latency not below")

    def transfer_s(self, sent_bytes: int, received_bytes: int) -> float:
        """Both directions at once."""
        return max(8e-6 * sent_bytes / self.uplink_mbps, 8e-6 * received_bytes / self.downlink_mbps)


def round_s(links: Sequence[Link], sent: Sequence[int], received: Sequence[int]) -> float:
    """Seconds from the last offer to the commit: the slowest member's bytes, and what each message waits for.

    sent, received: bytes of each member. The codec's arithmetic is not in it: it runs beside the training.
    """
    slowest = max(link.transfer_s(s, r) for link, s, r in zip(links, sent, received, strict=True))
    return slowest + _ONE_WAY_TRIPS * max(link.latency_s for link in links)
