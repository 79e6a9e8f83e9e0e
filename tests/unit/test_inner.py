"""AdamW with moments in 8 bits, on the CPU, against torch's own."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from p2p_dilocox.errors import SpecError, StateError
from p2p_dilocox.inner import InnerOptimizer, check_bits
from p2p_dilocox.settings import Inner

INNER = Inner(H=1, batch_size=1, lr=2e-3, warmup_steps=5, weight_decay=0.1)
STEPS = 120


class Run:
    """A small regression: two matrices and two vectors."""

    def __init__(self, bits: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.optimizer = InnerOptimizer(self.model.parameters(), INNER, STEPS, bits=bits)

    def train(self, start: int, stop: int) -> float:
        loss = torch.zeros(())
        for step in range(start, stop):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            loss = functional.mse_loss(self.model(x), x.roll(1, 1))
            self.model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step(step)
        return loss.item()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def test_eight_bits_learn_like_thirty_two_in_a_quarter_of_the_memory() -> None:
    full, small = Run(32), Run(8)
    untrained = Run(32).train(0, 1)
    losses = [run.train(0, STEPS) for run in (full, small)]
    assert losses[0] < 0.7 * untrained, "nothing was learned, so nothing was compared"
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert any(not torch.equal(a, b) for a, b in zip(full.parameters(), small.parameters(), strict=True))
    moments = [
        sum(t.nbytes for name, t in run.optimizer.state().items() if t.shape == (128, 64))
        for run in (full, small)
    ]
    assert moments == [2 * 4 * 128 * 64, 2 * 128 * 64]


def test_what_is_saved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole, first, second = Run(8), Run(8), Run(8)
    whole.train(0, 20)
    first.train(0, 10)
    save_file({n: t.contiguous() for n, t in first.optimizer.state().items()}, tmp_path / "state")
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state(load_file(tmp_path / "state"))
    second.train(10, 20)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole.parameters(), first.parameters(), strict=True))


def test_matrices_decay_at_the_rate_of_the_schedule_and_vectors_do_not() -> None:
    run = Run(8)
    before = run.parameters()
    expected = 1.0
    for step in range(10):
        for p in run.model.parameters():
            p.grad = torch.zeros_like(p)
        expected *= 1 - run.optimizer.step(step) * INNER.weight_decay
    for old, new in zip(before, run.parameters(), strict=True):
        torch.testing.assert_close(new, old * (expected if old.dim() == 2 else 1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("saved", "wanted"), [(32, 8), (8, 32)])
def test_a_checkpoint_of_other_bits_is_refused(saved: int, wanted: int) -> None:
    run = Run(saved)
    run.train(0, 2)
    with pytest.raises(StateError, match=f"of {saved} bits in the checkpoint.*Use --adamw-bits {saved}"):
        Run(wanted).optimizer.load_state(run.optimizer.state())
    Run(wanted).optimizer.load_state({})  # of a cluster that has not trained yet


def test_without_bitsandbytes_eight_bits_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check_bits(32)
    with pytest.raises(SpecError, match=r"pip install 'p2p-dilocox\[adamw8bit\]'"):
        check_bits(8)
