"""Faults on the dot: where they happen, once, and only in a checkout."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from p2p_dilocox import fault_points

ROOT = Path(__file__).parents[2]
COME = """
from p2p_dilocox.fault_points import reach
for t in (1, 2, 3):
    for point in ("roll_call", "averaged"):
        reach(point, t)
        print(point, t, flush=True)
"""


def come(fault: str, where: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """What a process says that comes to some points, with `fault` in its environment."""
    environment = os.environ | {"DILOCOX_FAULT": fault, "PYTHONPATH": str(where)}
    return subprocess.run(
        [sys.executable, "-c", COME], env=environment, cwd=where, capture_output=True, text=True, timeout=60
    )


def test_a_process_is_killed_at_the_point_in_the_outer_step_and_only_once(tmp_path: Path) -> None:
    fault = f"kill@averaged:2:{tmp_path / 'once'}"
    killed = come(fault)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.splitlines()[-1] == "roll_call 2"
    again = come(fault)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, "averaged 3")


def test_a_fault_that_is_none_is_refused(tmp_path: Path) -> None:
    for fault in (
        "kill",
        "kill@nowhere:2:x",
        "kill@averaged:x:x",
        "kill@averaged:2:",
        "burn@averaged:2:x",
    ):
        assert "write kill@averaged:12" in come(fault).stderr, fault


def test_an_installed_package_knows_no_faults(tmp_path: Path) -> None:
    package = tmp_path / "p2p_dilocox"
    package.mkdir()
    for name in ("__init__", "env", "errors", "fault_points"):
        shutil.copy(ROOT / "p2p_dilocox" / f"{name}.py", package)
    done = come(f"kill@averaged:2:{tmp_path / 'once'}", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "averaged 3"), done.stderr


def test_every_point_is_in_the_code_once() -> None:
    code = "".join(path.read_text() for path in (ROOT / "p2p_dilocox").rglob("*.py"))
    assert sorted(re.findall(r'reach\("(\w+)"', code)) == sorted(fault_points.POINTS)
