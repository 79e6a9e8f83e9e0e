"""Low-rank factors of a matrix that many clusters average: PowerSGD (arXiv 1905.13727), Algorithm 1.

Linear in the matrix for a fixed basis, which is why averaging factors equals factoring the average.
One round:

    P = M Q                     each cluster        project
    P_hat = orthonormalise(mean of all P)           orthonormalise
    Q_new = M^T P_hat           each cluster        back_project
    own = P_hat Q_new^T;  average = P_hat (mean of all Q_new)^T
    next round's Q = next_basis(mean of all Q_new)  warm start, strongest direction first

Everything here is a pure function or says _ at its end; dtype and device are those of the matrix.
"""

# m, n: rows, columns of the matrix   r: lowrank, the number of directions

import hashlib
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

__all__ = [
    "add_outer_",
    "as_matrix",
    "back_project",
    "initial_basis",
    "is_lowrank",
    "matrix_shape",
    "next_basis",
    "orthonormalise",
    "project",
    "subtract_outer_",
]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(m, n) of a tensor with two or more dimensions: the first against all others."""
    return shape[0], math.prod(shape[1:])


def as_matrix(tensor: Tensor) -> Tensor:
    """The same memory as [m, n]. The tensor must be contiguous: a copy here would lose in-place updates."""
    return tensor.view(matrix_shape(tensor.shape))


def is_lowrank(name: str, shape: Sequence[int], r: int, dense_names: Collection[str] = ()) -> bool:
    """Whether a tensor is sent as factors: two or more dimensions, and r (m + n) < m n with r < min(m, n).

    dense_names: tensors that are not, whatever their shape. r: 0 for none at all.
    """
    if r <= 0 or len(shape) < 2 or name in dense_names:
        return False
    m, n = matrix_shape(shape)
    return r < min(m, n) and r * (m + n) < m * n


def project(matrix: Tensor, basis: Tensor) -> Tensor:
    """P = M Q. matrix: [m, n]. basis: [n, r]. Returns [m, r], columns contiguous: they are what is sent."""
    return (basis.T @ matrix.T).T


def orthonormalise(factor: Tensor) -> Tensor:
    """Orthonormal columns that span those of `factor` [m, r], r <= m; column i only mixes columns 0..i.

    Householder QR in float64, the diagonal of R made non-negative, rounded to the dtype of `factor`, which
    must be finite. Never fails: zero or dependent columns become some orthonormal completion. Equal bytes
    give equal results on one machine. Elsewhere, or with another thread count, float64 differs in its last
    bits and the rounding to float32 hides it: 2 of 2.6 million entries changed, 2.0 million with float32 QR.
    """
    q, triangle = torch.linalg.qr(factor.to(torch.float64))
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    result: Tensor = (q * signs).to(factor.dtype)
    return result


def back_project(matrix: Tensor, p_hat: Tensor) -> Tensor:
    """Q = M^T P_hat. matrix: [m, n]. p_hat: [m, r], orthonormal. Returns [n, r], columns contiguous."""
    return (p_hat.T @ matrix).T


def next_basis(q_average: Tensor) -> Tensor:
    """The warm start of the next round, [n, r]: an orthonormal basis of the averaged Q, strongest first.

    Orthonormal, so that no direction of P is a near copy of another, which few-bit codes would not survive.
    The columns of Q = M^T P_hat are sorted by their norms, which approach the singular values of M: every
    factorisation on the way mixes a column with those before it only, so a round is a step of the QR
    algorithm and the order stays. Sorting by a singular value decomposition of Q gives the same errors
    (docs/recipes.md), but its signs, and its vectors where two singular values meet, are up to the machine,
    and clusters must not differ in a whole direction. Norms are compared to 2^-20 of the largest, and
    equal ones stay in their order, as those of an initial basis.
    """
    q = q_average.to(torch.float64)
    norms = q.norm(dim=0)
    steps = torch.round(norms / norms.max().clamp(min=torch.finfo(torch.float64).tiny) * (1 << 20))
    return orthonormalise(q[:, steps.argsort(descending=True, stable=True)]).to(q_average.dtype)


def subtract_outer_(matrix: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """matrix -= p q^T in place, without building the product. matrix: [m, n]. p: [m, r]. q: [n, r]."""
    return matrix.addmm_(p, q.T, alpha=-1.0)


def add_outer_(matrix: Tensor, p: Tensor, q: Tensor, *, scale: float = 1.0) -> Tensor:
    """matrix += scale * p q^T in place. Shapes as in subtract_outer_."""
    return matrix.addmm_(p, q.T, alpha=scale)


def initial_basis(
    name: str, shape: Sequence[int], r: int, seed: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """The basis of the first round, float32 [n, r], orthonormal, the same on every cluster.

    name, shape: of the parameter. seed: of the run. Entries are uniform 16-bit integers from SHAKE-256, so
    they do not depend on the version or the processor features behind torch's random numbers.
    """
    n = matrix_shape(shape)[1]
    stream = hashlib.shake_256(f"p2p_dilocox basis {seed} {name}".encode()).digest(2 * n * r)
    integers = torch.frombuffer(bytearray(stream), dtype=torch.int16).view(n, r)
    return orthonormalise(integers.to(torch.float32)).to(device)
