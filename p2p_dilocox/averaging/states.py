"""States on disk that a cluster or an archive serves, and what their members sign of them (rule V8).

A state is a directory step-<t>... with a file per stage, equal on all clusters that took the same outer
steps on like machines, and `offer`: the proof that outer step t was committed, and who says that it led to
these files.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from p2p_dilocox.averaging.catchup import read_result
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.pieces import FileDigest, read_piece
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Result, StateClaim, StateOffer, open_sealed, seal, unpack

__all__ = ["OFFER", "Held", "StateShelf", "best_state", "check_offer", "make_offer", "stage_file", "steps_in"]

_STEP = re.compile(r"step-(\d{1,9})(?:\+(\d{1,9}))?")
_MOST_CLAIMS = 256  # as in messages.StateOffer
OFFER = "offer"  # the file with the StateOffer of its directory


def stage_file(stage: int) -> str:
    return f"stage{stage}.safetensors"


def steps_in(directory: Path) -> list[Path]:
    """The directories of states, newest first; those of one outer step by the inner steps after it."""
    if not directory.is_dir():
        return []
    found = [(m, p) for p in directory.iterdir() if (m := _STEP.fullmatch(p.name))]
    found.sort(key=lambda f: (int(f[0][1]), int(f[0][2] or 0)), reverse=True)
    return [path for _, path in found]


def make_offer(
    key: SigningKey, run_id: str, lineage: str, result: Result, files: Mapping[int, FileDigest]
) -> StateOffer:
    """Of our own state after the round of `result`."""
    claim = StateClaim(
        cluster_id=key.cluster_id, t=result.call.t, lineage=lineage,
        roots={str(stage): digest.root for stage, digest in files.items()},
    )  # fmt: skip
    return StateOffer(
        t=result.call.t, lineage=lineage, result=result, files={str(s): d for s, d in files.items()},
        claims=[seal(key, run_id, claim)],
    )  # fmt: skip


class StateShelf:
    """The states in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def offer(self) -> StateOffer:
        """The newest. Raises NotTrustedError if there is none."""
        for step in steps_in(self._directory):
            try:
                return unpack((step / OFFER).read_bytes(), StateOffer)
            except (OSError, NotTrustedError):
                continue
        raise NotTrustedError("no state is kept here")

    def piece(self, t: int, stage: int, piece: int) -> bytes:
        """Raises NotTrustedError for what is not here."""
        for step in steps_in(self._directory):
            name = _STEP.fullmatch(step.name)
            if name is not None and int(name[1]) == t:
                try:
                    return read_piece(step / stage_file(stage), piece)
                except (OSError, ValueError):
                    continue
        raise NotTrustedError(f"piece {piece} of stage {stage} after outer step {t} is not kept here")


def check_offer(offer: StateOffer, run_id: str, gate: Gate, weight_cap: float) -> set[str]:
    """The members of the offer's round that sign its files. Raises NotTrustedError if the round is not proven
    or nobody does."""
    proven = read_result(offer.result, run_id, gate, weight_cap)
    if (proven.roster.t, proven.lineage) != (offer.t, offer.lineage):
        raise NotTrustedError(f"the state of outer step {offer.t} comes with the proof of another round")
    if {int(stage) for stage in offer.files} != set(proven.digests):
        raise NotTrustedError(f"the state of outer step {offer.t} has other stages than the run")
    if not all(digest.whole for digest in offer.files.values()):
        raise NotTrustedError(f"the state of outer step {offer.t} has files with pieces that are missing")
    roots = {stage: digest.root for stage, digest in offer.files.items()}
    claims = [open_sealed(sealed, run_id, StateClaim) for sealed in offer.claims]
    signers = {c.cluster_id for c in claims if (c.t, c.lineage, c.roots) == (offer.t, offer.lineage, roots)}
    if not signers & set(proven.roster.ids):
        raise NotTrustedError(f"no member of outer step {offer.t} signs the files that are offered")
    return signers & set(proven.roster.ids)


@dataclass
class Held:
    """A state, the members that sign it, and who has it."""

    offer: StateOffer
    signers: set[str] = field(default_factory=set)
    donors: list[str] = field(default_factory=list)
    others: int = 0
    """Members that sign other files for the same outer step: machines round differently, or somebody lies."""


def best_state(offers: Iterable[tuple[str, StateOffer, set[str]]]) -> Held | None:
    """Of what donors offer, with the signers of each: the state that most members sign, then the newest."""
    held: dict[tuple[int, str, str], Held] = {}
    for donor, offer, signers in offers:
        roots = ",".join(f"{stage}:{digest.root}" for stage, digest in sorted(offer.files.items()))
        state = held.setdefault((offer.t, offer.lineage, roots), Held(offer))
        claims = list(dict.fromkeys([*state.offer.claims, *offer.claims]))[:_MOST_CLAIMS]
        state.offer = msgspec.structs.replace(state.offer, claims=claims)
        state.signers |= signers
        state.donors.append(donor)
    if not held:
        return None
    best = max(held, key=lambda k: (len(held[k].signers), k))
    same_step = [h.signers for k, h in held.items() if k[:2] == best[:2] and k != best]
    held[best].others = len(set().union(*same_step))
    return held[best]
