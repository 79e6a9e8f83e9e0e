"""A rank that has something to save, without model, network or swarm: its tensors know their outer step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.checkpoint.store import CheckpointStore
from p2p_dilocox.events import Event
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.trainer import Rank
from p2p_dilocox.wish import Wish

from .proofs import RUN, keep_rounds

SPEC = parse_run("""
[run]
id = "run"
outer_steps = 1000
[model]
stages = 2
[model.config]
model_type = "llama"
[inner]
H = 10
batch_size = 4
microbatches = 2
lr = 1e-3
[compression]
lowrank = 2
""")
H, SPEC_DIGEST, START = SPEC.inner.H, "5" * 64, "a" * 64


def shapes_of(side: int) -> dict[str, tuple[int, ...]]:
    return {"a.weight": (side, side), "a.bias": (side,), "b.weight": (side, 2 * side)}


class Saver:
    """One cluster of one process and two stages in STATE; `at(t)` moves all of it to outer step t."""

    def __init__(self, state: Path, side: int = 24, keep: int = 2) -> None:
        state.mkdir(exist_ok=True)
        self.checkpoints, self.events = state / "checkpoints", list[Event]()
        self.parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes_of(side).items()}
        pipeline = SimpleNamespace(
            parameters=self.parameters, stage_of={"a.weight": 0, "a.bias": 0, "b.weight": 1}, num_ranks=1,
            sync_tied_=lambda: None,
        )  # fmt: skip
        self.kept, self.key = KeptRounds(state / "rounds"), SigningKey.load_or_create(state / "cluster.key")
        self.outer = OuterState(SPEC, self.parameters, frozenset(), START)
        self.store = CheckpointStore(
            self.checkpoints, run_id=RUN, spec_digest=SPEC_DIGEST, keep=keep, inner_steps=H, key=self.key,
            kept=self.kept, report=self.events.append,
        )  # fmt: skip
        self.rank = Rank(
            index=0, cluster_id=self.key.cluster_id, pipeline=cast(Any, pipeline), outer=self.outer,
            inner=InnerOptimizer(self.parameters.values(), SPEC.inner, 1000), progress=Progress(),
            rounds=cast(Any, None), batches=cast(Any, None), history=cast(Any, None), checkpoints=self.store,
            wish=Wish(), report=self.events.append,
        )  # fmt: skip

    def at(self, t: int, h: int = 0, *, proven: bool = True) -> None:
        """Every tensor gets values that belong to (t, h) only."""
        generator = torch.Generator().manual_seed(1000 * t + h)
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.rank.inner.step((t - 1) * H + h)
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        if proven and t > self.outer.t:
            self.outer.lineage = keep_rounds(self.kept, [self.key], self.outer.lineage, self.outer.t + 1, t)
            self.outer.members = [self.key.cluster_id]
        self.outer.t, self.rank.t, self.rank.h, self.rank.unsent_tokens = t, t + 1, h, 100 * t + h

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {f"theta/{n}": p for n, p in self.parameters.items()}
        for part in ("anchor", "momentum", "undelivered", "counted", "basis"):
            found |= {f"{part}/{n}": t for n, t in getattr(self.outer, part).items()}
        return found

    def everything(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in {**self.tensors(), **self.rank.inner.state()}.items()}

    def save(self) -> None:
        self.store.save(self.rank)
        self.store.wait()
