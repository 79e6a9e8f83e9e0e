"""DiLoCoX, Algorithm 2 (arXiv 2506.21263), as one rank of one cluster lives it. Start reading here.

theta_i is `rank.pipeline.parameters`. The anchor theta is `outer.anchor`: the same on every cluster, because
it moves by
committed averages only. Threads, retries, votes and deadlines live behind `Rounds`.
"""

import contextlib
import math
import time

import torch

from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, OuterStep
from p2p_dilocox.errors import ClusterError, DriftedError, LostError, NotTrustedError
from p2p_dilocox.events import (
    Adapted,
    Evaluated,
    InnerStep,
    RoundCommitted,
    RoundDropped,
    RoundStarted,
    ShardTrained,
    StepSkipped,
    Warned,
)
from p2p_dilocox.fault_points import reach
from p2p_dilocox.inner import learning_rate
from p2p_dilocox.offload import shown_in
from p2p_dilocox.outer import fingerprint
from p2p_dilocox.outer_step import covered
from p2p_dilocox.overlap import Overlap
from p2p_dilocox.pipeline import StepResult
from p2p_dilocox.runspec import RunSpec, tokens_per_outer_step, total_inner_steps
from p2p_dilocox.settings import first_inner_steps, inner_steps_before
from p2p_dilocox.training_rank import Checkpoints, Rank
from p2p_dilocox.wish import Stop, Wish

__all__ = [
    "Checkpoints", "Rank", "evaluate", "inner_steps_of", "parameter_digests", "take_outer_steps", "train",
]  # fmt: skip


_LOST = 3  # dropped rounds in a row after which a cluster with a quorum waits for others


def train(spec: RunSpec, rank: Rank) -> bool:
    """Run the outer steps from rank.t to the run's last. True if
    they are done, False if it was told to stop: `rank.wanted`.

    Raises LostError if this cluster has to look where the others are, ClusterError if they refuse it,
    DriftedError if its parameters are others than theirs.
    """
    overlap, last, rank.wanted = Overlap(spec.overlap.mode), spec.run.outer_steps, Wish.STAY
    rank.H = inner_steps_of(spec, rank)
    try:
        while rank.t <= last:  # for outer step t = 1 .. T
            if spec.run.quorum > 1 and rank.dropped >= _LOST:  # what it moves alone grows, and helps nobody
                rank.dropped = 0
                raise Stop(Wish.PAUSE_NOW)
            while rank.h < rank.H and rank.t <= last:  #   for inner step h = 1 .. H
                arrived = inner_step(spec, rank)  #     theta_i <- AdamW(theta_i, grad L(x)), x ~ D_i
                if rank.pending and overlap.lands(arrived, rank.h, spec.overlap.delay):
                    land(spec, rank)
            if rank.pending:
                land(spec, rank)  #   theta^t <- OuterOpt(theta^{t-1}, Delta^{t-1})
            if rank.t > last:
                break  # caught up with clusters that have finished the run
            offer = contribute(spec, rank)  #   delta^t <- theta - theta_i + gamma e
            #   Delta^t <- AllReduce(C(delta^t)), behind the inner steps of t + 1
            rank.pending = rank.rounds.start(rank.t, offer)
            rank.t, rank.h, rank.unsent_tokens = rank.t + 1, 0, 0
            rank.progress.h = 0
            if overlap.waits_at_start or rank.wanted:
                land(spec, rank)
            elif overlap.peeks:
                peek(spec, rank)
            rank.H = inner_steps_of(spec, rank)
            if rank.wanted and rank.t <= last:
                raise Stop(rank.wanted)
    except Stop as stop:
        rank.wanted = stop.wish
        if rank.pending and rank.wanted != Wish.LEAVE_NOW:
            with contextlib.suppress(Stop):
                land(spec, rank)
        rank.pending = None  # what it carried stays undelivered
        return False
    if rank.pending:  # the last average is applied, not lost
        land(spec, rank)
    return True


def inner_steps_of(spec: RunSpec, rank: Rank) -> int:
    """H of the outer step that begins."""
    return rank.adapting.H(rank.t) if rank.adapting else first_inner_steps(spec, rank.t)


