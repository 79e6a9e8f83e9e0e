"""When the average of a round is applied, and how much local movement survives it.

none      at once; the clusters wait for the round (DiLoCo)
arrival   at the inner step after it arrives, at the next boundary at the latest
delay     after so many inner steps (tau); the clusters wait for it there (Streaming DiLoCo)
boundary  at the next boundary, always one outer step behind
eager     as boundary, from an anchor that has the cluster's own share of the next average already
paper     as boundary, and local movement is given up: DiLoCoX, Algorithm 2 to the letter
"""

from enum import Enum

__all__ = ["Overlap"]


class Overlap(Enum):
    NONE = "none"
    ARRIVAL = "arrival"
    DELAY = "delay"
    BOUNDARY = "boundary"
    EAGER = "eager"
    PAPER = "paper"

    @property
    def waits_at_start(self) -> bool:
        return self is Overlap.NONE

    def lands(self, arrived: bool, h: int, delay: int) -> bool:
        """Whether the round on the wire lands after inner step h of the next outer step."""
        return (self is Overlap.ARRIVAL and arrived) or (self is Overlap.DELAY and h >= delay)

    @property
    def blends(self) -> bool:
        """theta_i <- keep theta_i + (1 - keep) anchor: all between them is the cluster's movement afterwards,
        also what this round has delivered. So Streaming DiLoCo has it (its alpha is our keep)."""
        return self is Overlap.DELAY

    @property
    def peeks(self) -> bool:
        """Whether a cluster goes on from `OuterState.peek_` when its round starts."""
        return self is Overlap.EAGER

    @property
    def carries(self) -> bool:
        """Whether what a restart takes from theta_i goes into the next contribution.

        In `boundary`, `eager` and `paper` that is movement which the next contribution, made at the same
        moment, would have had. With `none` nothing moves in flight but what rounding left. In `arrival` the
        part that survives is sent with the next contribution, and (1 - keep) of what moved in flight is given
        up.
        """
        return self not in (Overlap.ARRIVAL, Overlap.DELAY)
