"""What holds for every test."""

import os
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

_UNIT = "tests/unit/"

# No test asks a hub, and none waits for one: what the tests read is in the package or made by them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several processes share the machine, and matrix products have the same bits on every one.
os.environ["OMP_NUM_THREADS"] = "1"
# A slow machine is no bug, and a failure must come again when the test is run again.
hypothesis.settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")


class Groups(LoadScopeScheduling):
    """Unit tests side by side (-n 2 --no-loadscope-reorder); those that start processes one at a time, for
    they have deadlines. xdist_group would say so, but has no effect with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_UNIT) else "processes"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The unit tests first."""
    items.sort(key=lambda item: not item.nodeid.startswith(_UNIT))
