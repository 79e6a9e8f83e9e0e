"""Hours, bytes and heat: when a cluster rests, and what it says why."""

import asyncio
import ctypes
import datetime
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_dilocox.errors import SpecError
from p2p_dilocox.swarm.pace import Pace
from p2p_dilocox.swarm.stream import Frame, Stream

gpu = importlib.import_module("p2p_dilocox.peers.gpu")
limits = importlib.import_module("p2p_dilocox.peers.limits")


def at(hour: int, minute: int = 0, *, day: int = 1, month: int = 3) -> datetime.datetime:
    return datetime.datetime(2026, month, day, hour, minute)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("09:00-17:30", [at(9), at(17, 29)], [at(8, 59), at(17, 30), at(0)]),
        ("22:00-07:00", [at(22), at(23, 59), at(0), at(6, 59)], [at(7), at(21, 59)]),
        ("12:00-13:00, 22:00-7:00", [at(12), at(3)], [at(13), at(11, 59)]),
        ("22:00-24:00", [at(23, 59)], [at(0), at(21)]),
        ("00:00-24:00", [at(0), at(12), at(23, 59)], []),
    ],
)
def test_hours_are_open_from_and_not_to(
    text: str, inside: list[datetime.datetime], outside: list[datetime.datetime]
) -> None:
    hours = limits.Hours.parse(text)
    assert [hours.open_at(when) for when in inside + outside] == [True] * len(inside) + [False] * len(outside)


@pytest.mark.parametrize(
    "text", ["", "22-07", "25:00-07:00", "22:60-07:00", "22:00", "7:00-7:00", "a-b", "1:00-24:30"]
)
def test_hours_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError, match="22:00-07:00|no part of a day"):
        limits.Hours.parse(text)


def test_limits_are_read_in_whole_bytes() -> None:
    caps = limits.read_limits(None, "800kB", "1.5 GiB", None)
    assert (caps.upload_rate, caps.month_bytes) == (800_000, 3 * 2**29)


