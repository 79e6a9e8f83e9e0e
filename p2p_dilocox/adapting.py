"""The controller of a rank: what controller.py makes of the rounds that were committed.

Nothing of it is state of the run. Each cluster says at the roll call which ranks and which H it wants; all
members take the same ones from the record of the round (`Roster`), so do those that read it later, and what
one cluster measured otherwise than others is settled there. So a state needs no more than the record of the
round that led to it, which comes with every checkpoint and every download: `recall`. What was measured before
that is measured anew.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from p2p_dilocox.averaging.outcome import OuterStep
from p2p_dilocox.controller import RankChoice, band, inner_steps, literal, utilisation
from p2p_dilocox.settings import RunSpec, adapted_inner_steps, first_inner_steps

__all__ = ["Adapting", "build_adapting"]

_SMOOTH = 0.3  # weight of the newest in the means of seconds


class Adapting:
    """stage_of: of the low-rank parameters of this rank. H is one for everybody, r one per stage.

    A rank learns the ranks of its own stages; `wishes` are summed over the ranks of a cluster.
    """

    def __init__(self, spec: RunSpec, stage_of: Mapping[str, int]) -> None:
        self._spec, self._adapt, self._first = spec, spec.adapt, spec.compression.lowrank
        self._stages = {s: [n for n, of in stage_of.items() if of == s] for s in sorted({*stage_of.values()})}
        self._least_h, self._most_h = adapted_inner_steps(spec)
        self._choices: dict[int, RankChoice] = {}
        self._ranks: dict[int, int] = {}  # of the last round; `_choices` has those of the next
        self._H = 0
        self._why: dict[int, str] = {}  # of each stage's choice
        self._wish_h, self._why_h = 0, ""
        self._comm_s: float | None = None  # of a round that we were in; None: of none yet
        self._step_s = 0.0

    def H(self, t: int) -> int:  # noqa: N802 (its name everywhere)
        """Inner steps of outer step t: of the start-up phase, or as the last round has it."""
        return self._H if self._H and t > self._adapt.startup_steps else first_inner_steps(self._spec, t)

    def trained(self, seconds: float) -> None:
        """An inner step has taken so long."""
        self._step_s += (seconds - self._step_s) * (_SMOOTH if self._step_s else 1.0)

    def wishes(self) -> list[float]:
        """The rank that each stage should have, 0 where this rank does not know."""
        choices = [self._choices.get(stage) for stage in range(self._spec.model.stages)]
        return [0.0 if choice is None else float(choice.r) for choice in choices]

    def wish_for_h(self, ranks: Sequence[float]) -> int:
        """H as this cluster wants it, 0 if it does not know. ranks: `wishes`, summed over its ranks."""
        if not self._H:
            return 0
        band = self._adapt.rule == "band"
        if band and self._comm_s is None:  # what has led to the present H is not measured yet
            return self._H
        comm_s = self._comm_s or 0.0 if band else 0.0
        alpha = max(ranks, default=0.0) / self._first if self._first and any(ranks) else 1.0
        of_rank, wish = (
            inner_steps(
                alpha, first=self._spec.inner.H, least=self._least_h, most=self._most_h,
                comm_s=seconds, step_s=self._step_s, overlap=self._adapt.overlap,
            )
            for seconds in (0.0, comm_s)
        )  # fmt: skip
        self._why_h = f"the rank is {alpha:.0%} of the first"
        if wish > of_rank:
            self._why_h = f"a round takes {comm_s:.1f} s, an inner step {self._step_s:.2f} s"
        self._wish_h = wish
        return wish

    def recall(self, lowrank: Sequence[int], H: int) -> None:  # noqa: N803
        """What the members of a round have agreed on: see `OuterStep`."""
        self._H = min(max(H, self._least_h), self._most_h) if H else self._spec.inner.H
        for stage in self._stages:
            r = min(sum(lowrank[stage : stage + 1]) or self._first, self._first)
            choice = self._choices.get(stage)
            if choice is None or choice.r != r:
                self._choices[stage] = RankChoice(r)
                self._why.pop(stage, None)
            self._ranks[stage] = r

    def learn(self, step: OuterStep, seconds: float, sent_bytes: int = 0) -> str:
        """A committed round. seconds, sent_bytes: of it, if we were in it. If it was the first of another
        rank or leads to another H, a sentence that says so and why; else ""."""
        before, h_before = dict(self._ranks), self._H or self._spec.inner.H
        if step.own is not None:
            self._comm_s = (
                seconds if self._comm_s is None else self._comm_s + _SMOOTH * (seconds - self._comm_s)
            )
        self.recall(step.lowrank, step.H)
        agreed = "the members agreed on it"
        changes = [
            f"stage {stage}: lowrank {before[stage]} -> {r}: {self._why.get(stage, agreed)}"
            for stage, r in self._ranks.items()
            if before.get(stage, r) != r
        ]
        if h_before != self._H:
            changes.append(f"H {h_before} -> {self._H}: {self._why_h if self._wish_h == self._H else agreed}")
        if changes and sent_bytes:
            changes.append(f"{sent_bytes / 1e6:.3g} MB sent by this rank")
        for stage, names in self._stages.items():
            factors = {n: step.average.factors[n] for n in names if n in step.average.factors}
            if factors:
                self._choose(stage, factors)
        return "; ".join(changes)

    def _choose(self, stage: int, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """The rank of a stage in the next round. factors: of an average."""
        choice, c, energy = self._choices[stage], self._adapt.window, self._adapt.energy
        k = choice.r * utilisation(factors, energy)
        rule = literal if self._adapt.rule == "literal" else band
        after = self._choices[stage] = rule(choice, k, c=c, first=self._first)
        if after.r != choice.r:
            used = f"{choice.used(k, c):.1f} directions of the last {c} averages"
            self._why[stage] = f"{energy:.0%} of the energy fits into {used}"


def build_adapting(
    spec: RunSpec, stage_of: Mapping[str, int], lowrank_names: Iterable[str], embedding_names: Collection[str]
) -> Adapting | None:
    """None if rank and H are pinned. Embeddings and output head have the rank that the layers of their stage
    use: so tall are they that they alone would decide otherwise."""
    if spec.adapt.rule == "none":
        return None
    return Adapting(spec, {name: stage_of[name] for name in lowrank_names if name not in embedding_names})
