"""What a rank keeps between outer steps: how much memory, how exact, and how anchors are told apart."""

import hashlib
import math
import random

import pytest
import torch
from torch import Tensor

from p2p_dilocox.compression import round_trip
from p2p_dilocox.outer import Average, OuterState, fingerprint, nesterov_, same_anchor
from tests.unit.ledger import spec_of


def state_bytes(value: object, seen: set[int]) -> int:
    """Bytes of all tensors that can be reached from `value`, each storage once."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if new else 0
    if isinstance(value, dict):
        return sum(state_bytes(v, seen) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(state_bytes(v, seen) for v in value)
    return state_bytes(vars(value), seen) if hasattr(value, "__dict__") else 0


@pytest.mark.parametrize(("bits", "copies"), [(2, 3), (4, 3), (8, 3), (16, 3), (32, 4), (64, 6)])
def test_copies_of_a_parameter_between_outer_steps(bits: int, copies: int) -> None:
    """Parameters, gradients and AdamW's two moments are four more: 7 copies with a lossy codec."""
    theta_i = {"w": torch.randn(64, 48), "v": torch.randn(48)}
    outer = OuterState(spec_of(bits=bits), theta_i, frozenset(), "")
    fp32_copy = sum(p.nbytes for p in theta_i.values())

    def count() -> int:
        return state_bytes(outer, {p.untyped_storage().data_ptr() for p in theta_i.values()})

    assert count() == copies * fp32_copy
    for p in theta_i.values():
        p.sub_(0.1)
    outer.contribute(theta_i)
    average = Average(dense={n: r.clone() for n, r in outer.residual.items()})
    outer.commit(average, average)
    with outer.restart_(theta_i, 0.5, carry=True):
        outer.step(average, 1, ["x"], "")
    assert count() == copies * fp32_copy


@pytest.mark.parametrize("drops", [0.0, 0.5])
@pytest.mark.parametrize(
    ("codec_bits", "lowrank", "gamma"), [(2, 0, 1.0), (4, 0, 1.0), (4, 16, 0.5), (8, 0, 1.0), (16, 0, 1.0)]
)
def test_state_in_bf16_delivers_as_well_as_in_float32(
    codec_bits: int, lowrank: int, gamma: float, drops: float
) -> None:
    """The error of all that was delivered in 30 rounds with local feedback, against all that was moved."""

    def error(state_bits: int) -> float:
        generator = torch.Generator().manual_seed(0)
        dice = random.Random(1)
        theta_i = {"w": 0.02 * torch.randn(256, 128, generator=generator)}
        outer = OuterState(spec_of(gamma=gamma, bits=state_bits), theta_i, frozenset(), "")
        drift = 1e-3 * torch.randn(256, 128, generator=generator)
        missing = torch.zeros(256, 128, dtype=torch.float64)
        moved = missing.clone()
        for t in range(1, 31):
            movement = drift + 1e-3 * torch.randn(256, 128, generator=generator)
            theta_i["w"] -= movement
            moved += movement
            outer.contribute(theta_i)
            delta = outer.residual["w"]
            if lowrank:
                u, s, v = torch.linalg.svd(delta, full_matrices=False)
                delta = (u[:, :lowrank] * s[:lowrank]) @ v[:lowrank]
            own = round_trip(delta.contiguous().view(-1), codec_bits, 64).view(256, 128)
            if dice.random() < drops:
                continue
            missing += own
            average = Average(dense={"w": own})
            outer.commit(average, average)
            with outer.restart_(theta_i, 1.0):
                outer.step(average, t, [], "")
        return float((missing - moved).norm() / moved.norm())

    in_bf16, in_float32 = error(4), error(32)
    if codec_bits <= 4:
        assert in_bf16 <= 1.01 * in_float32
    else:  # the codec itself loses less than 1e-3
        assert in_bf16 <= in_float32 + 2e-4


MODEL = {"embed": (512, 64), "layer": (64, 192), "head": (4093 * 3, 5), "norm": (64,)}


def anchors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.02 * torch.randn(shape, generator=generator) for n, shape in MODEL.items()}


def fingerprint_of(*ranks: dict[str, Tensor]) -> tuple[float, ...]:
    sketches = [OuterState(spec_of(bits=4), part, frozenset(), "").sketch() for part in ranks]
    numel = sum(t.numel() for part in ranks for t in part.values())
    return fingerprint([sum(column) for column in zip(*sketches, strict=True)], numel)


def test_a_fingerprint_is_dot_products_with_signs_that_all_clusters_have() -> None:
    tensors = anchors(0)
    bits = hashlib.shake_256(b"anchor").digest(4 * 4093)
    expected = [0.0] * 4
    for name, tensor in tensors.items():
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        for i, value in enumerate(tensor.flatten().tolist()):
            for k in range(4):
                sign = 1 if bits[4093 * k + (start + i) % 4093] & 1 else -1
                expected[k] += sign * value
    everything = torch.cat([t.flatten() for t in tensors.values()]).double()
    found = fingerprint_of(tensors)
    scale = len(everything) ** 0.5
    for ours, sum_ in zip(found, [*expected, float(everything.norm())], strict=True):
        assert abs(ours - sum_ / scale) < 1e-9
    split = [{n: tensors[n] for n in names} for names in (("embed", "norm"), ("layer", "head"))]
    assert max(abs(a - b) for a, b in zip(fingerprint_of(*split), found, strict=True)) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_rounding_does_not_change_a_fingerprint_and_another_anchor_does(seed: int) -> None:
    """Field report C8."""
    ours = anchors(seed)
    found = fingerprint_of(ours)
    generator = torch.Generator().manual_seed(seed)

    def moved(by: float) -> dict[str, Tensor]:
        return {n: t + by * t.std() * torch.randn(t.shape, generator=generator) for n, t in ours.items()}

    assert same_anchor(found, found)
    assert same_anchor(found, fingerprint_of(moved(1e-7)))
    assert same_anchor(found, fingerprint_of(moved(6e-6)))  # 10,000 outer steps of float32 rounding
    assert not same_anchor(found, fingerprint_of(moved(3e-3)))  # an outer step that only one of them took
    assert not same_anchor(found, fingerprint_of(anchors(seed + 100)))
    assert not same_anchor(found, fingerprint_of({n: t.flip(0) for n, t in ours.items()}))
    assert not same_anchor(found, ()) and same_anchor((), ())
    assert not same_anchor(found, (math.nan, *found[1:])) and not same_anchor(found, (math.inf, *found[1:]))


def test_real_rounding_over_outer_steps_stays_within_the_tolerance() -> None:
    """The same 300 outer steps in float32 and in float64, as two machines at their worst."""
    ours, exact = anchors(0), {n: t.double() for n, t in anchors(0).items()}
    momenta = [{n: torch.zeros_like(t) for n, t in each.items()} for each in (ours, exact)]
    for step in range(1, 301):
        average = Average(dense={n: 0.02 * t for n, t in anchors(step).items()})
        for theta, momentum in zip((ours, exact), momenta, strict=True):
            nesterov_(theta, momentum, average, lr=0.7, beta=0.7, nesterov=True)
    a, b = fingerprint_of(ours), fingerprint_of({n: t.float() for n, t in exact.items()})
    assert a != b
    assert same_anchor(a, b)
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 0.1 * 1e-4 * a[-1]
