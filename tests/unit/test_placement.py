"""Who holds which stages, against torch's own schedules."""

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # knows ranks, sends nothing

from p2p_dilocox.errors import SpecError
from p2p_dilocox.placement import SCHEDULES, check_microbatches, place

TORCHS = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_place_and_chunks_are_even(schedule: str) -> None:
    for stages, num_ranks in itertools.product(range(1, 13), range(1, 7)):
        if num_ranks > stages or (schedule == "zbv" and num_ranks > 1 and 2 * num_ranks > stages):
            with pytest.raises(SpecError, match=f"{num_ranks}.* {stages}"):
                place(schedule, stages, num_ranks)
            continue
        placement = place(schedule, stages, num_ranks)
        assert [stage for chunk in placement.chunks for stage in chunk] == list(range(stages))
        assert max(map(len, placement.chunks)) - min(map(len, placement.chunks)) <= 1
        held = [placement.stages_of(rank) for rank in range(num_ranks)]
        assert sorted(stage for stages_ in held for stage in stages_) == list(range(stages))
        assert all(held)


def test_examples() -> None:
    assert [list(place("1f1b", 5, 2).stages_of(r)) for r in range(2)] == [[0, 1], [2, 3, 4]]
    assert [list(place("interleaved-1f1b", 4, 2).stages_of(r)) for r in range(2)] == [[0, 2], [1, 3]]
    assert [list(place("zbv", 5, 2).stages_of(r)) for r in range(2)] == [[0, 3, 4], [1, 2]]
    assert place("zbv", 3, 1).stages_of(0) == [0, 1, 2]


@pytest.fixture
def cluster_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_torch_takes_what_we_take_and_refuses_what_we_refuse(num_ranks: int, cluster_of: None) -> None:
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    for schedule, kind in TORCHS.items():
        placement = place(schedule, 2 * num_ranks + 1, num_ranks)
        for microbatches in range(1, 15):
            made = [
                PipelineStage(torch.nn.Linear(2, 2), chunk, len(placement.chunks), torch.device("cpu"))
                for chunk in placement.chunks_of(0)
            ]
            try:
                theirs = kind(made if len(made) > 1 else made[0], microbatches, loss_fn=lambda y, _: y.sum())
            except ValueError:
                with pytest.raises(SpecError):
                    check_microbatches(schedule, num_ranks, microbatches, microbatches)
                continue
            if schedule == "gpipe" and microbatches < num_ranks:
                continue  # torch 2.12 refuses it, 2.13 does not
            check_microbatches(schedule, num_ranks, microbatches, microbatches)
            if len(made) > 1:
                assert theirs.stage_index_to_group_rank == dict(enumerate(placement.ranks))


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "microbatches", "batch", "words"),
    [
        ("1f1b", 4, 2, 8, "must be at least 4, .* Use --microbatches 4 or 8, or --schedule interleaved-z"),
        ("1f1b", 4, 1, 2, "must be at least 4, .* Use fewer devices, or --schedule interleaved-z"),
        ("gpipe", 4, 3, 8, r"must divide the run's batch of 8 .* Use --microbatches 4 or 8\."),
        ("interleaved-1f1b", 4, 9, 18, "must be a multiple of 2 .* over 4 processes. Use --microbatches 1"),
        ("zbv", 1, 3, 4, r"must divide .* Use --microbatches 1 or 2 or 4\."),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused_with_some_that_do(
    schedule: str, num_ranks: int, microbatches: int, batch: int, words: str
) -> None:
    """Field report G2."""
    with pytest.raises(SpecError, match=words):
        check_microbatches(schedule, num_ranks, microbatches, batch)


def test_too_few_microbatches_are_no_problem_for_the_other_schedules() -> None:
    """Field report G2; tests/unit/test_pipeline_ranks.py runs them."""
    for schedule in SCHEDULES[2:]:
        for microbatches in (1, 2):
            check_microbatches(schedule, 4, microbatches, 8)
