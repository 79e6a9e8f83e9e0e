"""From events to what a person sees: progress, the live view, lines of a log."""

import importlib
from typing import Any

import pytest
from rich.console import Console

from p2p_dilocox.events import (
    Checkpointed,
    Evaluated,
    Event,
    Finished,
    InnerStep,
    Phase,
    RoundCommitted,
    RoundDropped,
    Warned,
)
from p2p_dilocox.program import printable

display = importlib.import_module("p2p_dilocox.peers.display")
progress = importlib.import_module("p2p_dilocox.peers.progress")
view = importlib.import_module("p2p_dilocox.peers.view")

ME, OTHER = "a" * 16, "b" * 16
HOSTILE = "\x1b]0;owned\x07\x1b[2J"


def new_progress() -> Any:
    return progress.Progress(
        run_id="demo", cluster_id=ME, name="ridge-3", recipe="dilocox", num_ranks=2, outer_steps=30
    )


def inner(t: int, h: int, *, rank: int = 0, loss: float = 5.0, time: float = 0.0) -> InnerStep:
    return InnerStep(
        rank=rank, time=time, t=t, h=h, H=5, loss=loss, lr=3e-4, grad_norm=1.0, tokens=2000, seconds=0.5
    )


def commit(t: int, *, rank: int, waited_s: float = 1.0, time: float = 0.0) -> RoundCommitted:
    return RoundCommitted(
        rank=rank, time=time, t=t, members=[ME, OTHER], included=True, seconds=4.0, waited_s=waited_s,
        sent_bytes=150_000, received_bytes=200_000, lowrank=16, H=5, parameter_digests={rank: f"{rank}" * 64},
    )  # fmt: skip


def long_training() -> list[Event]:
    events: list[Event] = [Phase(name="training"), Evaluated(t=0, val_loss=7.6)]
    for t in range(1, 29):
        events += [inner(t, h, time=100 * t + h, loss=7 - t / 10) for h in range(1, 6)]
        events += [commit(t, rank=rank, time=100 * t + 6) for rank in (0, 1)]
        events += [Evaluated(t=t, val_loss=7.5 - t / 10), Warned(message=f"{HOSTILE} {t}" + "x" * 300)]
    return [
        *events,
        RoundDropped(t=29, reason=HOSTILE, waited_s=0.0),
        Checkpointed(t=28, path="p", seconds=1.0),
    ]


def test_a_round_is_reported_once_all_ranks_have_committed_it() -> None:
    p = new_progress()
    assert p.add(commit(1, rank=1, waited_s=0.5)) is None
    totals = p.add(commit(1, rank=0, waited_s=1.0))
    assert (totals.sent_bytes, totals.received_bytes, totals.waited_s, totals.hidden) == (
        300_000,
        400_000,
        1.0,
        0.75,
    )
    assert p.add(commit(1, rank=0)) is None
    assert p.sent_bytes == 300_000
    assert p.digests == {0: "0" * 64, 1: "1" * 64}


def test_after_a_restart_the_rounds_since_the_checkpoint_count_again() -> None:
    p = new_progress()
    for t in (1, 2):
        p.add(inner(t, 1))
        p.add(commit(t, rank=1))
        p.add(commit(t, rank=0))
    p.add(commit(3, rank=0))  # rank 1 never got there
    p.add(Phase(name="restarting", detail="in 1 s"))
    assert (p.phase, p.t) == ("restarting", 0)
    p.add(inner(2, 1, loss=1.5))
    assert (p.t, p.loss) == (2, 1.5)
    for t in (2, 3):
        assert p.add(commit(t, rank=0)) is None
        assert p.add(commit(t, rank=1)) is not None
    assert p.rounds[2].sent_bytes == p.rounds[1].sent_bytes
    assert p.sent_bytes == 2 * p.rounds[1].sent_bytes + 2.5 * p.rounds[1].sent_bytes


def test_an_inner_step_counts_once_however_many_ranks_report_it() -> None:
    p = new_progress()
    for h, loss in ((1, 6.0), (2, 4.0)):
        for rank in (1, 0):
            p.add(inner(1, h, rank=rank, loss=loss, time=10.0 * h))
    assert p.losses == [5.0]
    assert (p.t, p.h, p.H, p.tokens_per_s) == (1, 2, 5, 4000.0)


def test_utilisation_is_the_time_not_waited_for_rounds() -> None:
    p = new_progress()
    p.add(inner(1, 1, time=100.5))
    p.add(inner(1, 2, time=105.0))
    p.add(commit(1, rank=0, waited_s=2.0, time=110.0))
    p.add(commit(1, rank=1, waited_s=1.0, time=110.0))  # waited at the same time
    assert p.utilisation == pytest.approx(1 - 2.0 / 10.0)


