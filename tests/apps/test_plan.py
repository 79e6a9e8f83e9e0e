"""`dilocox-peer plan` as people and scripts call it."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from .conftest import command

SPEED = ("--uplink", "10Mbps", "--tokens-per-s", "2000")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(command("dilocox-peer"), ["plan", *arguments])


def record(*arguments: str, exit_code: int = 0) -> Any:
    result = plan(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_a_plan_without_a_limit_says_what_each_rank_needs() -> None:
    found = record("demo", "--devices", "cpu:2")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert sum(row["bytes"] for row in rank["bytes"]) == rank["device_bytes"] + rank["host_bytes"]
        assert rank["device_bytes"] == 0, "a CPU has one memory"
    assert sum(rank["parameters"] for rank in found["ranks"]) == found["parameters"] == 1_115_264
    assert found["fits"] is None and found["pace"] is None and found["recommended"] is None
    screen = plan("demo", "--devices", "cpu:2")
    assert screen.exit_code == 0
    assert "--memory" in screen.stdout and "--uplink" in screen.stdout
    assert "\x1b" not in screen.stdout, "plain in a pipe"


def test_whether_it_fits_is_the_exit_code_and_what_would_make_it_fit_does() -> None:
    need = max(rank["device_bytes"] for rank in record("demo", "--devices", "cuda:0")["ranks"])
    enough, short = f"{need}B", f"{0.99 * need:.0f}B"
    found = record("demo", "--devices", "cuda:0", "--memory", enough)
    assert found["fits"] is True and found["ways_to_fit"] == []
    screen = plan("demo", "--devices", "cuda:0", "--memory", short)
    assert screen.exit_code == 10
    assert "It does not fit" in screen.stdout and "  --offload: " in screen.stdout
    screen = plan("demo", "--devices", "cuda:0", "--memory", short, "--offload")
    assert screen.exit_code == 0 and "It fits" in screen.stdout


def test_the_paper_s_107b_fits_in_its_gpus() -> None:
    screen = plan("qwen1.5-107b-paper", "--memory", "40GiB", "--offload")
    assert screen.exit_code == 0 and "80 GPUs" in screen.stdout and "It fits" in screen.stdout, screen.output


def test_speed_and_a_choice_of_coding() -> None:
    found = record("demo", "--devices", "cpu:2", *SPEED, "--clusters", "4", "--tokens", "1B")
    rate, choice = found["pace"], found["recommended"]
    assert found["clusters"] == 4
    assert rate["days"] == pytest.approx(1e9 / rate["tokens_per_s"] / 86400)
    assert 0 < rate["utilisation"] <= 1
    enough = [c for c in found["codings"] if c["pace"]["enough_H"] <= 40] or found["codings"][-1:]
    assert (choice["coding"], choice["H"]) == (enough[0]["name"], max(40, enough[0]["pace"]["enough_H"]))
    slow = record("demo", "--devices", "cpu:2", "--uplink", "50kbps", *SPEED[2:])
    assert slow["recommended"]["H"] > 40, "nothing is hidden behind 40 steps"
    assert slow["pace"]["utilisation"] < 1
    screen = plan("demo", "--devices", "cpu:2", *SPEED).stdout
    for sentence in found["assumptions"]:
        assert " ".join(sentence.split()) in " ".join(screen.split())
    slower = plan("demo", "--devices", "cpu:2", "--uplink", "20kbps", *SPEED[2:]).stdout
    assert "deadlines.round_s = 60 is too short" in slower


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--memory", "40Gb"], "bits"),
        (["demo", "--memory", "40"], "40GB"),
        (["demo", "--memory", "-4GB"], "above 0"),
        (["demo", "--memory", "0GB"], "above 0"),
        (["demo", "--uplink", "fast"], "100Mbps"),
        (["demo", "--uplnk", "1Mbps"], "--uplink"),
        (["demo", "--clusters", "1"], "2<=x"),
        (["demo", "--ranks", "0"], "x>=1"),
        (["demo", "--ranks", "3"], "must be between 1 and 2"),
        (["demo", "--devices", "tpu:2"], "cpu:2"),
        (["demo", "--microbatches", "3"], "3 microbatches"),
        (["demo", "--devices", "cpu:0"], "not a list of devices"),
        (["demo", "--devices", "cpu:2", "--ranks", "2"], "not both"),
        (["demo", "--uplink", "1Mbps"], "--flops"),
        (["demo", "--uplink", "1Mbps", "--flops", "1T", "--tokens-per-s", "9"], "either"),
        (["demo", "--flops", "1TFLOPS"], "--uplink"),
        (["demo", *SPEED, "--mfu", "0.4"], "--flops"),
        (["demo", "--uplink", "1Mbps", "--flops", "1T", "--mfu", "1.5"], "x<=1"),
        (["demoo"], "demo, "),
        (["nothing.toml"], "nothing.toml"),
        ([], "--paper"),
        (["demo", "--paper"], "--paper"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], says: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_the_paper() -> None:
    found = record("--paper")
    assert round(found["sync_bytes"] / 1e9, 1) == 533.3
    assert {row["printed"] for row in found["speed"]} >= {10.4, 2427, 3728, 745, 16161, 23880}
    screen = plan("--paper")
    assert screen.exit_code == 0
    for figure in ("533.3 GB", "10.4", "2,427", "3,728", "745", "16,161", "23,880", "Assumed"):
        assert figure in screen.stdout
