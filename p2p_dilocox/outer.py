"""The state of a rank between outer steps, and the arithmetic of DiLoCoX on it. No sockets, no clock.

Shapes and dtypes: every tensor has its parameter's shape. `anchor` and `momentum` are float32 and equal on
all
clusters. `residual` is what this cluster has moved and not delivered; float64 if the codec is lossless, so
that
theta - (theta - theta_i) gives theta_i back bit for bit.

At a boundary      residual <- residual_scale * residual + (base - theta_i)      the pseudo-gradient delta
On commit          residual <- delta - own (local), delta - average (paper) or 0 (none); residual_scale <-
gamma
On a drop          residual stays delta; residual_scale <- 1: the next delta carries it, once and at full
weight
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from p2p_dilocox.compression import initial_basis, is_lowrank
from p2p_dilocox.lineage import next_lineage
from p2p_dilocox.runspec import RunSpec

__all__ = ["Average", "OuterState", "nesterov_"]

Parameters = Mapping[str, Tensor]


@dataclass
class Average:
    """Something decoded from the wire: an average, or what the others decode of our own contribution.

    factors: name -> (P [m, r], Q [n, r]); the matrix is P Q^T.
    dense: name -> tensor in the parameter's shape.
    """

    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)

    def add_to_(self, tensors: Parameters, alpha: float) -> None:
        """tensors += alpha * self, without materialising a low-rank product."""
        for name, (p, q) in self.factors.items():
            matrix = tensors[name].view(tensors[name].shape[0], -1)
            matrix.addmm_(p.to(matrix), q.to(matrix).T, alpha=alpha)
        for name, value in self.dense.items():
            tensors[name].add_(value.to(tensors[name].device), alpha=alpha)


def nesterov_(
    theta: Parameters, momentum: Parameters, average: Average, *, lr: float, beta: float, nesterov: bool
) -> None:
    """v <- beta v + Delta; theta <- theta - lr (Delta + beta v), as torch.optim.SGD(nesterov=True). In place.

    DiLoCo (arXiv 2311.08105), Algorithm 1; Delta = average pseudo-gradient, old minus new, so it descends.
    Without momentum v is Delta itself, and theta takes it as it
    came: rounded to v's float32 it would not be exact.
    """
    for v in momentum.values():
        v.mul_(beta)
    average.add_to_(momentum, 1.0)
    if nesterov or beta == 0.0:
        average.add_to_(theta, -lr)
    if beta != 0.0:
        for name, v in momentum.items():
            theta[name].add_(v, alpha=-lr * (beta if nesterov else 1.0))


class OuterState:
    """See the module's docstring. `basis`: name -> Q [n, r], the warm start of the next low-rank factors."""

    def __init__(
        self, spec: RunSpec, parameters: Parameters, dense_names: frozenset[str], lineage: str
    ) -> None:
        """dense_names: never factored (embeddings and output head)."""
        self.spec = spec
        lossless = spec.compression.bits == 64
        self.anchor = {name: p.detach().clone() for name, p in parameters.items()}
        self.momentum = {name: torch.zeros_like(a) for name, a in self.anchor.items()}
        self.residual = {
            name: torch.zeros_like(a, dtype=torch.float64 if lossless else torch.float32)
            for name, a in self.anchor.items()
        }
        self.residual_scale = 0.0
        self.base = {name: a.clone() for name, a in self.anchor.items()}
        self.basis = {
            name: initial_basis(name, tuple(self.anchor[name].shape), spec.compression.lowrank, spec.run.seed)
            for name in self.anchor
            if is_lowrank(name, self.anchor[name].shape, spec.compression.lowrank, dense_names)
        }
        self.t = 0
        self.lineage = lineage
        self.members: list[str] = []

    @torch.no_grad()
    def contribute(self, parameters: Parameters) -> Parameters:
        """The pseudo-gradient at a boundary. It lives in `residual` until `commit` or `keep_undelivered`."""
        for name, delta in self.residual.items():
            delta.mul_(self.residual_scale).add_(self.base[name]).sub_(parameters[name])
        return self.residual

    @torch.no_grad()
    def mark_sent(self, parameters: Parameters) -> None:
        """All movement up to `parameters` is in the residual; what comes now is unsent."""
        for name, base in self.base.items():
            base.copy_(parameters[name])

    @torch.no_grad()
    def step(self, average: Average, t: int, members: list[str], digest: str) -> None:
        """The outer step t: the same on every cluster, because it depends on committed bytes only."""
        outer = self.spec.outer
        nesterov_(
            self.anchor, self.momentum, average, lr=outer.lr, beta=outer.momentum, nesterov=outer.nesterov
        )
        for name, (_, q) in average.factors.items():
            self.basis[name].copy_(q)
        self.lineage = next_lineage(self.lineage, t, members, digest)
        self.t, self.members = t, members

    @torch.no_grad()
    def commit(self, average: Average, own: Average) -> None:
        """What the round's message failed to say becomes the error buffer."""
        compression = self.spec.compression
        if compression.feedback == "none":
            self.residual_scale = 0.0
            return
        (own if compression.feedback == "local" else average).add_to_(self.residual, -1.0)
        self.residual_scale = compression.gamma

    def keep_undelivered(self) -> None:
        """The round did not deliver our contribution."""
        self.residual_scale = 1.0

    def forget_undelivered(self) -> None:
        """The residual was delivered by a round whose outcome we learned too late to know what it lost."""
        self.residual_scale = 0.0

    @torch.no_grad()
    def restart_(self, parameters: Parameters, keep: float) -> None:
        """Go on from the anchor, keeping a fraction of the movement
        since `base`: theta_i <- theta - keep (base - theta_i).

        convergence: `cont` beta = keep; paper (Algorithm 2): keep = 0.
        """
        for name, theta_i in parameters.items():
            theta_i.sub_(self.base[name]).mul_(keep).add_(self.anchor[name])

    def digest(self, names: list[str]) -> str:
        """sha256 over the anchor's bytes, in the given order of names."""
        digest = hashlib.sha256()
        for name in names:
            digest.update(self.anchor[name].detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()