def test_the_status_of_a_diverged_cluster_is_still_json() -> None:
    p = new_progress()
    p.add(inner(1, 1, loss=float("nan")))
    assert p.to_dict()["loss"] is None


def test_the_end_shows_as_the_phase() -> None:
    p = new_progress()
    p.add(Phase(name="leaving", detail="staying"))
    p.add(Finished(t=30, reason="complete", parameter_digests={0: "c" * 64}))
    assert (p.phase, p.detail, p.digests[0]) == ("complete", "", "c" * 64)
    assert p.committed == 30  # also if this start had nothing left to do


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_the_live_view_fits_the_terminal_and_shows_the_run(width: int, height: int) -> None:
    p = new_progress()
    for event in long_training():
        p.add(event)
    text = drawn(view.ClusterView(p), width, height)
    lines = text.splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    for part in (
        "run demo", "training", "ridge-3", ME, "28 of 30", "5 of 5", "4.200", "4.700", "█", "4,000 tokens/s",
        "lr 3.0e-04", "300.0 kB sent", "400.0 kB received", "8.4 MB sent", "lowrank 16", "H 5",
        "75% of 4.0 s hidden", "2 in round 28",
        "aaaaaaaa (this one)", "bbbbbbbb", "checkpoint of outer step 28",
    ):  # fmt: skip
        assert part in text, part


def test_the_live_view_draws_before_there_is_anything_to_show() -> None:
    assert "starting" in drawn(view.ClusterView(new_progress()), 80, 24)
    assert "cluster-a" not in drawn(view.DemoView([new_progress()]), 80, 24)


def test_the_demo_view_shows_all_clusters_and_the_slowest_one_s_step() -> None:
    fast, slow = new_progress(), new_progress()
    fast.name, slow.name = "cluster-a", "cluster-b"
    for event in long_training():
        fast.add(event)
    slow.add(commit(1, rank=0))
    lines = drawn(view.DemoView([fast, slow]), 80, 24).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24
    assert "1 of 30" in lines[1]
    assert any("cluster-b" in line for line in lines)


def test_nothing_that_others_send_steers_the_terminal() -> None:
    p = new_progress()
    p.add(Phase(name=HOSTILE, detail=HOSTILE))
    p.add(Warned(message=HOSTILE))
    p.add(RoundDropped(t=1, reason=HOSTILE, waited_s=0.0))
    bad = commit(1, rank=0)
    bad.members[1] = HOSTILE
    p.add(bad)
    text = drawn(view.ClusterView(p), 100, 30) + drawn(view.DemoView([p]), 100, 30)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert printable(HOSTILE).isprintable()


def test_a_log_has_one_line_per_outer_step_in_a_fixed_order() -> None:
    p, lines = new_progress(), list[str]()
    plain = display.PlainDisplay(lines.append)
    for event in (
        Phase(name="training"),
        inner(1, 1, loss=2.914),
        commit(1, rank=0),
        commit(1, rank=1),
        Evaluated(t=1, val_loss=2.5),
        Evaluated(rank=1, t=1, val_loss=2.5),
        RoundDropped(t=2, reason="ridge-4 is frozen", waited_s=0.0),
        RoundDropped(rank=1, t=2, reason="ridge-4 is frozen", waited_s=0.0),
        Warned(rank=1, message="disk full"),
    ):
        plain.event(p, event, p.add(event))
    assert lines == [
        "training",
        "outer 1 committed  2 clusters  loss 2.914  0.3 MB up  lowrank 16  H 5  hidden 75% of 4.0 s",
        "outer 1 evaluated  val loss 2.500",
        "outer 2 dropped  ridge-4 is frozen",
        "rank 1: disk full",
    ]


def test_waiting_is_reported_every_ten_seconds() -> None:
    p, lines = new_progress(), list[str]()
    plain = display.PlainDisplay(lines.append)
    for second in range(25):
        event = Phase(time=float(second), name="waiting", detail=f"1/2 clusters, {second} s")
        plain.event(p, event, p.add(event))
    assert lines == [f"waiting: 1/2 clusters, {second} s" for second in (0, 10, 20)]


def test_sparkline_scales_between_its_extremes_and_leaves_gaps() -> None:
    assert view.sparkline([0.0, 7.0, float("nan"), 3.5], 10) == "▁█ ▅"
    assert view.sparkline([1.0, 1.0], 10) == "▁▁"
    assert view.sparkline([9.0, 0.0, 7.0], 2) == "▁█"
    assert view.sparkline([], 10) == ""


def drawn(renderable: Any, width: int, height: int) -> str:
    console = Console(width=width, height=height, markup=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()
