"""What a cluster that comes back has on its disk: its newest checkpoint, and the rounds committed since."""

import json
import time
from functools import partial
from pathlib import Path

from p2p_dilocox.averaging.catchup import Proven, read_result
from p2p_dilocox.averaging.states import OFFER, stage_file
from p2p_dilocox.checkpoint.resume import load_rank, load_stages, newest, read_saved, tidy
from p2p_dilocox.events import Phase, Warned
from p2p_dilocox.runspec import RunSpec, tokens_per_outer_step
from p2p_dilocox.swarm.messages import Result, StateOffer, unpack
from p2p_dilocox.trainer import Rank, take_outer_steps

__all__ = ["recover"]

_AT_ONCE = 8  # rounds whose averages are in memory together
_SECONDS = 600.0


def recover(spec: RunSpec, rank: Rank, state: Path, spec_digest: str) -> None:
    """Go back to where this cluster was: nothing that it saw committed is lost. Damaged files are named."""
    began = time.monotonic()
    step = _find(rank, state / "checkpoints", spec_digest) if rank.index == 0 else b""
    name = rank.pipeline.broadcast(step).decode()
    if name:
        _load(rank, state / "checkpoints" / name)
        _recall(spec, rank, state / "checkpoints" / name / OFFER)
    from_t = rank.outer.t
    while _replay(spec, rank):
        pass
    rank.rounds.kept.forget_after(rank.outer.t)
    rank.progress.lineages = rank.rounds.kept.lineages(partial(_read, spec, rank))
    # Steps that were dropped before have left nothing else behind, but their numbers are used up (rule V3).
    dropped = max(int(t) for t in rank.pipeline.gather(str(rank.history.last_dropped()).encode()))
    if rank.t <= dropped:
        rank.t, rank.h = dropped + 1, 0
    rank.progress.move_to(rank.t - 1, rank.outer)
    if rank.index == 0 and (name or rank.outer.t):
        since = f" and {rank.outer.t - from_t} outer steps after it" if rank.outer.t > from_t else ""
        detail = (
            f"resumed outer step {rank.outer.t}, inner step {rank.h} from {name or 'the start'}{since} "
            f"in {time.monotonic() - began:.1f} s"
        )
        rank.report(Phase(rank=0, name="resumed", detail=detail))


def _load(rank: Rank, step: Path) -> None:
    whole = load_rank(read_saved(step), rank)
    if rank.pipeline.sum([float(whole)])[0] == rank.pipeline.num_ranks:
        return
    names = set(rank.pipeline.stage_of.values())
    load_stages({stage: step / stage_file(stage) for stage in names}, rank)  # also where our part did fit
    if rank.index == 0:
        message = (
            f"{step.name} was made by another number of processes or another schedule: the inner optimizer "
            "starts anew, and what this cluster had not delivered is given up"
        )
        rank.report(Warned(rank=0, message=message))


def _recall(spec: RunSpec, rank: Rank, offer: Path) -> None:
    """Rank and H as the round has them that led to this checkpoint; the rounds after it tell the rest."""
    if rank.adapting and offer.is_file():
        roster = _read(spec, rank, unpack(offer.read_bytes(), StateOffer).result).roster
        rank.adapting.recall(roster.lowrank, roster.H)


def _find(rank: Rank, checkpoints: Path, spec_digest: str) -> bytes:
    damaged: list[Path] = []

    def complain(step: Path, why: str) -> None:
        damaged.append(step)
        message = f"{why}. An older checkpoint is used, or the others' state; {step.name} is set aside"
        rank.report(Warned(rank=0, message=message))

    saved = newest(checkpoints, spec_digest, complain)
    tidy(checkpoints, damaged)
    return saved.path.name.encode() if saved else b""


def _read(spec: RunSpec, rank: Rank, result: Result) -> Proven:
    return read_result(result, spec.run.id, rank.rounds.service.gate, float(tokens_per_outer_step(spec)))


def _replay(spec: RunSpec, rank: Rank) -> bool:
    """Take the next outer steps of which all stages are on our disk. False if there are none."""
    rounds = rank.rounds
    packed = b"[]"
    if rank.index == 0:
        found = rounds.kept.chain(rank.outer.t, rank.outer.lineage, partial(_read, spec, rank), _AT_ONCE)
        packed = json.dumps([result.pack().hex() for result in found]).encode()
    packed = rank.pipeline.broadcast(packed)
    results = [unpack(bytes.fromhex(text), Result) for text in json.loads(packed)]
    if not results:
        return False
    outcome = rounds.adopt(results, [], _SECONDS).wait(lambda: False)
    good = outcome is not None and not outcome.failed
    if rank.pipeline.sum([float(good)])[0] != rank.pipeline.num_ranks or outcome is None:
        return False
    take_outer_steps(spec, rank, outcome)
    rank.pipeline.sync_tied_()
    rank.t, rank.h, rank.unsent_tokens = max(rank.t, rank.outer.t + 1), 0, 0
    return True