def inner_step(spec: RunSpec, rank: Rank) -> bool:
    """One inner step of the cluster. True if the round on the wire has arrived at all its ranks."""
    started = time.monotonic()
    t, h = rank.t, rank.h
    if rank.share:
        rank.share.lease(t, rank.batches, rank.pipeline)
    tokens = rank.batches.batch(t, h)
    rank.pipeline.forward_backward(tokens, f"{spec.run.seed}/{rank.cluster_id}/{t}/{h}")
    arrived = rank.pending is not None and rank.pending.ready()
    astray = bool(rank.progress.astray)  # only the lead, rank 0, looks at other clusters' histories
    duplicate = bool(rank.progress.duplicate)
    wishes = [rank.wish.value == wish for wish in range(Wish.LEAVE_NOW + 1)]
    step = rank.pipeline.clip_([float(flag) for flag in (arrived, astray, duplicate, *wishes)])
    rank.h = rank.progress.h = h + 1
    if math.isfinite(step.loss) and math.isfinite(step.grad_norm):
        number = inner_steps_before(spec, t) + h * first_inner_steps(spec, t) / rank.H
        lr = rank.inner.step(number)
        if rank.local and rank.local.step_(rank.pipeline.parameters, round(number) + 1):
            rank.pipeline.sync_tied_()
        num_tokens = int((tokens[:, 1:] >= 0).sum())  # the rest is padding
        seconds = rank.step_s or time.monotonic() - started
        if rank.adapting:
            rank.adapting.trained(seconds)
        rank.unsent_tokens += num_tokens
        progress = rank.progress
        progress.loss, progress.tokens_per_s = step.loss, num_tokens / seconds
        progress.tokens += num_tokens
        rank.report(
            InnerStep(
                rank=rank.index,
                t=t,
                h=rank.h,
                H=rank.H,
                loss=step.loss,
                lr=lr,
                grad_norm=step.grad_norm,
                tokens=num_tokens,
                seconds=seconds,
            )  # fmt: skip
        )
    else:
        skip(spec, rank, step)
    if step.extra[2]:
        raise NotTrustedError(rank.progress.duplicate or "rank 0 found its identity in use elsewhere")
    if step.extra[1]:
        why = rank.progress.astray or "rank 0 found another history"
        raise LostError(f"{why}. The cluster looks where the others are.")
    # Summed over the ranks, so all of them stop after the same step.
    rank.wanted = max(wish for wish, ranks in enumerate(step.extra[3:]) if ranks)
    if rank.wanted in (Wish.PAUSE_NOW, Wish.LEAVE_NOW):
        raise Stop(rank.wanted)
    return round(step.extra[0]) == rank.pipeline.num_ranks


def skip(spec: RunSpec, rank: Rank, step: StepResult) -> None:
    """No optimizer step: all ranks see the same numbers, so all of them go back to the anchor (field report
    C1). What a round on the wire carries was finite; it is delivered, or waits, as ever."""
    rank.outer.reset_(rank.pipeline.parameters)
    if rank.local:
        rank.local.reset_(rank.pipeline.parameters)
    rank.pipeline.sync_tied_()
    rank.unsent_tokens = 0
    rank.skipped += 1
    rank.report(
        StepSkipped(
            rank=rank.index,
            t=rank.t,
            h=rank.h,
            H=rank.H,
            skipped=rank.skipped,
            message=f"outer step {rank.t}, inner step {rank.h}: loss {step.loss:g}, gradient norm "
            f"{step.grad_norm:g}. The step is skipped and training goes on from the last anchor; if this "
            "repeats, inner.lr is too high or the data is damaged",
        )  # fmt: skip
    )


def contribute(spec: RunSpec, rank: Rank) -> Offer:
    """Put all that was moved and not delivered into `outer.residual`; what the roll call is told of it."""
    outer, theta_i = rank.outer, rank.pipeline.parameters
    delta = outer.contribute(theta_i)
    wishes = rank.adapting.wishes() if rank.adapting else []
    sums = [delta.all, delta.fresh, delta.error or 0.0, *wishes, *outer.sketch()]
    norm_sq, fresh_sq, error_sq, *rest = rank.pipeline.sum(sums)
    wishes, sketch = rest[: len(wishes)], rest[len(wishes) :]
    if not math.isfinite(norm_sq):  # the last inner step left it so, and no loss has shown it yet
        outer.forget_undelivered()
        outer.reset_(theta_i)
        rank.unsent_tokens, norm_sq = 0, 0.0
        message = f"outer step {rank.t}: the pseudo-gradient is not finite, and is given up"
        rank.report(Warned(rank=rank.index, message=message))
    rank.pipeline.sync_tied_()
    known = delta.error is not None and fresh_sq > 0 and math.isfinite(fresh_sq)
    ratio = math.sqrt(error_sq / fresh_sq) if known else None
    sparse = spec.compression.top < 1  # keeps most of what was moved for later, as a momentum of its own
    if (alarm := rank.alarm.hear(None if sparse else ratio)) and rank.index == 0:
        rank.report(Warned(rank=rank.index, message=alarm))
    # One that came back in the middle of an outer step may have trained for more than one: nobody may say so.
    weight = float(min(rank.unsent_tokens, tokens_per_outer_step(spec)))
    norm = math.sqrt(norm_sq)
    outer.part = rank.backlog.part(norm)
    if outer.part < 1.0 and rank.index == 0:
        message = (
            f"outer step {rank.t}: what could not be delivered so far has the norm {norm:.4g}, which others "
            f"would refuse. {outer.part:.0%} of it is sent now, the rest follows"
        )
        rank.report(Warned(rank=0, message=message))
    norm *= outer.part
    rank.report(RoundStarted(rank=rank.index, t=rank.t, weight=weight, norm=norm, error_ratio=ratio))
    reach("contributed", rank.t)
    H = rank.adapting.wish_for_h(wishes) if rank.adapting else 0
    fingerprint_ = fingerprint(sketch, rank.pipeline.num_parameters)
    return Offer(weight, norm, fingerprint_, tuple(map(round, wishes)), H)


