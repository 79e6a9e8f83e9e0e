"""DiLoCoX, Algorithm 2 (arXiv 2506.21263), as one rank of one cluster lives it. Start reading here.

theta_i is `rank.pipeline.parameters`. The anchor theta is `outer.anchor`: the same on every cluster, because
it moves by
committed averages only. Threads, retries, votes and deadlines live behind `Rounds`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.round import Outcome, Round, Rounds
from p2p_dilocox.data import Batches
from p2p_dilocox.errors import ClusterError
from p2p_dilocox.events import Evaluated, Event, InnerStep, RoundCommitted, RoundDropped, RoundStarted
from p2p_dilocox.history import History
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.pipeline import Pipeline
from p2p_dilocox.runspec import RunSpec
from p2p_dilocox.wish import Leave, Wish

__all__ = ["Checkpoints", "Rank", "evaluate", "parameter_digests", "train"]


class Checkpoints(Protocol):
    def save(self, rank: "Rank") -> None: ...


@dataclass
class Rank:
    """All that a rank trains with, and where it is."""

    index: int
    cluster_id: str
    pipeline: Pipeline
    inner: InnerOptimizer
    outer: OuterState
    rounds: Rounds
    batches: Batches
    progress: Progress
    history: History
    checkpoints: Checkpoints
    wish: Wish
    report: Callable[[Event], None]
    lock: threading.Lock  # held while the anchor moves, so that a joiner gets one state and not half of two
    t: int = 1  # the outer step in progress
    h: int = 0  # its inner steps already done
    pending: Round | None = None  # on the wire; a joiner follows the one that started before it came
    landed: bool = False  # an average was applied at this boundary, the restart from it is due
    unsent_tokens: int = 0


def train(spec: RunSpec, rank: Rank) -> bool:
    """Run the outer steps from rank.t to the run's last. True if
    they are done, False if the cluster was told to leave.

    Raises ClusterError if this cluster cannot go on from its state; it may come back and download another.
    """
    overlap, theta_i, outer = Overlap(spec.overlap.mode), rank.pipeline.parameters, rank.outer
    last = spec.run.outer_steps
    try:
        while rank.t <= last:  # for outer step t = 1 .. T
            while rank.h < spec.inner.H and rank.t <= last:  #   for inner step h = 1 .. H
                arrived = inner_step(spec, rank)  #     theta_i <- AdamW(theta_i, grad L(x)), x ~ D_i
                if arrived and overlap.lands_between:
                    land(spec, rank)
            if rank.pending and overlap.sends_before_restart:
                if take_outer_step(spec, rank):  #   theta^t <- OuterOpt(theta^{t-1}, Delta^{t-1})
                    after_outer_step(spec, rank)
            elif rank.pending:
                land(spec, rank)
            if rank.t > last:
                break  # caught up with clusters that have finished the run
            outer.contribute(theta_i)  #   delta^t <- base - theta_i + gamma e
            if rank.landed:
                outer.restart_(theta_i, spec.overlap.keep)
                rank.pipeline.sync_tied_()
                rank.landed = False
            outer.mark_sent(theta_i)
            #   Delta^t <- AllReduce(C(delta^t)), behind the inner steps of t + 1
            rank.pending = rank.rounds.start(rank.t, Offer(weight=float(rank.unsent_tokens)))
            rank.report(RoundStarted(rank=rank.index, t=rank.t))
            rank.t, rank.h, rank.unsent_tokens = rank.t + 1, 0, 0
            rank.progress.h = 0
            if overlap.waits_at_start:
                land(spec, rank)
    except Leave as leave:
        if rank.pending and not leave.now:
            land(spec, rank)
        elif rank.pending:
            rank.pending = None
            outer.keep_undelivered()
        return False
    if rank.pending:  # the last average is applied, not lost
        land(spec, rank)
    return True


def inner_step(spec: RunSpec, rank: Rank) -> bool:
    """One inner step of the cluster. True if the round on the wire has arrived at all its ranks."""
    started = time.monotonic()
    t, h = rank.t, rank.h
    tokens = rank.batches.batch(t, h)
    rank.pipeline.forward_backward(tokens)
    arrived = rank.pending is not None and rank.pending.ready()
    wish = rank.wish.value
    astray = bool(rank.progress.astray)  # only the lead, rank 0, looks at other clusters' histories
    flags = [arrived, wish == Wish.LEAVE, wish == Wish.LEAVE_NOW, astray]
    step = rank.pipeline.clip_([float(flag) for flag in flags])
    lr = rank.inner.step((t - 1) * spec.inner.H + h)
    num_tokens = tokens.shape[0] * (tokens.shape[1] - 1)
    seconds = time.monotonic() - started
    rank.unsent_tokens += num_tokens
    rank.h = h + 1
    progress = rank.progress
    progress.h, progress.loss, progress.tokens_per_s = rank.h, step.loss, num_tokens / seconds
    progress.tokens += num_tokens
    rank.report(
        InnerStep(
            rank=rank.index,
            t=t,
            h=rank.h,
            H=spec.inner.H,
            loss=step.loss,
            lr=lr,
            grad_norm=step.grad_norm,
            tokens=num_tokens,
            seconds=seconds,
        )  # fmt: skip
    )
    if step.extra[3]:
        why = rank.progress.astray or "rank 0 found another history"
        raise ClusterError(f"{why}. The cluster has to fetch the state of the others.")
    if step.extra[1] or step.extra[2]:  # summed over the ranks, so all of them leave after the same step
        raise Leave(now=step.extra[2] > 0)
    return round(step.extra[0]) == rank.pipeline.num_ranks


def land(spec: RunSpec, rank: Rank) -> None:
    """Take the outer step of the round on the wire and go on from
    the anchor, keeping part of what moved in flight."""
    if take_outer_step(spec, rank):
        rank.outer.restart_(rank.pipeline.parameters, spec.overlap.keep)
        rank.outer.mark_sent(rank.outer.anchor)
        rank.pipeline.sync_tied_()
        rank.landed = False
        after_outer_step(spec, rank)


def take_outer_step(spec: RunSpec, rank: Rank) -> bool:
    """Wait for the round on the wire and apply it. False if it was
    dropped: then its contribution is in the next one."""
    assert rank.pending is not None
    started = time.monotonic()
    outcome = rank.pending.wait(lambda: rank.wish.value == Wish.LEAVE_NOW)
    if outcome is None:
        raise Leave(now=True)
    waited_s = time.monotonic() - started
    rank.pending = None
    agree_in_cluster(rank, outcome)
    outer = rank.outer
    with rank.lock:
        for step in outcome.steps:
            outer.step(step.average, step.t, step.members, step.digest)
        last = outcome.steps[-1] if outcome.steps else None
        if last is not None and last.own is not None:
            outer.commit(last.average, last.own)
        elif any(rank.cluster_id in step.members for step in outcome.steps):
            outer.forget_undelivered()  # the others committed a round we gave up on, with our share in it
        else:
            outer.keep_undelivered()
    rank.progress.move_to(max(outer.t, outcome.t), outer)
    rank.t = max(rank.t, outer.t + 1)  # a cluster that was left behind goes on where the others are
    rank.history.write(outcome, outer.lineage)
    if last is None:
        rank.report(RoundDropped(rank=rank.index, t=outcome.t, reason=outcome.reason, waited_s=waited_s))
        return False
    rank.report(
        RoundCommitted(
            rank=rank.index,
            t=last.t,
            members=last.members,
            included=last.own is not None,
            seconds=outcome.seconds,
            waited_s=waited_s,
            sent_bytes=outcome.sent_bytes,
            received_bytes=outcome.received_bytes,
            lowrank=spec.compression.lowrank,
            H=spec.inner.H,
            parameter_digests=parameter_digests(rank) if last.t % spec.eval.every == 0 else {},
        )  # fmt: skip
    )
    rank.landed = True
    return True


def agree_in_cluster(rank: Rank, outcome: Outcome) -> None:
    """All ranks of a cluster must see the same outcome, or the
    cluster ends and comes back with a downloaded state."""
    last = outcome.steps[-1].t if outcome.steps else 0
    failed, steps, lasts = rank.pipeline.sum([float(outcome.failed), float(len(outcome.steps)), float(last)])
    ranks = rank.pipeline.num_ranks
    if failed or steps != ranks * len(outcome.steps) or lasts != ranks * last:
        why = outcome.reason or "another rank of this cluster has lost it"
        raise ClusterError(
            f"outer step {outcome.t}: {why}. The cluster has to fetch its state from another one."
        )


def after_outer_step(spec: RunSpec, rank: Rank) -> None:
    """Evaluate and save where the run spec asks for it. No round is on the wire here."""
    if rank.outer.t == spec.run.outer_steps:
        return  # whoever called `train` does both at the end, also when the last round was dropped
    if rank.outer.t % spec.eval.every == 0:
        evaluate(spec, rank)
    if rank.outer.t % spec.checkpoint.every == 0:
        rank.checkpoints.save(rank)


@torch.no_grad()
def evaluate(spec: RunSpec, rank: Rank) -> float:
    """Validation loss of the anchor, nats per token; the local parameters are back afterwards."""
    theta_i = {name: p.detach().clone() for name, p in rank.pipeline.parameters.items()}
    for name, p in rank.pipeline.parameters.items():
        p.copy_(rank.outer.anchor[name])
    rank.pipeline.sync_tied_()
    loss = rank.pipeline.evaluate(rank.batches.valid_batches(spec.eval.batches))
    for name, p in rank.pipeline.parameters.items():
        p.copy_(theta_i[name])
    rank.pipeline.sync_tied_()
    rank.report(Evaluated(rank=rank.index, t=rank.outer.t, val_loss=loss))
    return loss


def parameter_digests(rank: Rank) -> dict[int, str]:
    """sha256 of each stage's anchor."""
    stage_of = rank.pipeline.stage_of
    return {
        stage: rank.outer.digest([n for n in rank.outer.anchor if stage_of[n] == stage])
        for stage in sorted(set(stage_of.values()))
    }
