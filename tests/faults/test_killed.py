"""kill -9 in the middle of a round: the survivors take the outer step without it (field reports B3, B11)."""

import signal

import pytest

from .conftest import StartCrew
from .crew import FLOATS, members_of, spec_text


@pytest.mark.timeout(180)
def test_survivors_commit_the_same_outer_step_when_one_dies_at_any_point_of_its_round(
    start_crew: StartCrew,
) -> None:
    """At 30, 60 and 95 % of the victim's bytes, one victim after another: 6 clusters, at last 3."""
    crew = start_crew(spec_text(min_clusters=6, round_s=20, more=FLOATS), matrices=2, side=1024)
    crew.join(6)
    crew.round(1)
    alive = list(range(6))
    for t, percent in enumerate((30, 60, 95), start=2):
        victim = alive.pop()
        for number in alive:
            crew.clusters[number].start_round(t)
        crew.clusters[victim].start_round(t, strike={"percent": percent, "signal": "SIGKILL"})
        struck = crew.clusters[victim].lead.wait("struck")
        assert percent <= struck["percent"] < 100
        for number in alive:
            outcome = crew.clusters[number].outcome()
            assert members_of(outcome) == sorted(crew.clusters[n].id for n in alive), outcome
            assert outcome["t"] == t
    crew.check([crew.clusters[n] for n in alive])


@pytest.mark.timeout(180)
def test_a_stage_that_dies_takes_its_cluster_out_of_every_stage(start_crew: StartCrew) -> None:
    """2 stages x 3 clusters. One rank dies in its round, once another stage's is on the wire; its lead lives
    on, as it does until its supervisor notices."""
    text = spec_text(min_clusters=3, round_s=20, stages=2, more=FLOATS)
    crew = start_crew(text, matrices=1, side=1024)
    a, b, c = crew.join(3, split=((0,), (1,)))
    crew.round(1)
    for cluster in (a, b):
        cluster.start_round(2)
    c.lead.tell("round", t=2)
    c.lead.wait("moved")
    c.ranks[1].tell("round", t=2, strike={"percent": 30, "signal": "SIGKILL"})
    outcomes = [cluster.outcome() for cluster in (a, b)]
    c.lead.send(signal.SIGKILL)
    for outcome in outcomes:
        assert members_of(outcome) == sorted((a.id, b.id)), outcome
    for outcome in crew.round(3, [a, b]):
        assert members_of(outcome) == sorted((a.id, b.id)), outcome
    crew.check([a, b])