def land(spec: RunSpec, rank: Rank) -> None:
    """Wait for the round on the wire, take its outer step, and go on
    from the anchor, keeping part of what moved in flight.

    If it was dropped nothing changes: what it carried is in the next contribution.
    """
    assert rank.pending is not None
    started = time.monotonic()
    outcome = rank.pending.wait(lambda: rank.wish.value == Wish.LEAVE_NOW)
    if outcome is None:
        raise Stop(Wish.LEAVE_NOW)
    waited_s = time.monotonic() - started
    rank.pending = None
    agree_in_cluster(rank, outcome)
    reach("landing", outcome.t)
    outer = rank.outer
    if outcome.steps:
        take_outer_steps(spec, rank, outcome)
        if rank.anchors:
            rank.anchors.take(outer.t, outer.anchor)
        rank.pipeline.sync_tied_()
    rank.progress.move_to(max(outer.t, outcome.t), outer)
    rank.t = max(rank.t, outer.t + 1)  # a cluster that was left behind goes on where the others are
    rank.history.write(outcome, outer.lineage)
    reach("landed", outcome.t)
    shard_landed(rank, outcome.t)
    rank.dropped = 0 if outcome.steps else rank.dropped + 1
    for note in outcome.notes:
        rank.report(Warned(rank=rank.index, message=note))
    if not outcome.steps:
        rank.report(RoundDropped(rank=rank.index, t=outcome.t, reason=outcome.reason, waited_s=waited_s))
        return
    last = outcome.steps[-1]
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
            lowrank=max(last.lowrank, default=0) or spec.compression.lowrank,
            H=rank.H,
            parameter_digests=parameter_digests(rank) if last.t % spec.eval.every == 0 else {},
        )  # fmt: skip
    )
    after_outer_step(spec, rank)


def shard_landed(rank: Rank, t: int) -> None:
    """The round of outer step t is over: what this cluster trained on for it is delivered, or will be."""
    if rank.share and rank.index == 0 and (shard := rank.share.finish(t)) is not None:
        num_shards = rank.batches.num_shards
        rank.report(ShardTrained(rank=0, t=t, shard=shard, num_shards=num_shards))
        if news := rank.share.news(t, shard, num_shards):
            rank.report(Warned(rank=0, message=news))


def peek(spec: RunSpec, rank: Rank) -> None:
    """Go on from the anchor with our own share of the round on the wire, one of as many as the last had."""
    share = 1.0 / max(1, len(rank.outer.members) or spec.run.min_clusters)
    parameters = rank.pipeline.parameters
    with rank.local.moved_(parameters) if rank.local else contextlib.nullcontext():
        rank.outer.peek_(parameters, share)
    rank.pipeline.sync_tied_()


def take_outer_steps(spec: RunSpec, rank: Rank, outcome: Outcome) -> None:
    """Usually one. Several, if this cluster was left behind; it had its share in at most one of those."""
    with rank.local.moved_(rank.pipeline.parameters) if rank.local else contextlib.nullcontext():
        _take_outer_steps(spec, rank, outcome)
    for step in outcome.steps:
        rank.backlog.learn(step, delivered=step.own is not None and offered(step, rank.cluster_id))
        if offered(step, rank.cluster_id):  # also where it came to land after a restart only
            shard_landed(rank, step.t)
        if not rank.adapting:
            continue
        sent_bytes = outcome.sent_bytes if step.t == outcome.t else 0
        if change := rank.adapting.learn(step, outcome.seconds, sent_bytes):
            ranks = [r or spec.compression.lowrank for r in step.lowrank]
            H = rank.adapting.H(step.t + 1)
            rank.report(Adapted(rank=rank.index, t=step.t, lowrank=ranks, H=H, message=change))


