"""What the outer optimizers of the field have in common, as equalities."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from p2p_dilocox.local_outer import LocalOuter
from p2p_dilocox.outer import Average, nesterov_
from p2p_dilocox.settings import Local, Outer, RunSpec
from tests.unit.in_step import InStep
from tests.unit.ledger import random_tensors, spec_of

START = {n: v.double() for n, v in random_tensors(0).items()}


def train(swarm: InStep, spec: RunSpec, local: Local | None, outer_steps: int) -> dict[str, Tensor]:
    """The anchor after inner steps that pull every cluster to a place of its own, so that they depend on
    where it is."""
    locals_ = [LocalOuter(local, theta) for theta in swarm.theta] if local else []
    for t in range(1, outer_steps + 1):
        for h in range(spec.inner.H):

            def pull(number: int, theta: dict[str, Tensor], n: int = (t - 1) * spec.inner.H + h) -> None:
                for name, place in random_tensors(10_000 * number + n).items():
                    theta[name] += 0.1 * (place - theta[name])
                if locals_:
                    locals_[number].step_(theta, n + 1)

            swarm.move(pull)
        steps = swarm.start(t)
        for rank, own in zip(swarm.ranks, locals_, strict=False):
            rank.local = own
        swarm.land(steps)
    return swarm.outers[0].anchor


@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_diloco_is_fedavg_of_single_node_diloco(momentum: float) -> None:
    diloco = replace(spec_of("none", "none"), outer=Outer(lr=0.7, momentum=momentum))
    fedavg = replace(diloco, outer=Outer(lr=1.0, momentum=0.0, nesterov=False))
    whole = train(InStep(diloco, START, 3, 2), diloco, None, 12)
    local = Local(every=diloco.inner.H, lr=0.7, momentum=momentum)
    parts = train(InStep(fedavg, START, 3, 2), fedavg, local, 12)
    for name in START:
        torch.testing.assert_close(parts[name], whole[name], rtol=0, atol=1e-13)
        assert (whole[name] - START[name]).abs().max() > 0.1


def test_a_local_outer_step_is_diloco_with_one_worker() -> None:
    """torch.optim.SGD on start - theta_i, every three inner steps, beside rounds that never come."""
    theta = copy.deepcopy(START)
    local = LocalOuter(Local(every=3, lr=0.7, momentum=0.9), theta)
    reference = [p.clone().requires_grad_() for p in START.values()]
    sgd = torch.optim.SGD(reference, lr=0.7, momentum=0.9, nesterov=True)
    for n in range(1, 13):
        for name, step in random_tensors(n, 0.1).items():
            theta[name] -= step
        if n % 3 == 0:
            for p, moved in zip(reference, theta.values(), strict=True):
                p.grad = p.detach() - moved
            sgd.step()
        assert local.step_(theta, n) == (n % 3 == 0)
        if n % 3 == 0:
            for p, ours in zip(reference, theta.values(), strict=True):
                torch.testing.assert_close(ours, p.detach(), rtol=0, atol=1e-14)


def test_a_round_between_local_outer_steps_leaves_their_movement_as_it_is() -> None:
    theta = copy.deepcopy(START)
    local = LocalOuter(Local(every=4), theta)
    for name, step in random_tensors(1, 0.1).items():
        theta[name] -= step
    before = {n: local.start[n] - p for n, p in theta.items()}
    with local.moved_(theta):
        for name, p in theta.items():
            p.copy_(random_tensors(2)[name])
    for name, p in theta.items():
        torch.testing.assert_close(local.start[name] - p, before[name], rtol=0, atol=1e-14)


def weights(lr: float, momentum: float, *, nesterov: bool, of: str) -> list[float]:
    """What each of 40 outer steps has in theta after the last, the newest first.

    of pseudo-gradients: their coefficients in -(theta - theta_0). of checkpoints, the clusters' mean
    parameters before each outer step: their coefficients in theta. Each is a direction of its own here.
    """
    count = 40
    theta, v = {"x": torch.zeros(count, dtype=torch.float64)}, {"x": torch.zeros(count, dtype=torch.float64)}
    for t in range(count):
        unit = torch.nn.functional.one_hot(torch.tensor(t), count).double()
        delta = unit if of == "pseudo-gradients" else theta["x"] - unit
        before = theta["x"].clone()
        nesterov_(theta, v, Average(dense={"x": delta}), lr=lr, beta=momentum, nesterov=nesterov)
    moved = before - theta["x"] if of == "pseudo-gradients" else theta["x"]
    return [float(w) for w in moved.flip(0)]


def test_an_outer_step_of_diloco_is_the_published_sum_of_checkpoints() -> None:
    found = weights(0.7, 0.9, nesterov=True, of="checkpoints")
    assert found[:5] == pytest.approx([1.33, 0.13, -0.29, -0.20, -0.03], abs=0.006)  # the last is -0.0354
    assert sum(found) == pytest.approx(1, abs=1e-9)  # what is missing is theta_0's


def test_an_outer_step_of_diloco_is_a_sum_of_pseudo_gradients() -> None:
    """lr (1 + m), lr m^2, lr m^3, ...: begins like plain momentum with lr 1.33 and momentum 0.43."""
    found = weights(0.7, 0.9, nesterov=True, of="pseudo-gradients")
    assert found[:6] == pytest.approx([0.7 * 1.9, *(0.7 * 0.9**k for k in range(2, 7))], abs=1e-12)
    plain = weights(1.33, 0.43, nesterov=False, of="pseudo-gradients")
    assert found[:2] == pytest.approx(plain[:2], abs=0.01)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.5, True), (0.7, False), (0.0, False)])
def test_eager_updates_are_outer_steps_on_anchors_of_their_own(momentum: float, nesterov: bool) -> None:
    """arXiv 2502.12996: every cluster's own theta_i and v_i, on w r_i^t + (Delta^{t-1} - w r_i^{t-1}).

    Here the anchor is common, and only the parameters that a cluster goes on from have its own share.
    """
    outer = Outer(lr=0.4, momentum=momentum, nesterov=nesterov)
    spec, count = replace(spec_of("eager", "none"), outer=outer), 3
    swarm, w = InStep(spec, START, count, 2), 1 / count
    theta = [copy.deepcopy(START) for _ in range(count)]
    v = [{n: torch.zeros_like(p) for n, p in START.items()} for _ in range(count)]
    before = [{n: torch.zeros_like(p) for n, p in START.items()} for _ in range(count)]
    late = {n: torch.zeros_like(p) for n, p in START.items()}
    pending = None
    for t in range(1, 11):
        moved = [copy.deepcopy(start) for start in theta]

        def pull(number: int, params: dict[str, Tensor], t: int = t) -> None:
            for name, place in random_tensors(100 * t + number).items():
                params[name] += 0.3 * (place - params[name])

        swarm.move(pull)
        for number, params in enumerate(moved):
            pull(number, params)
        if pending:
            swarm.land(pending)
        pending = swarm.start(t)
        swarm.peek(w)
        fresh = [{n: theta[i][n] - moved[i][n] for n in START} for i in range(count)]
        for i in range(count):
            for n in START:
                d = w * fresh[i][n] + (late[n] - w * before[i][n])
                v[i][n] = momentum * v[i][n] + d
                theta[i][n] = theta[i][n] - 0.4 * (d + momentum * v[i][n] if nesterov else v[i][n])
                torch.testing.assert_close(swarm.theta[i][n], theta[i][n], rtol=0, atol=1e-12)
        late = {n: torch.stack([f[n] for f in fresh]).mean(0) for n in START}
        before = fresh
    anchors = [outer.anchor for outer in swarm.outers]
    assert all(torch.equal(a[n], anchors[0][n]) for a in anchors for n in START)
