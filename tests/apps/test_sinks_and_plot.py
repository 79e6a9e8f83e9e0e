"""Where events go: files of JSON lines, TensorBoard, a plot."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from p2p_dilocox.errors import StateError
from p2p_dilocox.events import Adapted, Evaluated, Event, Finished, InnerStep, Phase, RoundCommitted
from p2p_dilocox.plot import load_curves, plot_curves
from p2p_dilocox.sinks import JsonlSink, TensorBoardSink, read_events


def inner(t: int, h: int, rank: int = 0) -> InnerStep:
    return InnerStep(
        rank=rank, t=t, h=h, H=2, loss=7.0 - t - h / 10, lr=1e-3, grad_norm=0.5, tokens=100, seconds=0.25
    )


def commit(t: int, rank: int) -> RoundCommitted:
    return RoundCommitted(
        rank=rank, t=t, members=["a", "b"], included=True, seconds=1.0, waited_s=0.0, sent_bytes=1000 + rank,
        received_bytes=10, lowrank=8, H=2, parameter_digests={rank: "ab"},
    )  # fmt: skip


EVENTS: list[Event] = [
    Phase(name="training"),
    Evaluated(t=0, val_loss=7.5),
    *(inner(t, h, rank) for t in (1, 2) for h in (1, 2) for rank in (0, 1)),
    *(commit(t, rank) for t in (1, 2) for rank in (0, 1)),
    Evaluated(t=2, val_loss=5.5),
    Evaluated(rank=1, t=2, val_loss=5.5),
    Finished(t=2, reason="complete", parameter_digests={0: "ab"}),
]


def write(path: Path) -> None:
    sink = JsonlSink(path)
    for event in EVENTS:
        sink.write(event)
    sink.close()


def test_events_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl")
    assert list(read_events(tmp_path / "events.jsonl")) == EVENTS


def test_every_prefix_of_a_killed_writer_s_file_gives_its_whole_lines(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl")
    content = (tmp_path / "events.jsonl").read_bytes()
    second_end = content.index(b"\n", content.index(b"\n") + 1) + 1
    for cut in range(second_end + 1):
        (tmp_path / "cut.jsonl").write_bytes(content[:cut])
        assert list(read_events(tmp_path / "cut.jsonl")) == EVENTS[: content[:cut].count(b"\n")]


@pytest.mark.parametrize(
    "line", ["{}", "[]", "no json", '{"kind": "unknown"}', '{"kind": "evaluated", "t": 1}']
)
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "phase", "name": "training"}\n' + line + "\n")
    with pytest.raises(StateError, match="line 2"):
        list(read_events(tmp_path / "events.jsonl"))


def test_tensorboard_reads_the_scalars_that_were_reported(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for event in EVENTS:
        if event.rank == 0:
            sink.write(event)
    sink.close()
    scalars = EventAccumulator(str(tmp_path))
    scalars.Reload()
    assert [(s.step, round(s.value, 3)) for s in scalars.Scalars("train/loss")] == [
        (1, 5.9),
        (2, 5.8),
        (3, 4.9),
        (4, 4.8),
    ]
    assert [(s.step, s.value) for s in scalars.Scalars("train/tokens_per_s")] == [
        (n, 400.0) for n in (1, 2, 3, 4)
    ]
    assert [(s.step, s.value) for s in scalars.Scalars("valid/loss")] == [(0, 7.5), (2, 5.5)]
    assert [(s.step, s.value) for s in scalars.Scalars("round/sent_bytes")] == [(1, 1000.0), (2, 1000.0)]


def test_curves_count_a_step_once_and_sum_the_bytes_of_ranks(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl")
    curves = load_curves(tmp_path)
    assert curves.loss == [(0.5, 5.9), (1.0, 5.8), (1.5, 4.9), (2.0, 4.8)]
    assert curves.val_loss == [(0, 7.5), (2, 5.5)]
    assert curves.tokens_per_s == [(1, 400.0), (2, 400.0)]
    assert curves.sent_bytes == [(1, 2001), (2, 2001)]


def test_the_plot_is_a_png_of_the_size_it_says(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl")
    out = tmp_path / "new" / "loss.png"
    plot_curves([load_curves(tmp_path)] * 2, out, unigram_loss=6.0, fp16_bytes=1e5)
    header = out.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1500, 450)


def test_rank_and_h_are_drawn_with_the_reasons_of_their_changes(tmp_path: Path) -> None:
    """Two ranks, of a stage each; both say what H is."""
    said = ("stage 0: lowrank 8 -> 5: because", "stage 1: lowrank 8 -> 6: because")
    changes = [Adapted(rank=r, t=2, lowrank=[5, 6], H=1, message=f"{said[r]}; H 2 -> 1: so") for r in (0, 1)]
    sink = JsonlSink(tmp_path / "events.jsonl")
    later = inner(3, 1)
    for event in (*EVENTS, *changes, replace(later, H=1), commit(3, 0), commit(3, 1)):
        sink.write(event)
    sink.close()
    curves = load_curves(tmp_path)
    assert curves.ranks == {0: [(1, 8), (2, 5), (3, 5)], 1: [(1, 8), (2, 6), (3, 6)]}
    assert curves.H == [(1, 2), (2, 2), (3, 1)]
    assert curves.changes == {2: f"{said[0]}; H 2 -> 1: so; {said[1]}"}
    out = tmp_path / "adapted.png"
    plot_curves([curves], out)
    assert struct.unpack(">II", out.read_bytes()[16:24]) == (1500, 900)


def test_a_directory_without_losses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="Is it a state directory"):
        load_curves(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(StateError, match="no losses yet"):
        load_curves(tmp_path)
