"""What holds for every test."""

import os
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# No test asks a hub, and none waits for one: what the tests read is in the package or made by them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several processes share the machine, and matrix products have the same bits on every one.
os.environ["OMP_NUM_THREADS"] = "1"
# A slow machine is no bug, and a failure must come again when the test is run again.
hypothesis.settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")


_NO_CLOCKS = ("tests/faults/test_chaos.py", "tests/apps/test_commands.py")


def _has_clocks(nodeid: str) -> bool:
    """Whole programs that must do something in time. Not the chaos, whose faults come when they come, nor
    commands that are refused."""
    return nodeid.startswith(("tests/apps/", "tests/faults/")) and not nodeid.startswith(_NO_CLOCKS)


class Groups(LoadScopeScheduling):
    """`pytest -n 2 --no-loadscope-reorder`: those that have clocks one at a time on one worker, all others
    file by file on the other. xdist_group would say so, but has no effect with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return "clocks" if _has_clocks(nodeid) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that have clocks take longest: first with two workers, else last."""
    by_two = hasattr(config, "workerinput")
    items.sort(key=lambda item: _has_clocks(item.nodeid) != by_two)
