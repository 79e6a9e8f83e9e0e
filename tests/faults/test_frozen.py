"""SIGSTOP, sockets open: the others commit in time; the frozen cluster comes back to their history."""

import os
import signal
import time

import pytest

from .conftest import StartCrew
from .crew import FLOATS, members_of, spec_text

# How long it stays frozen after the others went on. It is frozen for 60 s where the limits are to be shown.
FROZEN_S = float(os.environ.get("FAULTS_FROZEN_S", "3"))
ROUND_S = 24.0
MATRICES, SIDE = 5, 2048  # 84 MB of float32: more than all buffers between two peers hold


@pytest.mark.timeout(240 + 3 * FROZEN_S)
def test_a_frozen_cluster_is_left_out_in_time_and_comes_back(start_crew: StartCrew) -> None:
    """Frozen before it answers the roll call, then in the middle of its transfer, then there with its p2pd
    alive, which takes what it is sent and says that all is well."""
    crew = start_crew(spec_text(min_clusters=4, round_s=ROUND_S, more=FLOATS), matrices=MATRICES, side=SIDE)
    *others, frozen = crew.join(4)
    others_ids = sorted(c.id for c in others)
    crew.round(1)
    for strike in (
        None,
        {"percent": 40, "signal": "SIGSTOP"},
        {"percent": 40, "signal": "SIGSTOP", "alone": True},
    ):
        t = max(c.t for c in crew.clusters) + 1
        if strike is None:
            frozen.send(signal.SIGSTOP)
        for cluster in others:
            cluster.start_round(t)
        frozen.start_round(t, strike=strike)
        for cluster in others:
            assert members_of(cluster.outcome()) == others_ids
        for outcome in crew.round(t + 1, others):
            assert members_of(outcome) == others_ids
        time.sleep(FROZEN_S)
        frozen.send(signal.SIGCONT)
        assert not frozen.outcome()["included"]
        crew.bring_back(frozen, t + 2)
        crew.check(crew.clusters)
