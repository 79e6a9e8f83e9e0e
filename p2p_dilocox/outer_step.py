"""How the anchor follows an average: the same arithmetic on the same bytes on every cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from p2p_dilocox.settings import Inner

__all__ = ["Average", "adamw_", "covered", "nesterov_"]

Parameters = Mapping[str, Tensor]


@dataclass
class Average:
    """Something decoded from the wire: an average, or what the others decode of our own contribution.

    factors: name -> (P [m, r], Q [n, r]); the matrix is P Q^T.
    dense: name -> tensor in the parameter's shape, or the values [k] at its flat `places`, int64 [k].
    """

    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    places: dict[str, Tensor] = field(default_factory=dict)

    def covers(self) -> dict[str, Tensor | None]:
        """Which parameters it is of: name -> places, or None for all values."""
        return {name: self.places.get(name) for name in (*self.factors, *self.dense)}

    def add_to_(self, tensors: Parameters, alpha: float) -> None:
        """tensors += alpha * self, without materialising a low-rank product."""
        for name in (*self.factors, *self.dense):
            self.add_one_(name, tensors[name], alpha)

    def squares(self) -> dict[str, float]:
        """Squared L2 norm of each tensor: of P Q^T that of Q, as P is orthonormal."""
        tensors = {name: q for name, (_, q) in self.factors.items()} | self.dense
        return {n: float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for n, t in tensors.items()}

    def only(self, name: str) -> "Average":
        """Our tensor of that name, alone."""
        factors = {name: self.factors[name]} if name in self.factors else {}
        places = {name: self.places[name]} if name in self.places else {}
        return Average(factors, {name: self.dense[name]} if name in self.dense else {}, places)

    def add_one_(self, name: str, tensor: Tensor, alpha: float) -> None:
        """tensor += alpha * our tensor of that name."""
        if name in self.factors:
            p, q = self.factors[name]
            matrix = tensor.view(tensor.shape[0], -1)
            matrix.addmm_(p.to(matrix), q.to(matrix).T, alpha=alpha)
        elif name in self.places:
            places, values = self.places[name].to(tensor.device), self.dense[name].to(tensor.device)
            tensor.view(-1)[places] = (tensor.view(-1)[places] + alpha * values).to(tensor.dtype)
        elif name in self.dense:
            tensor.add_(self.dense[name].to(tensor.device), alpha=alpha)


def nesterov_(
    theta: Parameters, momentum: Parameters, average: Average, *, lr: float, beta: float, nesterov: bool
) -> None:
    """v <- beta v + Delta; theta <- theta - lr (Delta + beta v), as torch.optim.SGD(nesterov=True). In place.
    Tensors that the average does not cover stay as they are, and so does their v.

    DiLoCo (arXiv 2311.08105), Algorithm 1; Delta = average pseudo-gradient, old minus new, so it descends.
    Without momentum v is Delta itself, and theta takes it as it
    came: rounded to v's float32 it would not be exact.
    """
    names = average.covers()
    for name in names:
        momentum[name].mul_(beta)
    average.add_to_(momentum, 1.0)
    if nesterov or beta == 0.0:
        average.add_to_(theta, -lr)
    if beta != 0.0:
        for name in names:
            theta[name].add_(momentum[name], alpha=-lr * (beta if nesterov else 1.0))


def adamw_(
    theta: Tensor, moments: tuple[Tensor, Tensor], grad: Tensor, *, inner: Inner, lr: float, t: int
) -> None:
    """Step t, from 1, of torch.optim.AdamW, to the bit; vectors are not decayed. In place, also `moments`.

    theta, grad: of one parameter. moments: its exp_avg and exp_avg_sq.
    """
    mean, square = moments
    beta1, beta2 = inner.betas
    if theta.dim() >= 2:
        theta.mul_(1 - lr * inner.weight_decay)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (square.sqrt() / (1 - beta2**t) ** 0.5).add_(inner.eps)
    theta.addcdiv_(mean, root, value=-lr / (1 - beta1**t))


def covered(averages: Sequence[Average]) -> dict[str, Tensor | None]:
    """What any of them covers."""
    union: dict[str, Tensor | None] = {}
    for average in averages:
        for name, places in average.covers().items():
            before = union.get(name, places)
            if places is None or before is None:
                union[name] = None
            else:
                union[name] = places if before is places else torch.unique(torch.cat([before, places]))
    return union