def _take_outer_steps(spec: RunSpec, rank: Rank, outcome: Outcome) -> None:
    outer, overlap, keep = rank.outer, Overlap(spec.overlap.mode), spec.overlap.keep
    carry, blend, forgotten = overlap.carries, False, False
    for step in outcome.steps:
        if not offered(step, rank.cluster_id):
            continue
        if step.own is None:  # a round from before a restart of ours, and what it delivered is not known:
            outer.forget_undelivered()  # nothing may count twice
            keep, carry, forgotten = 0.0, False, True
        else:
            outer.commit(step.average, step.own, late=step.t < outcome.t)
            blend = overlap.blends and step.t == outcome.t
    if overlap.blends and not blend and not forgotten:
        keep = 1.0  # what was not delivered waits; what is fresh stays
    covers = covered([step.average for step in outcome.steps])
    with outer.restart_(rank.pipeline.parameters, keep, carry=carry, blend=blend, covers=covers):
        for step in outcome.steps:
            own = step.own if offered(step, rank.cluster_id) else None
            if spec.outer.average == "gradient":
                lr = learning_rate(spec.inner, inner_steps_before(spec, step.t), total_inner_steps(spec))
                scale = clipping(spec, rank, step)
                outer.step(step.average, step.t, step.members, step.digest, lr=lr, scale=scale)
            else:
                outer.step(step.average, step.t, step.members, step.digest, own=own)
    if forgotten:
        outer.reset_(rank.pipeline.parameters)


def clipping(spec: RunSpec, rank: Rank, step: OuterStep) -> float:
    """What the averaged gradient is multiplied with, so that its norm over the whole model is at most
    inner.clip_norm. Summed in the order of stages: the same bits however a cluster cuts the model."""
    squares = [0.0] * spec.model.stages
    for name, square in sorted(step.average.squares().items()):
        squares[rank.pipeline.stage_of[name]] += square
    norm = math.sqrt(sum(rank.pipeline.sum(squares)))
    return spec.inner.clip_norm / norm if norm > spec.inner.clip_norm else 1.0


def offered(step: OuterStep, cluster_id: str) -> bool:
    """Whether a share of this cluster is in the average: a weight of 0 only takes part. No weights are known
    of a round that was fetched from others."""
    if cluster_id not in step.members:
        return False
    return not step.weights or step.weights[step.members.index(cluster_id)] > 0


def agree_in_cluster(rank: Rank, outcome: Outcome) -> None:
    """All ranks of a cluster must see the same outcome, or none of them takes it."""
    last = outcome.steps[-1].t if outcome.steps else 0
    flags = [outcome.failed, outcome.refused, outcome.drifted, len(outcome.steps), last]
    failed, refused, drifted, steps, lasts = rank.pipeline.sum([float(flag) for flag in flags])
    ranks = rank.pipeline.num_ranks
    if failed or steps != ranks * len(outcome.steps) or lasts != ranks * last:
        why = outcome.reason or "another rank of this cluster has lost it"
        message = f"outer step {outcome.t}: {why}"
        if drifted or refused:
            raise (DriftedError if drifted else ClusterError)(message)
        raise LostError(f"{message}. The cluster looks where the others are.")


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
    """Validation loss of the anchor, nats per token.

    Before the last round of a run that draws a fraction of the parameters, the cluster's own: the values of
    such an anchor are of many different ages.
    """
    mixed = spec.schedule.fraction < 1 and rank.outer.t < spec.run.outer_steps
    with contextlib.nullcontext() if mixed else rank.outer.shown(rank.pipeline.parameters):
        rank.pipeline.sync_tied_()
        loss = rank.pipeline.evaluate(rank.batches.valid_batches(spec.eval.batches))
    mean, mean_loss = rank.anchors.mean() if rank.anchors else None, None
    if mean is not None:
        with shown_in(rank.pipeline.parameters, mean, copy=True):
            rank.pipeline.sync_tied_()
            mean_loss = rank.pipeline.evaluate(rank.batches.valid_batches(spec.eval.batches))
    rank.pipeline.sync_tied_()
    rank.report(Evaluated(rank=rank.index, t=rank.outer.t, val_loss=loss, mean_val_loss=mean_loss))
    return loss


def parameter_digests(rank: Rank) -> dict[int, str]:
    """sha256 of each stage's anchor."""
    stage_of = rank.pipeline.stage_of
    return {
        stage: rank.outer.digest([n for n in rank.outer.anchor if stage_of[n] == stage])
        for stage in sorted(set(stage_of.values()))
    }
