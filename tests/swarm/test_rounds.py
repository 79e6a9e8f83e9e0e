"""Rounds over real libp2p streams: the same bytes for all, the right mean, and what happens when someone is
gone."""

from collections.abc import Callable

import pytest
import torch

from .conftest import SHAPES, Swarm, spec_text

MakeSwarm = Callable[[str], Swarm]
LOSSLESS = "[compression]\nbits = 64\nreturn_bits = 64\nlowrank = 0\nfeedback = 'none'\n"


def deltas(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: 0.01 * torch.randn(s, generator=generator) for stage in SHAPES.values() for n, s in stage.items()
    }


def test_three_clusters_of_different_shapes_hold_equal_anchors_under_lossy_compression(
    swarm: MakeSwarm,
) -> None:
    net = swarm(spec_text("dilocox", min_clusters=3, more="[compression]\nlowrank = 8\n"))
    clusters = [net.join([[0, 1]]), net.join([[0], [1]]), net.join([[0], [1]])]
    for t in range(1, 6):
        for number, cluster in enumerate(clusters):
            cluster.contribute(t, deltas(10 * t + number), weight=100.0 + number)
        for cluster in clusters:
            for outcome in cluster.land():
                assert [step.t for step in outcome.steps] == [t], outcome.reason
                assert sorted(outcome.steps[0].members) == sorted(c.id for c in clusters)
        assert clusters[0].digests() == clusters[1].digests() == clusters[2].digests()
    lineages = {rank.outer.lineage for cluster in clusters for rank in cluster.ranks}
    assert len(lineages) == 1


def test_the_average_is_the_mean_weighted_by_trained_tokens(swarm: MakeSwarm) -> None:
    net = swarm(spec_text("fedavg", min_clusters=3, more=LOSSLESS))
    clusters = [net.join(), net.join(), net.join()]
    before = {n: t.clone() for n, t in clusters[0].anchor().items()}
    for cluster, move, weight in zip(clusters, (1.0, 2.0, 6.0), (1.0, 1.0, 2.0), strict=True):
        cluster.contribute(1, move, weight)
    for cluster in clusters:
        cluster.land()
        for name, theta in cluster.anchor().items():
            torch.testing.assert_close(theta, before[name] - 15.0 / 4.0, rtol=0, atol=1e-5)


def test_a_cluster_alone_takes_its_outer_step_alone_and_lossless_means_exact(swarm: MakeSwarm) -> None:
    net = swarm(spec_text("fedavg", more=LOSSLESS))
    cluster = net.join([[0], [1]])
    for t in range(1, 4):
        cluster.contribute(t, deltas(t))
        moved = [{n: p.clone() for n, p in rank.parameters.items()} for rank in cluster.ranks]
        cluster.land()
        for rank, theta_i in zip(cluster.ranks, moved, strict=True):
            for name, theta in rank.outer.anchor.items():
                assert torch.equal(theta, theta_i[name])


def test_survivors_finish_the_outer_step_without_a_dead_cluster(swarm: MakeSwarm) -> None:
    """Field report C7: the divisor is the members', not the group's old size."""
    net = swarm(spec_text("fedavg", min_clusters=3, more=LOSSLESS))
    clusters = [net.join(), net.join(), net.join()]
    for cluster in clusters:
        cluster.contribute(1, 0.0)
    for cluster in clusters:
        cluster.land()
    before = {n: t.clone() for n, t in clusters[0].anchor().items()}
    clusters[2].die()
    for cluster, move in zip(clusters[:2], (1.0, 2.0), strict=True):
        cluster.contribute(2, move)
    for cluster in clusters[:2]:
        (outcome,) = cluster.land()
        assert len(outcome.steps[0].members) == 2, outcome.reason
        for name, theta in cluster.anchor().items():
            torch.testing.assert_close(theta, before[name] - 1.5, rtol=0, atol=1e-5)


def test_a_cluster_that_misses_the_call_adopts_the_round_and_its_movement_is_delivered_once(
    swarm: MakeSwarm,
) -> None:
    net = swarm(spec_text("fedavg", min_clusters=2, round_s=8.0, more=LOSSLESS))
    first, late = net.join(), net.join()
    for cluster in (first, late):
        cluster.contribute(1, 0.0)
    for cluster in (first, late):
        cluster.land()
    before = {n: t.clone() for n, t in first.anchor().items()}
    first.contribute(2, 1.0)
    first.land()  # the coordinator waits half the deadline for the late one, which is alive, then goes on
    late.contribute(2, 4.0)
    (outcome,) = late.land()
    assert outcome.steps[0].own is None
    assert late.digests() == first.digests()
    for cluster in (first, late):
        cluster.contribute(3, 0.0)
    for cluster in (first, late):
        (outcome,) = cluster.land()
        assert len(outcome.steps[0].members) == 2
    # 1 by the first alone, then the late one's 4 with half of the weight
    for name, theta in first.anchor().items():
        torch.testing.assert_close(theta, before[name] - 1.0 - 2.0, rtol=0, atol=1e-5)
    assert late.digests() == first.digests()


@pytest.mark.parametrize("bits", [4, 16])
def test_bytes_on_the_wire_are_what_the_codec_predicts(swarm: MakeSwarm, bits: int) -> None:
    more = f"[compression]\nbits = {bits}\nreturn_bits = {bits}\nlowrank = 0\n"
    net = swarm(spec_text("dilocox", min_clusters=2, more=more))
    clusters = [net.join(), net.join()]
    for cluster in clusters:
        cluster.contribute(1, deltas(1))
    coded = sum(layout.coded_bytes().contribution for layout in clusters[0].ranks[0].rounds.layouts.values())
    for cluster in clusters:
        (outcome,) = cluster.land()
        assert coded <= outcome.sent_bytes <= 1.1 * coded  # 2 (D - 1) / D = 1 for two clusters


@pytest.mark.parametrize("more", [LOSSLESS, "[compression]\nlowrank = 8\n"], ids=["lossless", "lowrank-int4"])
def test_two_identical_clusters_equal_one(swarm: MakeSwarm, more: str) -> None:
    """Field report C6. Encoding what was decoded is exact, so this holds bit for bit under int4 as well."""
    alone = swarm(spec_text(more=more)).join()
    net = swarm(spec_text(min_clusters=2, more=more))
    twins = [net.join(), net.join([[0], [1]])]
    for t in range(1, 4):
        for cluster in (alone, *twins):
            cluster.contribute(t, deltas(t))
        for cluster in (alone, *twins):
            for outcome in cluster.land():
                assert len(outcome.steps[0].members) == (1 if cluster is alone else 2)
        assert twins[0].digests() == twins[1].digests() == alone.digests()
