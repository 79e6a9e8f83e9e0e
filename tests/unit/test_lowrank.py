"""PowerSGD factors against float64 numpy, and the identities that averaging and error feedback rest on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from p2p_dilocox.compression import (
    add_outer_,
    as_matrix,
    back_project,
    initial_basis,
    is_lowrank,
    next_basis,
    orthonormalise,
    project,
    round_trip,
    subtract_outer_,
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_orthonormal(factor: Tensor) -> None:
    gram = factor.double().T @ factor.double()
    assert torch.allclose(gram, torch.eye(len(gram), dtype=torch.float64), atol=1e-6)


def test_factors_equal_a_float64_numpy_reference() -> None:
    matrix, basis = normal(96, 40), initial_basis("w", (96, 40), 8, 3)
    p_hat = orthonormalise(project(matrix, basis))
    q = back_project(matrix, p_hat)

    m64, b64 = matrix.double().numpy(), basis.double().numpy()
    columns: list[np.ndarray] = []
    for column in (m64 @ b64).T:  # Gram-Schmidt, twice: as in the paper, positive diagonal by construction
        for _ in range(2):
            column = column - sum((c @ column * c for c in columns), np.zeros(96))
        columns.append(column / np.linalg.norm(column))
    p_reference = np.stack(columns, 1)
    assert np.allclose(p_hat.numpy(), p_reference, atol=2e-6)
    assert np.allclose(q.numpy(), m64.T @ p_reference, atol=2e-5)


def test_averaging_factors_is_factoring_the_average() -> None:
    clusters = [normal(60, 50, seed=i, dtype=torch.float64) for i in range(4)]
    mean = sum(clusters, torch.zeros(60, 50, dtype=torch.float64)) / 4
    basis = initial_basis("w", (60, 50), 6, 0).double()
    p = torch.stack([project(m, basis) for m in clusters]).mean(0)
    assert torch.allclose(p, project(mean, basis), atol=1e-12)
    p_hat = orthonormalise(p)
    q = torch.stack([back_project(m, p_hat) for m in clusters]).mean(0)
    assert torch.allclose(p_hat @ q.T, p_hat @ p_hat.T @ mean, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_matrix_of_rank_r_is_recovered(scale: float) -> None:
    matrix = normal(120, 8) @ normal(8, 90, seed=1) * scale
    p_hat = orthonormalise(project(matrix, initial_basis("w", (120, 90), 8, 0)))
    rest = subtract_outer_(matrix.clone(), p_hat, back_project(matrix, p_hat))
    assert float(rest.double().norm() / matrix.double().norm()) < 1e-5


def test_warm_start_converges_to_the_best_rank_r_approximation() -> None:
    spectrum = torch.diag(0.8 ** torch.arange(64, dtype=torch.float64))
    left = orthonormalise(normal(64, 64, dtype=torch.float64))
    right = orthonormalise(normal(64, 64, seed=1, dtype=torch.float64))
    matrix = left @ spectrum @ right.T
    basis = initial_basis("w", (64, 64), 8, 0).double()
    for _ in range(60):
        p_hat = orthonormalise(project(matrix, basis))
        q = back_project(matrix, p_hat)
        basis = next_basis(q)
    error = float((matrix - p_hat @ q.T).norm())
    best = float(spectrum.diagonal()[8:].norm())  # Eckart-Young
    assert error == pytest.approx(best, rel=1e-6)


def test_directions_come_strongest_first_and_stay_the_singular_vectors() -> None:
    left = orthonormalise(normal(64, 64, dtype=torch.float64))
    right = orthonormalise(normal(96, 64, seed=1, dtype=torch.float64))
    spectrum = 0.7 ** torch.arange(64, dtype=torch.float64)
    matrix = left @ torch.diag(spectrum) @ right.T
    basis = right[:, torch.tensor([5, 3, 0, 7, 1, 6, 2, 4])]  # the eight strongest, in another order
    p_hat = orthonormalise(project(matrix, basis))
    basis = next_basis(back_project(matrix, p_hat))
    alignment = (basis.T @ right[:, :8]).abs()
    assert torch.allclose(alignment, torch.eye(8, dtype=torch.float64), atol=1e-6)
    p_hat = orthonormalise(project(matrix, basis))
    norms = torch.stack([project(matrix, basis).norm(dim=0), back_project(matrix, p_hat).norm(dim=0)])
    assert torch.allclose(norms, spectrum[:8].expand(2, 8), atol=1e-6)


def test_from_any_start_few_rounds_sort_the_directions() -> None:
    matrix = normal(80, 80, dtype=torch.float64) @ torch.diag(0.8 ** torch.arange(80.0)).double()
    truth = torch.linalg.svdvals(matrix)[:8]
    basis = initial_basis("w", (80, 80), 8, 0).double()
    for _ in range(6):
        q = back_project(matrix, orthonormalise(project(matrix, basis)))
        basis = next_basis(q)
    found = project(matrix, basis).norm(dim=0)
    assert bool((found[:-1] * 1.02 >= found[1:]).all())
    assert torch.allclose(found[:4], truth[:4], rtol=0.05)


def test_equal_norms_keep_their_order() -> None:
    """Else rounding would decide, and clusters on different machines could swap two directions."""
    basis = initial_basis("w", (300, 200), 16, 0)
    assert torch.allclose(next_basis(basis), basis, atol=1e-6)
    assert torch.allclose(next_basis(basis + 1e-9 * normal(200, 16)), basis, atol=1e-6)
    assert_orthonormal(next_basis(torch.zeros(50, 8)))
    q = normal(40, 4) * torch.tensor([1.0, 3.0, 0.0, 3.0])
    q[:, 3] = q[:, 1].flip(0)
    assert torch.equal(next_basis(q), orthonormalise(q[:, [1, 3, 0, 2]]))


@pytest.mark.parametrize("bits", [0, 4])
def test_own_part_and_error_add_up_to_the_input(bits: int) -> None:
    matrix = normal(64, 128, dtype=torch.float64)
    p_hat = orthonormalise(project(matrix, initial_basis("w", (64, 128), 8, 0).double()))
    q = back_project(matrix, p_hat)
    if bits:
        q = round_trip(q.T.reshape(-1), bits, 64).view(8, 128).T.double()
    error = subtract_outer_(matrix.clone(), p_hat, q)
    assert torch.allclose(error + p_hat @ q.T, matrix, atol=1e-12)
    assert torch.allclose(add_outer_(error, p_hat, q), matrix, atol=1e-12)


@pytest.mark.parametrize(
    "factor",
    [
        normal(200, 16),
        torch.zeros(50, 8),
        normal(50, 3) @ normal(3, 8, seed=1),
        normal(50, 8) * torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]),
        torch.ones(50, 8),
        normal(50, 8) * 1e-40,
        normal(50, 8) * 2e37,
        normal(50, 8) * torch.logspace(-38, 38, 8),
        normal(8, 8),
    ],
    ids=["random", "zero", "rank 3", "zero columns", "equal columns", "tiny", "huge", "both", "square"],
)
def test_orthonormalise_gives_orthonormal_columns_whatever_comes(factor: Tensor) -> None:
    result = orthonormalise(factor)
    assert result.dtype == factor.dtype
    assert_orthonormal(result)
    # The span is kept: projecting the factor onto the result loses nothing.
    f64, r64 = factor.double(), result.double()
    assert torch.allclose(r64 @ (r64.T @ f64), f64, atol=1e-6 * float(f64.abs().max()), rtol=0)


def test_orthonormalise_keeps_columns_that_are_orthonormal_already() -> None:
    basis = initial_basis("w", (300, 200), 16, 0)
    assert torch.allclose(orthonormalise(basis), basis, atol=1e-6)
    assert torch.allclose(orthonormalise(basis * 5), basis, atol=1e-6)


def test_orthonormalise_depends_on_values_not_on_strides() -> None:
    factor = normal(128, 16)
    strided = torch.zeros(16, 192)
    strided[:, :128] = factor.T
    assert torch.equal(orthonormalise(strided[:, :128].T), orthonormalise(factor))


def test_initial_basis_is_a_function_of_seed_name_and_shape() -> None:
    basis = initial_basis("model.layers.0.mlp.up_proj.weight", (96, 64), 16, 1)
    assert basis.shape == (64, 16)
    assert basis.dtype == torch.float32
    assert_orthonormal(basis)
    torch.manual_seed(123)
    assert torch.equal(basis, initial_basis("model.layers.0.mlp.up_proj.weight", (96, 64), 16, 1))
    assert not torch.allclose(basis, initial_basis("model.layers.1.mlp.up_proj.weight", (96, 64), 16, 1))
    assert not torch.allclose(basis, initial_basis("model.layers.0.mlp.up_proj.weight", (96, 64), 16, 2))


def test_initial_basis_is_the_same_in_every_release() -> None:
    # Clusters of one run may have different versions installed; these values must never change.
    basis = initial_basis("w", (5, 4), 2, 0)
    first, second = basis.T.tolist()
    assert first == pytest.approx([0.4605148, 0.0403351, -0.0362327, -0.8859946], abs=1e-6)
    assert second == pytest.approx([-0.6448669, 0.3938287, 0.5597733, -0.3401462], abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "r", "answer"),
    [
        ((64, 64), 16, True),
        ((64, 64), 31, True),
        ((64, 64), 32, False),
        ((1000, 8), 8, False),
        ((1000, 8), 7, True),
        ((64,), 4, False),
        ((), 4, False),
        ((64, 16, 4), 16, True),
        ((64, 64), 0, False),
    ],
)
def test_a_tensor_is_factored_only_where_factors_are_smaller(
    shape: tuple[int, ...], r: int, answer: bool
) -> None:
    assert is_lowrank("w", shape, r) is answer
    assert is_lowrank("w", shape, r, {"w"}) is False


def test_more_than_two_dimensions_are_factored_in_place() -> None:
    tensor = normal(6, 4, 3)
    before = tensor.clone()
    p, q = normal(6, 2), normal(12, 2)
    subtract_outer_(as_matrix(tensor), p, q)
    assert torch.allclose(tensor, before - (p @ q.T).view(6, 4, 3), atol=1e-6)
    with pytest.raises(RuntimeError):
        as_matrix(tensor.permute(2, 1, 0))
