"""Which rank of a cluster holds which stages of the run, under which schedule.

The run fixes the stages; how many ranks share them, and in which order microbatches go through, is up to the
cluster: the gradient is the same, so clusters of any shape average with each other. To the schedule the model
is cut into chunks, each one or more consecutive stages:

    1f1b, gpipe                  one chunk per rank, in order
    interleaved-1f1b,            as many rounds of one chunk per rank as there are stages for:
    interleaved-zero-bubble      chunk c at rank c mod R
    zbv                          there and back: two chunks per rank, the first and the last at rank 0
"""

from dataclasses import dataclass

from p2p_dilocox.errors import SpecError

__all__ = ["SCHEDULES", "Placement", "check_microbatches", "place"]

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")


@dataclass(frozen=True, slots=True)
class Placement:
    """All stages of a run on the ranks of a cluster."""

    chunks: tuple[range, ...]
    """The stages of each chunk, in the order of the model."""
    ranks: tuple[int, ...]
    """The rank of each chunk."""

    def chunks_of(self, rank: int) -> list[int]:
        """Numbers of the chunks that a rank holds, ascending."""
        return [chunk for chunk, holder in enumerate(self.ranks) if holder == rank]

    def stages_of(self, rank: int) -> list[int]:
        return [stage for chunk in self.chunks_of(rank) for stage in self.chunks[chunk]]


def place(schedule: str, stages: int, num_ranks: int) -> Placement:
    """Chunks differ by at most one stage. SpecError if there are not enough stages."""
    if not 1 <= num_ranks <= stages:
        raise SpecError(
            f"{num_ranks} processes for model.stages = {stages}, must be between 1 and {stages}: each holds "
            "at least one stage. Give this cluster fewer devices, or the run more stages."
        )
    if num_ranks == 1:
        rounds = 1
    elif schedule == "zbv":
        rounds = 2
    else:
        rounds = stages // num_ranks if schedule.startswith("interleaved") else 1
    if num_ranks * rounds > stages:
        raise SpecError(
            f'schedule = "zbv" needs 2 stages per process, {2 * num_ranks} for {num_ranks}; this run has '
            f"{stages}. Use --schedule 1f1b or interleaved-zero-bubble, or at most {stages // 2} devices."
        )
    num_chunks = num_ranks * rounds
    chunks = tuple(
        range(stages * chunk // num_chunks, stages * (chunk + 1) // num_chunks) for chunk in range(num_chunks)
    )
    there = tuple(range(num_ranks))
    return Placement(chunks, there + there[::-1] if schedule == "zbv" and rounds == 2 else there * rounds)


def check_microbatches(schedule: str, num_ranks: int, microbatches: int, batch_size: int) -> None:
    """SpecError, with numbers that fit, if a schedule cannot take a batch through so many ranks."""
    fitting = [m for m in range(1, batch_size + 1) if not batch_size % m and _fits(schedule, num_ranks, m)]
    if microbatches in fitting:
        return
    ways = f"--microbatches {' or '.join(map(str, fitting))}" if fitting else "fewer devices"
    if _fits("interleaved-zero-bubble", num_ranks, microbatches) and not batch_size % microbatches:
        ways += ", or --schedule interleaved-zero-bubble"
    if batch_size % microbatches:
        reason = f"must divide the run's batch of {batch_size} sequences (inner.batch_size)"
    elif not schedule.startswith("interleaved"):
        reason = f'must be at least {num_ranks}, the processes of this cluster, with schedule = "{schedule}"'
    else:
        rounds = microbatches // num_ranks
        reason = f'must be a multiple of {rounds} with schedule = "{schedule}" over {num_ranks} processes'
    raise SpecError(f"{microbatches} microbatches: {reason}. Use {ways}.")


def _fits(schedule: str, num_ranks: int, microbatches: int) -> bool:
    """What torch's schedules ask for; gpipe in some versions."""
    if schedule in ("1f1b", "gpipe"):
        return microbatches >= num_ranks
    if schedule.startswith("interleaved"):
        return microbatches % max(1, microbatches // num_ranks) == 0
    return True
