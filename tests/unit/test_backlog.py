"""What a cluster sends that was left out for long: as much as is let in, until all of it is delivered."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from p2p_dilocox.averaging.exclusion import NormCap
from p2p_dilocox.averaging.outcome import OuterStep
from p2p_dilocox.backlog import Backlog
from p2p_dilocox.outer import Average
from p2p_dilocox.settings import Outer
from tests.unit.in_step import InStep
from tests.unit.ledger import random_tensors, spec_of

START = {n: v.double() for n, v in random_tensors(0).items()}


def committed(*norms: float) -> OuterStep:
    ids = [str(n) for n in range(len(norms))]
    return OuterStep(1, ids, [1.0] * len(norms), "", "", {}, Average(), None, list(norms))


@pytest.mark.parametrize("rounds_without", [3, 12, 60])
def test_one_that_was_left_out_is_let_in_again_and_delivers_all_of_it(rounds_without: int) -> None:
    """All move by 1 each outer step. The others' cap is the real one."""
    cap, backlog, waiting, sent = NormCap(), Backlog(), 0.0, 0.0
    for number in range(200):
        waiting += 1.0
        share = waiting * backlog.part(waiting)
        comes = not 20 <= number < 20 + rounds_without
        assert not comes or share <= cap.cap([1.0, 1.0, share])
        cap.remember([1.0, 1.0] + [share] * comes)
        backlog.learn(committed(*[1.0, 1.0] + [share] * comes), delivered=comes)
        if comes:
            waiting, sent = waiting - share, sent + share
    assert math.isclose(sent, 200) and waiting < 1e-9


def test_a_movement_that_grows_everywhere_is_sent_whole() -> None:
    """The start-up phase ends: H goes from 1 to 100."""
    backlog = Backlog()
    for norm in [1.0] * 9 + [100.0] * 3:
        assert backlog.part(norm) == 1.0
        backlog.learn(committed(norm, norm), delivered=True)


@pytest.mark.parametrize("lowrank", [0, 4])
def test_what_is_not_sent_waits(lowrank: int) -> None:
    """A part of a contribution, through the codec: the anchor gets it, and the next one gets the rest."""
    spec = replace(
        spec_of("none", "local", lowrank=lowrank), outer=Outer(lr=1.0, momentum=0.0, nesterov=False)
    )
    swarm = InStep(spec, START, 1, 2)
    (outer,), (theta,) = swarm.outers, swarm.theta
    for name, moved in random_tensors(5, 0.1).items():
        theta[name] -= moved
    outer.part = 0.25
    step = swarm.start(1)[0]
    before = {n: v.double().clone() for n, v in outer.residual.items()}
    said = {n: torch.zeros_like(v) for n, v in before.items()}
    for name, tensor in said.items():
        cast(Any, step.own).add_one_(name, tensor, 1.0)
    swarm.land([step])
    for name in START:
        torch.testing.assert_close(outer.residual[name].double(), before[name] - said[name])
        torch.testing.assert_close(outer.anchor[name], START[name] - said[name])
    whole = math.sqrt(sum(float((v**2).sum()) for v in before.values()))
    part = math.sqrt(sum(float((v**2).sum()) for v in said.values()))
    assert part <= 0.2501 * whole
    assert part >= 0.2499 * whole or lowrank
