"""Devices, profiles and ports: what is local to a machine."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2p_dilocox.errors import LinkError, SpecError
from p2p_dilocox.ports import shift_port

devices = importlib.import_module("p2p_dilocox.peers.devices")
profile = importlib.import_module("p2p_dilocox.peers.profile")


def test_cpu_count_is_the_number_of_ranks() -> None:
    assert devices.parse_devices("cpu:3", 4) == ("cpu", "cpu", "cpu")
    assert devices.parse_devices("cpu", 4) == ("cpu",)


def test_gpus_are_ranks_in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert devices.parse_devices("cuda:2,0", 2) == ("cuda:2", "cuda:0")


@pytest.mark.parametrize(("gpus", "expected"), [(0, ("cpu",)), (1, ("cuda:0",)), (8, ("cuda:0", "cuda:1"))])
def test_auto_takes_every_gpu_up_to_one_per_stage(
    monkeypatch: pytest.MonkeyPatch, gpus: int, expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert devices.parse_devices("auto", 2) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu:3", "3 processes; this run has 2 stages"),
        ("cpu:0", "not a list of devices"),
        ("cpu:-1", "not a list of devices"),
        ("gpu", "not a list of devices"),
        ("", "not a list of devices"),
        ("cuda", "not a list of devices"),
        ("cuda:0,0", "names a GPU twice"),
        ("cuda:7", "no cuda:7; torch finds 2"),
    ],
)
def test_wrong_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SpecError) as error:
        devices.parse_devices(text, 2)
    assert words in str(error.value)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "free", "refused"),
    [(2, 64 << 20, True), (2, 256 << 20, False), (8, 256 << 20, True), (8, 1 << 30, False), (1, 0, False)],
)
def test_gpus_are_refused_where_nccl_would_have_no_room(
    monkeypatch: pytest.MonkeyPatch, ranks: int, free: int, refused: bool
) -> None:
    """Field report H3: a container has 64 MiB of shared memory unless it is told otherwise."""
    state = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda _path: state)
    devices.check_shared_memory(["cpu"] * ranks)
    gpus = [f"cuda:{i}" for i in range(ranks)]
    if not refused:
        devices.check_shared_memory(gpus)
        return
    with pytest.raises(SpecError) as error:
        devices.check_shared_memory(gpus)
    assert f"/dev/shm has {free / 1e6:.0f} MB free" in str(error.value)
    assert f"{ranks * 96.37888:.0f} MB" in str(error.value) and "--shm-size 1g" in str(error.value)


def test_every_shipped_profile_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    names = profile.shipped_profiles()
    assert {"cpu-2", "one-gpu", "eight-a800"} <= set(names)
    for name in names:
        devices.parse_devices(profile.load_profile(name).devices, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("device = 'cpu'", "unknown key 'device'"),
        ("threads = 0", "threads = 0, must be at least 1"),
        ("threads = true", "must be of type int"),
        ("devices = ", "is not TOML"),
    ],
)
def test_a_wrong_profile_is_refused_by_key(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(SpecError) as error:
        profile.load_profile(str(file))
    assert words in str(error.value)


def test_an_unknown_profile_lists_the_shipped_ones() -> None:
    with pytest.raises(SpecError, match="one-gpu"):
        profile.load_profile("cpu-two")


def test_rank_r_takes_port_plus_r_and_port_0_stays_free() -> None:
    assert shift_port("/ip4/0.0.0.0/tcp/31340", 7) == "/ip4/0.0.0.0/tcp/31347"
    assert shift_port("/dns4/tcp.example/tcp/80", 1) == "/dns4/tcp.example/tcp/81"
    assert shift_port("/ip4/0.0.0.0/tcp/0", 7) == "/ip4/0.0.0.0/tcp/0"
    with pytest.raises(LinkError, match="port 65536"):
        shift_port("/ip4/0.0.0.0/tcp/65535", 1)


def test_a_profile_says_whether_to_offload(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("offload = true\n")
    assert profile.load_profile(str(tmp_path / "small.toml")).offload
    (tmp_path / "small.toml").write_text("offload = 1\n")
    with pytest.raises(SpecError, match="offload = 1 must be of type bool"):
        profile.load_profile(str(tmp_path / "small.toml"))
    assert not profile.load_profile("one-gpu").offload
