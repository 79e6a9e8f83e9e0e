"""Links that are cut or slow: hosts in network namespaces, see p2p_dilocox/shaped_links.py."""

import time
from collections.abc import Iterator

import pytest

from p2p_dilocox.shaped_links import Links, why_not

from .conftest import StartCrew
from .crew import FLOATS, Crew, members_of, spec_text

ROUND_S = 12.0
REASON = why_not()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def links() -> Iterator[Links]:
    with Links(4, "200mbit") as made:
        yield made


def start(start_crew: StartCrew, links: Links, more: str, clusters: int = 4, quorum: int = 1) -> Crew:
    """The bootstrap node and the first cluster share host 0, the others have one each. 4 MB of float32."""
    text = spec_text(min_clusters=clusters, round_s=ROUND_S, more=more)
    text = text.replace("min_clusters", f"quorum = {quorum}\nmin_clusters")
    crew = start_crew(text, side=1024, namespace=links.namespace(0), host=links.address(0))
    crew.join(clusters, places=[(links.namespace(i), links.address(i)) for i in range(clusters)])
    for t in range(1, 4):  # so that all know how long a round usually takes
        crew.round(t)
    return crew


@pytest.mark.timeout(180)
def test_a_cut_link_costs_the_others_no_outer_step_and_the_cluster_behind_it_commits_none(
    start_crew: StartCrew, links: Links
) -> None:
    """R7: cut in the middle of a round. Both sides try two more rounds; the quorum decides which one commits.
    Once the link is joined there is one history, and the cluster is in the second round at the latest."""
    crew = start(start_crew, links, FLOATS, clusters=3, quorum=2)
    *others, away = crew.clusters
    for cluster in crew.clusters:
        cluster.start_round(4)
    away.lead.wait("moved")
    links.cut(2)
    for t in (4, 5, 6):
        if t > 4:
            for cluster in crew.clusters:
                cluster.start_round(t)
        for cluster in others:
            outcome = cluster.outcome()
            assert members_of(outcome) == sorted(c.id for c in others), outcome
        alone = away.outcome()
        assert alone["steps"] == [], alone
    assert "the quorum is 2" in alone["reason"]
    links.join(2)
    time.sleep(6.0)  # inner steps: these rounds take 0.2 s, and libp2p dials again after 5 s
    crew.bring_back(away, 7, within=2)
    crew.check(crew.clusters)


@pytest.mark.timeout(180)
def test_a_straggler_on_a_2_mbit_link_is_left_out_and_named_and_not_paid_for_every_round(
    start_crew: StartCrew, links: Links
) -> None:
    """R6. 2 MB of contribution take 8 s at 2 Mbit/s, more than a transfer has of a deadline of 12 s. The
    average that it then fetches has a quarter of the bytes."""
    crew = start(start_crew, links, FLOATS.replace("return_bits = 16", "return_bits = 4"))
    *others, slow = crew.clusters
    links.set_rate(3, "2mbit")
    retried, notes = [], []
    for t in range(4, 10):
        for cluster in crew.clusters:
            cluster.start_round(t)
        outcomes = [cluster.outcome() for cluster in others]
        for outcome in outcomes:
            assert members_of(outcome) == sorted(c.id for c in others), outcome
            notes += outcome["notes"]
        retried.append(max(outcome["attempts"] for outcome in outcomes) > 1)
        if slow.outcome()["failed"]:
            crew.catch_up(slow)
    assert any(slow.id in note for note in notes), notes
    # Each of the others stays away from it for 1, 2, 4 .. outer steps, as soon as one of them has named it.
    assert retried[0] and not all(retried), retried
    crew.check(others)
