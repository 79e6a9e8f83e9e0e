"""What holds for every test."""

import os

import hypothesis
import pytest

# No test asks a hub, and none waits for one: what the tests read is in the package or made by them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several processes share the machine, and matrix products have the same bits on every one.
os.environ["OMP_NUM_THREADS"] = "1"
# A slow machine is no bug, and a failure must come again when the test is run again.
hypothesis.settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The unit tests first, side by side where pytest has workers (-n 2 --dist loadgroup); then those that
    start processes one at a time, for they have deadlines."""
    items.sort(key=_starts_processes)
    for item in filter(_starts_processes, items):
        item.add_marker(pytest.mark.xdist_group("processes"))


def _starts_processes(item: pytest.Item) -> bool:
    return not item.nodeid.startswith("tests/unit/")
