"""The controller of a rank: what controller.py makes of the rounds that were committed.

Nothing of it is state of the run. Each cluster says at the roll call which ranks and which H it wants; all
members take the same ones from the record of the round (`Roster`), so do those that read it later, and what
one cluster measured otherwise than others is settled there. A cluster that has just come, or come back, has
no wish until it knows what the others have.
"""

import math
from collections.abc import Mapping, Sequence

from p2p_dilocox.averaging.outcome import OuterStep
from p2p_dilocox.controller import RankChoice, band, inner_steps, literal, utilisation
from p2p_dilocox.settings import RunSpec, first_inner_steps, most_inner_steps

__all__ = ["Adapting", "build_adapting"]

_SMOOTH = 0.3  # weight of the newest in the means of seconds


class Adapting:
    """stage_of: of the low-rank parameters of this rank. H is one for everybody, r one per stage.

    A rank learns the ranks of its own stages; `wishes` are summed over the ranks of a cluster.
    """

    def __init__(self, spec: RunSpec, stage_of: Mapping[str, int]) -> None:
        self._spec, self._adapt, self._first = spec, spec.adapt, spec.compression.lowrank
        self._stages = {s: [n for n, of in stage_of.items() if of == s] for s in sorted({*stage_of.values()})}
        self._choices: dict[int, RankChoice] = {}
        self._H = 0
        self._comm_s = self._step_s = 0.0

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
        adapt, inner = self._adapt, self._spec.inner
        alpha = max(ranks, default=0.0) / self._first if self._first and any(ranks) else 1.0
        return inner_steps(
            alpha, first=inner.H,
            least=adapt.H_min or math.ceil(inner.H / 4), most=most_inner_steps(self._spec),
            comm_s=self._comm_s, step_s=self._step_s, overlap=adapt.overlap,
        )  # fmt: skip

    def learn(self, step: OuterStep, seconds: float) -> str:
        """A committed round, which took so long. A sentence if rank or H change with it, else ""."""
        before = {stage: self._choices.get(stage) for stage in self._stages}
        h_before = self._H or self._spec.inner.H
        self._comm_s += (seconds - self._comm_s) * (_SMOOTH if self._comm_s else 1.0)
        self._H = step.H or self._spec.inner.H
        changes = []
        for stage, names in self._stages.items():
            r = step.lowrank[stage] if step.lowrank and step.lowrank[stage] else self._first
            choice = before[stage]
            if choice is None or choice.r != r:
                choice = RankChoice(r)  # as the members have agreed
            factors = {n: step.average.factors[n] for n in names if n in step.average.factors}
            if factors:
                u = utilisation(factors, self._adapt.energy)
                rule = literal if self._adapt.rule == "literal" else band
                after = rule(choice, u, c=self._adapt.window, first=self._first)
                if after.r != choice.r:
                    changes.append(
                        f"stage {stage}: lowrank {choice.r} -> {after.r}: {self._adapt.energy:.0%} of the "
                        f"energy of an average is in {u * choice.r:.0f} directions"
                    )
                choice = after
            self._choices[stage] = choice
        if h_before != self._H:
            why = f"a round takes {self._comm_s:.1f} s, an inner step {self._step_s:.2f} s"
            changes.append(f"H {h_before} -> {self._H}: {why}")
        return "; ".join(changes)


def build_adapting(
    spec: RunSpec, stage_of: Mapping[str, int], lowrank_names: Sequence[str]
) -> Adapting | None:
    """None if rank and H are pinned."""
    if spec.adapt.rule == "none":
        return None
    return Adapting(spec, {name: stage_of[name] for name in lowrank_names})
