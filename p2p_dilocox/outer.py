"""The state of a rank between outer steps, and the arithmetic of DiLoCoX on it. No sockets, no clock.

Every tensor has its parameter's shape. `anchor` and `momentum` are float32 and equal on all clusters. Two
more are this cluster's own, one float32 copy together (bf16 each) where the codec loses more than bf16 does:

    undelivered   what this cluster has moved and no round has delivered: error buffer, then pseudo-gradient
    counted       the part of anchor - theta_i that is in `undelivered` already, so what is not counted yet is
                  fresh = anchor - counted - theta_i

contribute    undelivered <- undelivered + fresh                 the pseudo-gradient delta, and fresh is 0
commit        undelivered <- gamma (delta - own)                 local; delta - average: paper; 0: none
drop          nothing: the next delta carries it, once and at full weight
restart_      theta_i <- anchor - keep fresh, counted <- 0       the anchor moves inside of it, nowhere else

With feedback `parameters` what a message could not say stays in theta_i, as CocktailSGD and SPARTA have it:

commit        undelivered <- delta - own
restart_      theta_i <- anchor - undelivered - keep fresh, counted <- undelivered

A round that averages a part of the model (`Average.covers`) changes that part of all this and nothing else.
What rounding to bf16 cuts off a contribution stays in theta_i as movement that is not counted yet.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_dilocox.compression import initial_basis, is_lowrank
from p2p_dilocox.lineage import next_lineage
from p2p_dilocox.offload import borrowed, picked, shown_in, slices, stored
from p2p_dilocox.outer_step import Average, adamw_, nesterov_
from p2p_dilocox.runspec import RunSpec
from p2p_dilocox.selection import partial

__all__ = [
    "Average", "Delta", "OuterState", "Residual", "fingerprint", "nesterov_", "same_anchor",
]  # fmt: skip

Parameters = Mapping[str, Tensor]
Covers = Mapping[str, Tensor | None]

_FOLD = 4093  # a prime: rows of a matrix do not fall on one another when its tensor is folded
_SLICE = _FOLD * 256  # values that arithmetic takes at a time, so that what it needs besides stays small
_SIGNS = torch.tensor(
    [2.0 * (byte & 1) - 1.0 for byte in hashlib.shake_256(b"anchor").digest(4 * _FOLD)], dtype=torch.float64
).view(4, _FOLD)
_SAME = 1e-4  # see same_anchor


class Residual(Mapping[str, Tensor]):
    """`undelivered` as arithmetic wants it: on the device and at least float32. What is in bf16 or offloaded
    is copied at every access, so nobody may write to what this hands out."""

    def __init__(self, undelivered: Parameters, device: torch.device) -> None:
        self._undelivered, self._device = undelivered, device

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._undelivered[name].to(self._device)
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._undelivered)

    def __len__(self) -> int:
        return len(self._undelivered)


@dataclass(frozen=True)
class Delta:
    """Squared L2 norms of a contribution, over the tensors of one rank.

    all: what is offered. fresh: what this cluster moved since the last boundary. error: the error buffer that
    went into it; None if the last round was dropped, as what it left is no error.
    """

    all: float
    fresh: float
    error: float | None


class OuterState:
    """See the module's docstring. `basis`: name -> Q [n, r], the warm start of the next low-rank factors."""

    def __init__(
        self,
        spec: RunSpec,
        parameters: Parameters,
        dense_names: frozenset[str],
        lineage: str,
        *,
        offload: bool = False,
    ) -> None:
        """dense_names: never factored. offload: keep all but `basis` in main memory; results have the same
        bits."""
        self.spec, self._offload = spec, offload
        self.device = next(iter(parameters.values())).device
        bits = spec.compression.bits
        # float64 is what makes theta - (theta - theta_i) give theta_i back bit for bit.
        own = torch.float64 if bits == 64 else torch.float32 if bits == 32 else torch.bfloat16
        zeros = {n: stored(p, dtype=p.dtype, offload=offload) for n, p in parameters.items()}
        self.anchor = {name: zero.copy_(parameters[name].detach()) for name, zero in zeros.items()}
        self.momentum = {n: stored(p, dtype=p.dtype, offload=offload) for n, p in parameters.items()}
        # Momentum of this cluster's own shares alone, for `peek_`.
        peeks = parameters if spec.overlap.mode == "eager" else {}
        self.own_momentum = {n: stored(p, dtype=own, offload=offload) for n, p in peeks.items()}
        second = parameters if spec.outer.average == "gradient" else {}
        self.second_moment = {n: stored(p, dtype=p.dtype, offload=offload) for n, p in second.items()}
        self.undelivered = {n: stored(p, dtype=own, offload=offload) for n, p in parameters.items()}
        self.counted = {n: stored(p, dtype=own, offload=offload) for n, p in parameters.items()}
        self.part = 1.0  # of `residual`, that the next round is told; the rest waits
        self.residual: Parameters = Residual(self.undelivered, self.device)
        self.basis = {
            name: initial_basis(name, tuple(self.anchor[name].shape), spec.compression.lowrank, spec.run.seed)
            for name in self.anchor
            if is_lowrank(name, self.anchor[name].shape, spec.compression.lowrank, dense_names)
        }
        # Whether theta_i has what is undelivered: then it is at anchor - undelivered - fresh at all times.
        self.keeps_undelivered = spec.compression.feedback == "parameters" or partial(spec.schedule)
        self.t = 0
        self.lineage = lineage
        self.members: list[str] = []
        self._error: float | None = None  # squared norm of the error buffer, from its commit to `contribute`
        self._carried = 0.0  # norm of what was carried since the last `contribute`

    @torch.no_grad()
    def contribute(self, parameters: Parameters) -> Delta:
        """The pseudo-gradient at a boundary, in `residual` until `commit`. Moves theta_i by what bf16 rounds.

        Call it at every boundary, and not while a round reads `residual`.
        """
        norms = torch.zeros(2, dtype=torch.float64)
        for name, anchor in self.anchor.items():
            written = parameters[name], self.counted[name], self.undelivered[name]
            sums = torch.zeros(2, dtype=torch.float64, device=self.device)
            for theta, counted, undelivered, a in slices(self.device, _SLICE, written, (anchor,)):
                gap = a.to(torch.promote_types(a.dtype, counted.dtype)) - theta
                fresh = gap - counted
                delta = fresh + undelivered
                undelivered.copy_(delta)
                counted.copy_(gap)
                theta.sub_(delta.sub_(undelivered).sub_(gap.sub_(counted)))
                sums += torch.stack([_square(undelivered), _square(fresh)])
            norms += sums.cpu()
        everything, fresh_sq = norms.tolist()
        # What a restart carried is parallel to what it kept, so lengths add up.
        result = Delta(everything, (fresh_sq**0.5 + self._carried) ** 2, self._error)
        self._carried, self._error = 0.0, None
        return result

    @torch.no_grad()
    def commit(self, average: Average, own: Average, *, late: bool = False) -> None:
        """The round delivered `own` of our contribution; what its message failed to say is the error buffer.

        late: another contribution was made since. gamma does not shrink that one, so it is left out.
        """
        compression = self.spec.compression
        said = average if compression.feedback == "paper" else own
        error_sq = 0.0
        for name, places in own.covers().items():
            waiting = self.undelivered[name]
            if compression.feedback == "none" and not late:
                for (part,) in picked(self.device, _SLICE, places, (waiting,), ()):
                    part.zero_()
                continue
            error = self.residual[name]
            said.add_one_(name, error, -1.0)
            if not late:
                error.mul_(compression.gamma)
            waiting.copy_(error)
            error_sq += sum(_square(part).item() for (part,) in slices(self.device, _SLICE, (), (error,)))
        self._error = None if late or self.keeps_undelivered else error_sq

    def forget_undelivered(self) -> None:
        """Nothing waits any more: all of it was delivered, or cannot be."""
        for tensor in self.undelivered.values():
            tensor.zero_()
        self._error = 0.0

    @torch.no_grad()
    def step(
        self,
        average: Average,
        t: int,
        members: list[str],
        digest: str,
        *,
        own: Average | None = None,
        lr: float | None = None,
        scale: float = 1.0,
    ) -> None:
        """The outer step t: the same on every cluster, because it depends on committed bytes only.

        own: our share of the average, None if we had none. lr, scale: of AdamW, if gradients are averaged;
        scale is what clips them.
        Only within `restart_`: theta_i and `counted` are measured from the anchor that moves here.
        """
        outer = self.spec.outer
        for name in average.covers():  # one at a time: what is offloaded needs little room on the device
            if lr is not None:
                self._descend_(name, average, t, lr, scale)
                continue
            with borrowed(self.device, self.anchor[name], self.momentum[name]) as (theta, v):
                nesterov_(
                    {name: theta}, {name: v}, average.only(name),
                    lr=outer.lr, beta=outer.momentum, nesterov=outer.nesterov,
                )  # fmt: skip
        for name, stored_u in self.own_momentum.items():
            with borrowed(self.device, stored_u) as (u,):
                u.mul_(outer.momentum)
                if own is not None:
                    own.add_one_(name, u, 1.0)
        for name, (_, q) in average.factors.items():
            self.basis[name].zero_()[:, : q.shape[1]] = q.to(self.basis[name].device)
        self.lineage = next_lineage(self.lineage, t, members, digest)
        self.t, self.members = t, members

    @torch.no_grad()
    def add_gradients(self, grads: Parameters, scale: float) -> None:
        """undelivered += scale * grad: in place of movement, where gradients are averaged."""
        for name, grad in grads.items():
            for waiting, g in slices(self.device, _SLICE, (self.undelivered[name],), (grad,)):
                waiting.add_(g.to(waiting.dtype), alpha=scale)

    def _descend_(self, name: str, average: Average, t: int, lr: float, scale: float) -> None:
        tensors = self.anchor[name], self.momentum[name], self.second_moment[name]
        with borrowed(self.device, *tensors) as (theta, mean, square):
            grad = torch.zeros_like(theta)
            average.add_one_(name, grad, 1.0)
            adamw_(theta, (mean, square), grad.mul_(scale), inner=self.spec.inner, lr=lr, t=t)

    @contextlib.contextmanager
    def restart_(
        self,
        parameters: Parameters,
        keep: float,
        *,
        carry: bool = False,
        blend: bool = False,
        covers: Covers | None = None,
    ) -> Iterator[None]:
        """Within it the anchor may move, by any number of steps; theta_i goes on from where it then is.

        It keeps `keep` of its fresh movement, not counted yet: theta_i <- anchor - keep fresh. carry: the
        rest is undelivered instead of given up. blend: theta_i <- keep theta_i + (1 - keep) anchor instead,
        and all that is between them is fresh. covers: what moves, None for everything.
        Until the end theta_i holds -fresh, so nobody may read it.
        """
        covers = dict.fromkeys(self.anchor) if covers is None else covers
        self._set_aside_(parameters, covers, keep if blend else None)
        try:
            yield
        finally:
            self._go_on_(parameters, covers, keep, carry=carry, blend=blend)

    def shown(self, parameters: Parameters) -> contextlib.AbstractContextManager[None]:
        """Within it theta_i is the anchor, which must not move meanwhile."""
        return shown_in(parameters, self.anchor, copy=self._offload)

    @torch.no_grad()
    def peek_(self, parameters: Parameters, share: float) -> None:
        """theta_i <- anchor - lr share (delta + m u), u <- m u + delta: eager updates (arXiv 2502.12996).

        There every cluster has an anchor and a momentum of its own and takes outer steps on share delta_i^t +
        (Delta^{t-1} - share delta_i^{t-1}). Outer steps are linear, and the sum over t of what is in brackets
        but for Delta is telescoping: so each such anchor is the common one, which has all Delta up to t - 1,
        minus a Nesterov step on the cluster's own shares. The common one stays the same everywhere.
        """
        outer = self.spec.outer
        for name, u in self.own_momentum.items():
            written = parameters[name], self.counted[name]
            read = self.anchor[name], self.undelivered[name], u
            for theta, counted, a, delta, before in slices(self.device, _SLICE, written, read):
                moved = outer.momentum * before.to(theta.dtype) + delta.to(theta.dtype)
                ahead = delta.to(theta.dtype) + outer.momentum * moved if outer.nesterov else moved
                fresh = a - theta - counted  # what rounding has left
                counted.copy_(outer.lr * share * ahead)
                theta.copy_(a - counted - fresh)

    @torch.no_grad()
    def reset_(self, parameters: Parameters) -> None:
        """theta_i <- anchor: gives up all movement that no contribution has."""
        for name, theta_i in parameters.items():
            theta_i.copy_(self.anchor[name])
            self.counted[name].zero_()
            if self.keeps_undelivered:
                theta_i.sub_(self.residual[name])
                self.counted[name].copy_(self.undelivered[name])

    @torch.no_grad()
    def replace(self, part: str, tensors: Parameters) -> None:
        """Take another cluster's tensors of `part` (anchor, momentum or basis). With an anchor, what we have
        not delivered is forgotten: it was measured from another one."""
        for name, tensor in tensors.items():
            getattr(self, part)[name].copy_(tensor)
            if part == "anchor":
                self.undelivered[name].zero_()
                self.counted[name].zero_()

    def digest(self, names: list[str]) -> str:
        """sha256 over the anchor's bytes, in the given order of names."""
        digest = hashlib.sha256()
        for name in names:
            digest.update(self.anchor[name].detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def sketch(self) -> list[float]:
        """Five numbers of this rank's part of the anchor; `fingerprint` makes one of their sums over ranks.

        The dot products with four vectors of signs, the same on every cluster, and the squared norm. The
        signs repeat after 4093 values, from another one on for each name: so a tensor is folded first, in one
        pass and without a copy of it.
        """
        folded, norm = torch.zeros(_FOLD, dtype=torch.float64), 0.0
        for name, anchor in self.anchor.items():
            fold = torch.zeros(_FOLD, dtype=torch.float64, device=self.device)
            square = torch.zeros((), dtype=torch.float64, device=self.device)
            for (part,) in slices(self.device, _SLICE, (), (anchor,)):
                values = part.double()
                whole = len(values) - len(values) % _FOLD
                fold += values[:whole].view(-1, _FOLD).sum(0)
                fold[: len(values) - whole] += values[whole:]
                square += torch.dot(values, values)
            start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % _FOLD
            folded += fold.cpu().roll(start)
            norm += square.item()
        return [*(_SIGNS @ folded).tolist(), norm]

    @torch.no_grad()
    def _set_aside_(self, parameters: Parameters, covers: Covers, blend: float | None) -> None:
        for name, places in covers.items():
            read = self.anchor[name], self.counted[name]
            for theta, a, counted in picked(self.device, _SLICE, places, (parameters[name],), read):
                if blend is None:
                    theta.sub_(a - counted)
                else:
                    theta.mul_(blend)

    @torch.no_grad()
    def _go_on_(
        self, parameters: Parameters, covers: Covers, keep: float, *, carry: bool, blend: bool
    ) -> None:
        carried_sq, in_theta = 0.0, self.spec.compression.feedback == "parameters"
        for name, places in covers.items():
            anchor = self.anchor[name]
            written = parameters[name], self.counted[name], self.undelivered[name]
            square = torch.zeros((), dtype=torch.float64, device=self.device)
            for theta, counted, undelivered, a in picked(self.device, _SLICE, places, written, (anchor,)):
                counted.zero_()
                if blend:
                    theta.add_(a, alpha=1.0 - keep)
                elif carry:
                    rest = (keep - 1.0) * theta
                    square += _square(rest)
                    delta = undelivered + rest
                    undelivered.copy_(delta)
                    theta.mul_(keep).add_(a).sub_(delta.sub_(undelivered))
                else:
                    theta.mul_(keep).add_(a)
                if in_theta:
                    theta.sub_(undelivered)
                    counted.copy_(undelivered)
            carried_sq += square.item()
        self._carried += carried_sq**0.5


def fingerprint(sketch: list[float], numel: int) -> tuple[float, ...]:
    """Five numbers that tell anchors apart, of a sketch summed over ranks; numel: parameters of the model.

    Four projections and the norm, all over sqrt(numel): the size of one parameter.
    """
    *dots, norm_sq = sketch
    return tuple(value / numel**0.5 for value in (*dots, norm_sq**0.5))


def same_anchor(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether two fingerprints are of one anchor, up to what machines round differently.

    A difference d between anchors moves a projection on random signs by |d|, more or less. So each number may
    differ by 1e-4 of the norm. Rounding adds at most 6e-8 of it per outer step, in random directions: 6e-6
    after 10,000 of them. One outer step moves an anchor by 1e-3 and more, another seed by 1.4.
    """
    if len(a) != len(b):
        return False
    limit = _SAME * max((abs(value) for value in (a[-1:] + b[-1:])), default=0.0)
    return all(abs(x - y) <= limit for x, y in zip(a, b, strict=True))


def _square(slice_: Tensor) -> Tensor:
    wide = slice_.to(torch.float64, copy=True)  # for the last bit of a dot product depends on where it lies
    return torch.dot(wide, wide)
