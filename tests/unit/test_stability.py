"""The largest stable outer learning rates: published, by our formula, and what the trainer does."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.pipeline import StepResult
from p2p_dilocox.recipe import OVERLAP_DEFAULTS, recipes
from p2p_dilocox.settings import Local, Outer, Overlap
from p2p_dilocox.stability import largest_stable_lr, unstable
from p2p_dilocox.trainer import Rank, train
from p2p_dilocox.wish import Wish
from tests.unit.ledger import spec_of

MOMENTA = (0.9, 0.8, 0.7, 0.5, 0.3, 0.0)
# (overlap, clusters): published with the linear analysis of these forms, on a grid of 0.02, per momentum.
PUBLISHED = {
    (Overlap(), 1): (1.34, 1.38, 1.40, 1.48, 1.62, 1.98),
    (Overlap(mode="paper"), 1): (0.24, 0.34, 0.40, 0.56, 0.70, 0.98),
    (Overlap(mode="eager"), 2): (0.76, 0.86, 0.96, 1.18, 1.44, 1.98),
    (Overlap(mode="eager"), 4): (0.40, 0.50, 0.58, 0.76, 0.96, 1.32),
    (Overlap(mode="eager"), 20): (0.26, 0.36, 0.44, 0.58, 0.74, 1.04),
    (Overlap(mode="boundary", keep=1.0), 1): (1.08, 1.14, 1.22, 1.36, 1.54, 1.98),
    (Overlap(mode="boundary", keep=0.5), 1): (0.62, 0.72, 0.78, 0.94, 1.12, 1.50),
}
CASES = [
    (*form, momentum, limit)
    for form, limits in PUBLISHED.items()
    for momentum, limit in zip(MOMENTA, limits, strict=True)
]
SPEC = spec_of("none", "none")
KAPPAS = torch.cat([torch.linspace(0.1, 0.98, 45), torch.tensor([0.99, 0.999, 1.0])]).double()


def growth(
    overlap: Overlap, outer: Outer, *, clusters: int = 1, H: int = 1, lands: int = 1, steps: int = 120
) -> float:
    """Of the anchor's distance from the optimum, per outer step, when `train` runs on a quadratic.

    Every value is a direction of its own kappa, with its optimum at 0. All clusters do the same, so this one
    plays all: the average is what it has contributed. lands: inner steps after which a round has arrived.
    """
    spec = replace(SPEC, overlap=overlap, outer=outer, run=replace(SPEC.run, outer_steps=steps))
    spec = replace(spec, inner=replace(spec.inner, H=H))
    theta = {"0.a": torch.ones_like(KAPPAS)}
    state = OuterState(spec, theta, frozenset(), "")
    distances: list[float] = []

    def inner_step(_number: float) -> float:
        theta["0.a"] *= (1 - KAPPAS) ** (1 / H)
        return 0.0

    def start(t: int, _offer: Offer) -> Any:
        own = Average(dense={"0.a": state.residual["0.a"].clone()})
        ids = [str(i) for i in range(clusters)]
        step = OuterStep(t, ids, [1.0] * clusters, "", "", {0: ""}, own, own)
        polls = iter(range(lands))
        return SimpleNamespace(
            ready=lambda: next(polls) == lands - 1, wait=lambda _give_up: Outcome(t, [step])
        )

    def written(_outcome: Outcome, _lineage: str) -> None:
        distances.append(float(state.anchor["0.a"].abs().max()))

    pipeline = SimpleNamespace(
        parameters=theta, num_ranks=1, num_parameters=len(KAPPAS), stage_of={"0.a": 0},
        forward_backward=lambda *_: None, clip_=lambda flags: StepResult(1.0, 1.0, flags),
        sync_tied_=lambda: None, sum=lambda values: [float(v) for v in values],
    )  # fmt: skip
    rank = Rank(
        index=0, cluster_id="0", pipeline=cast(Any, pipeline), outer=state, progress=Progress(),
        inner=cast(Any, SimpleNamespace(step=inner_step)), rounds=cast(Any, SimpleNamespace(start=start)),
        batches=cast(Any, SimpleNamespace(batch=lambda _t, _h: torch.zeros(1, 11))),
        history=cast(Any, SimpleNamespace(write=written)), checkpoints=cast(Any, None),
        wish=Wish(), report=lambda _event: None,
    )  # fmt: skip
    state.members = [str(i) for i in range(clusters)]  # an eager cluster's share before the first round
    assert train(spec, rank)
    assert len(distances) == steps
    last = steps // 4
    return float((max(distances[-last:]) / max(distances[-2 * last : -last])) ** (1 / last))


@pytest.mark.parametrize(("overlap", "clusters", "momentum", "limit"), CASES)
def test_the_trainer_is_stable_up_to_the_published_rate_and_not_above_it(
    overlap: Overlap, clusters: int, momentum: float, limit: float
) -> None:
    """It lies between the published one and the next of its grid."""
    assert growth(overlap, Outer(lr=limit - 0.01, momentum=momentum), clusters=clusters) < 1
    assert growth(overlap, Outer(lr=limit + 0.03, momentum=momentum), clusters=clusters) > 1
    assert largest_stable_lr(overlap, momentum, True, clusters) == pytest.approx(limit + 0.01, abs=0.012)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(
    ("overlap", "nesterov", "clusters"),
    [
        (Overlap(), False, 1),
        (Overlap(mode="paper"), False, 1),
        (Overlap(mode="eager"), False, 3),
        (Overlap(mode="boundary", keep=0.3), True, 1),
        (Overlap(mode="delay", keep=0.5), True, 1),
    ],
)
def test_what_is_not_published_is_as_the_trainer_has_it(
    overlap: Overlap, nesterov: bool, clusters: int, momentum: float
) -> None:
    limit = largest_stable_lr(overlap, momentum, nesterov, clusters)
    for part, stable in ((0.96, True), (1.04, False)):
        outer = Outer(lr=part * limit, momentum=momentum, nesterov=nesterov)
        H = 4 if overlap.mode == "delay" else 1
        assert (growth(overlap, outer, clusters=clusters, H=H, steps=200) < 1) is stable


@pytest.mark.parametrize(
    ("keep", "momentum", "published", "at_the_end"),
    [(0.5, 0.9, 1.18, 1.26), (1.0, 0.9, 1.18, 1.08), (0.5, 0.5, 1.48, 1.48), (1.0, 0.5, 1.48, 1.36)],
)
def test_an_average_that_is_applied_on_arrival_may_land_anywhere(
    keep: float, momentum: float, published: float, at_the_end: float
) -> None:
    """published: stable wherever it lands in the first 96 % of an outer step. The last place is the worst."""
    overlap = Overlap(mode="arrival", keep=keep)
    assert largest_stable_lr(overlap, momentum, True) == pytest.approx(at_the_end + 0.01, abs=0.012)
    for lands in (1, 3, 4):
        lr = at_the_end if lands == 4 else published
        assert growth(overlap, Outer(lr=lr - 0.01, momentum=momentum), H=4, lands=lands) < 1


def test_algorithm_2_to_the_letter_diverges_with_the_outer_optimizer_of_diloco() -> None:
    """Published: a spectral radius of 1.28 at kappa 1."""
    assert growth(Overlap(mode="paper"), Outer(lr=0.7, momentum=0.9)) == pytest.approx(1.28, abs=0.01)


def test_a_warning_has_the_value_its_limit_and_a_way_out() -> None:
    spec = replace(SPEC, overlap=Overlap(mode="paper"), outer=Outer(lr=0.7, momentum=0.9))
    (said,) = unstable(spec)
    assert said == (
        "outer.lr = 0.7 with momentum 0.9 is above 0.25, the largest that is stable with overlap.mode = "
        '"paper": the loss will probably diverge. Take a smaller lr or momentum, or overlap.mode = '
        '"arrival", which is stable up to 1.27'
    )
    assert unstable(replace(spec, outer=Outer(lr=0.25, momentum=0.9))) == []
    (said,) = unstable(replace(spec, overlap=Overlap(), outer=Outer(lr=1.5, momentum=0.7)))
    assert "above 1.42" in said and said.endswith("Take a smaller lr or momentum")
    assert unstable(replace(spec, outer=Outer(lr=9.0, momentum=0.9, average="gradient"))) == []
    (said,) = unstable(replace(SPEC, outer=Outer(lr=0.7, momentum=0.9), local=Local(every=5, lr=1.4)))
    assert said.startswith("local.lr = 1.4 with momentum 0.9 is above 1.36")


def test_eager_clusters_are_warned_for_as_many_as_may_come() -> None:
    """0.7 at momentum 0.5 is stable with four, published: 0.76, and not with twenty, 0.58."""
    spec = replace(SPEC, overlap=Overlap(mode="eager"), outer=Outer(lr=0.7, momentum=0.5))
    assert unstable(spec, 4) == [] and "above 0.59" in unstable(spec, 20)[0]
    (said,) = unstable(spec)  # whoever has the link
    assert "above 0.56" in said and "any number of clusters" in said
    named = replace(spec.run, members=("a", "b", "c"))
    assert unstable(replace(spec, run=named)) == []


@pytest.mark.parametrize("name", recipes())
def test_recipes_are_stable_with_any_number_of_clusters(name: str) -> None:
    recipe = recipes()[name]
    assert unstable(replace(SPEC, overlap=recipe.overlap, outer=recipe.outer, local=recipe.local)) == []


@pytest.mark.parametrize("mode", OVERLAP_DEFAULTS)
def test_so_is_what_another_overlap_brings(mode: str) -> None:
    overlap, outer = OVERLAP_DEFAULTS[mode]
    assert unstable(replace(SPEC, overlap=overlap, outer=outer)) == []