@pytest.mark.parametrize(
    ("values", "words"),
    [((None, "1kB", None, None), "64.0 kB per second"), ((None, None, None, 300), "gpu_c = 300")],
)
def test_limits_that_cannot_work_are_refused(values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        limits.read_limits(*values)


class Machine:
    """Its clock, its traffic and its GPU, as a test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.when = at(12)
        self.heat: int | None = None
        self.traffic: dict[int, int] = {}
        monkeypatch.setattr(limits, "traffic_of", lambda _pids: dict(self.traffic))

    def limits(self, state: Path, **caps: Any) -> Any:
        return limits.Limits(state, limits.Caps(**caps), clock=lambda: self.when, heat=lambda: self.heat)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(monkeypatch)


def test_outside_its_hours_a_cluster_finishes_its_outer_step_and_rests(
    machine: Machine, tmp_path: Path
) -> None:
    cluster = machine.limits(tmp_path, hours=limits.Hours.parse("22:00-07:00"))
    assert cluster.look([]) == limits.Pause("outside 22:00-07:00", now=False)
    machine.when = at(22)
    assert cluster.look([]) is None


def test_bytes_of_a_month_outlive_restarts_and_end_with_the_month(machine: Machine, tmp_path: Path) -> None:
    cluster = machine.limits(tmp_path, month_bytes=1_000_000)
    machine.traffic = {71: 600_000}
    assert cluster.look([71]) is None
    machine.traffic = {71: 700_000}
    assert cluster.look([71]) is None
    assert cluster.month.bytes == 700_000
    cluster.close()

    cluster = machine.limits(tmp_path, month_bytes=1_000_000)  # its p2pd counts from 0 again
    machine.traffic = {90: 200_000}
    assert cluster.look([90]) is None
    machine.traffic = {90: 200_000, 91: 150_000}  # one of a rank that was started again
    assert cluster.look([90, 91]) == limits.Pause("1.1 MB of 1.0 MB used in 2026-03", now=True)
    cluster.close()
    assert machine.limits(tmp_path, month_bytes=1_000_000).look([]) is not None
    machine.when = at(0, month=4)
    assert machine.limits(tmp_path, month_bytes=1_000_000).look([]) is None


def test_what_is_counted_is_saved_while_the_cluster_runs(machine: Machine, tmp_path: Path) -> None:
    """It may be killed."""
    cluster = machine.limits(tmp_path)
    machine.traffic = {71: 5_000}
    machine.when += datetime.timedelta(seconds=11)
    cluster.look([71])
    assert machine.limits(tmp_path).month.bytes == 5_000


def test_a_damaged_count_is_a_new_one(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "month.json").write_text('{"month": "2026-03", "bytes": ')
    assert machine.limits(tmp_path).month.bytes == 0


def test_a_hot_gpu_rests_until_it_is_ten_degrees_cooler(machine: Machine, tmp_path: Path) -> None:
    cluster = machine.limits(tmp_path, gpu_c=80)
    paused = []
    for heat in (79, 80, 75, 70, 69, 79, 80):
        machine.heat = heat
        paused.append(cluster.look([]) is not None)
    assert paused == [False, True, True, True, False, False, True]
    assert "80 °C" in cluster.look([]).reason
    machine.heat = None  # no driver tells
    assert cluster.look([]) is None


def test_traffic_is_what_a_process_reads_and_writes() -> None:
    before = limits.traffic_of([os.getpid()])[os.getpid()]
    reader, writer = os.pipe()
    for _ in range(16):
        os.write(writer, bytes(1 << 15))
        os.read(reader, 1 << 15)
    os.close(reader)
    os.close(writer)
    counted = limits.traffic_of([os.getpid()])[os.getpid()] - before
    assert 1 << 19 <= counted < 1.2 * (1 << 19)
    assert limits.traffic_of([1 << 30]) == {1 << 30: 0}


class Nvml:
    """Stands for the driver's library: C functions that fill in what they are given pointers to."""

    def __init__(self, heat: list[int | None]) -> None:
        self.heat, self.open = heat, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.heat)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:  # noqa: N802
        device._obj.value = 1000 + index.value
        return 0

    def nvmlDeviceGetTemperature(self, device: ctypes.c_void_p, sensor: int, celsius: Any) -> int:  # noqa: N802
        heat = self.heat[(device.value or 0) - 1000]
        celsius._obj.value = heat or 0
        return 0 if heat is not None and sensor == 0 else 3


def test_the_hottest_gpu_counts_and_one_that_tells_nothing_does_not() -> None:
    for heat, hottest in (([41, 67, None], 67), ([], None), ([None], None)):
        library = Nvml(heat)  # type: ignore[arg-type]
        assert gpu.hottest_c(lambda _name, library=library: library) == hottest
        assert library.open == 0


def test_without_a_driver_nothing_is_known() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert gpu.hottest_c(missing) is None


class Sink:
    """The writing end of a stream."""

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def write(self, data: memoryview) -> None:
        self.pieces.append(len(data))

    async def drain(self) -> None: ...


def test_streams_share_a_rate_in_turns_and_no_piece_is_longer_than_an_eighth_of_a_second() -> None:
    async def send() -> tuple[list[Sink], float]:
        pace, sinks = Pace(400_000), [Sink(), Sink()]
        streams = [Stream("p", asyncio.StreamReader(), sink, pace) for sink in sinks]  # type: ignore[arg-type]
        started = time.monotonic()
        await asyncio.gather(*(stream.send(Frame.DATA, bytes(149_995), 5.0) for stream in streams))
        return sinks, time.monotonic() - started

    sinks, seconds = asyncio.run(send())
    assert [sum(sink.pieces) for sink in sinks] == [150_000, 150_000]
    assert max(max(sink.pieces) for sink in sinks) <= 400_000 / 8
    assert (
        seconds >= (300_000 - 2 * 32_768) / 400_000
    )  # the clock of the limit itself; more on a busy machine


def test_without_a_limit_pieces_are_as_long_as_ever() -> None:
    async def send() -> list[int]:
        sink = Sink()
        await Stream("p", asyncio.StreamReader(), sink).send(Frame.DATA, bytes(1 << 16), 5.0)  # type: ignore[arg-type]
        return sink.pieces

    assert asyncio.run(send()) == [1 << 15, 1 << 15, 5]
