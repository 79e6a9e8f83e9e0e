"""An outer state in main memory gives the bits of one beside the parameters.

There is no GPU here. To torch "cpu:0" is another device than "cpu", and what goes there is copied: a piece
that is not brought back, or worked on where it lies, shows.
"""

import random

import pytest
import torch
from torch import Tensor, nn

from p2p_dilocox.outer import Average, OuterState, Residual
from tests.unit.ledger import spec_of

FAR = torch.device("cpu", 0)
SHAPES = {"embed": (700, 64), "layer": (64, 48), "norm": (64,), "long": (4093 * 2 + 5,)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def live(offload: bool, bits: int, lowrank: int) -> tuple[dict[str, Tensor], OuterState, list[object]]:
    """Seven outer steps of every kind. Where theta_i and the state end, and the numbers seen on the way."""
    dice = random.Random(0)
    theta_i = tensors(0)
    spec = spec_of(gamma=0.5, bits=bits, lowrank=lowrank)
    outer = OuterState(spec, theta_i, frozenset({"embed"}), "", offload=offload)
    if offload:
        outer.device = FAR
        outer.residual = Residual(outer.undelivered, FAR)
    seen: list[object] = [sorted(outer.basis)]
    for t in range(1, 8):
        for name, movement in tensors(t, 0.01).items():
            theta_i[name] -= movement
        seen.append(outer.contribute(theta_i))
        sent = tensors(100 + t, 0.01)
        average = Average(dense={n: v for n, v in sent.items() if n not in outer.basis})
        for name in outer.basis:
            average.factors[name] = torch.randn(64, lowrank), torch.randn(48, lowrank)
        for name, movement in tensors(200 + t, 0.01).items():  # while the round is under way
            theta_i[name] -= movement
        if t == 4:
            outer.reset_(theta_i)
            outer.forget_undelivered()
        if t != 5:
            outer.commit(average, average, late=t == 3)
        with outer.restart_(theta_i, dice.random(), carry=t % 2 == 0):
            outer.step(average, t, ["a"], "")
        seen += [outer.sketch(), outer.digest(list(SHAPES))]
    return theta_i, outer, seen


@pytest.mark.parametrize(("bits", "lowrank"), [(4, 0), (4, 8), (32, 0), (64, 0)])
def test_results_have_the_same_bits(bits: int, lowrank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dilocox.outer._SLICE", 4093)
    results = []
    for offload in (False, True):
        torch.manual_seed(1)
        results.append(live(offload, bits, lowrank))
    (near_theta, near, near_seen), (far_theta, far, far_seen) = results
    assert (near_seen[0] == ["layer"]) == bool(lowrank)
    assert near_seen == far_seen
    for part in ("anchor", "momentum", "undelivered", "counted", "basis"):
        for name, tensor in getattr(near, part).items():
            assert torch.equal(tensor, getattr(far, part)[name]), (part, name)
    for name, tensor in near_theta.items():
        assert torch.equal(tensor, far_theta[name]) and not torch.equal(tensor, near.anchor[name])


@pytest.mark.parametrize("offload", [False, True])
def test_parameters_show_the_anchor_and_come_back(offload: bool) -> None:
    theta_i = {n: nn.Parameter(t) for n, t in tensors(0).items()}
    outer = OuterState(spec_of(bits=4), theta_i, frozenset(), "", offload=offload)
    with torch.no_grad():
        for p in theta_i.values():
            p.add_(1.0)
    before = {n: p.detach().clone() for n, p in theta_i.items()}
    with pytest.raises(KeyboardInterrupt), outer.shown(theta_i):  # leaving is an exception too
        for name, p in theta_i.items():
            assert torch.equal(p, outer.anchor[name])
            assert (p.data_ptr() == outer.anchor[name].data_ptr()) != offload
        raise KeyboardInterrupt
    assert all(torch.equal(p, before[n]) and p.requires_grad for n, p in theta_i.items())
