"""One rank of a cluster that trains several families through outer steps and a resume.

python family_rank.py RANK NUM_RANKS DIRECTORY
"""

import datetime
import hashlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist

from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.checkpoint.resume import load_rank, newest
from p2p_dilocox.checkpoint.store import CheckpointStore
from p2p_dilocox.events import Checkpointed, Event
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.pipeline import Pipeline, build_chunks, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.placement import place
from p2p_dilocox.runspec import Model, RunSpec
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.trainer import Rank
from tests.unit.families import CPU, FAMILIES, TIED, sequences
from tests.unit.pipeline_rank import spec_of

STAGES, H, OUTER_STEPS = 3, 3, 2
OVER_RANKS = sorted({*TIED, "qwen3_moe"})
CUTS = dict(zip(OVER_RANKS, itertools.cycle([(1, 1, 1), (0, 3, 0), (0, 1, 2), (1, 2, 0)]), strict=False))
"""Layers of each stage: the embedding, the head or both may be a stage, and a rank, without a layer."""
SPEC_DIGEST = "5" * 64


class Cluster:
    """A cluster that is alone in its run, as one of its ranks holds it. directory: of its checkpoints."""

    def __init__(self, spec: RunSpec, rank: int, num_ranks: int, directory: Path) -> None:
        skeleton = read_skeleton(config_from_spec(spec.model))
        cuts = cut_layers(skeleton, STAGES, spec.model.cut)
        placement = place(spec.inner.schedule, STAGES, num_ranks)
        spans = build_chunks(skeleton, placement, rank, cuts, seed=spec.run.seed, device=CPU)
        self.pipeline = Pipeline(spec, spans, rank, num_ranks, CPU)
        self.inner = InnerOptimizer(self.pipeline.all_parameters, spec.inner, 100)
        self.outer = OuterState(spec, self.pipeline.parameters, frozenset(), "")
        self.rank = cast(Rank, SimpleNamespace(
            index=rank, pipeline=self.pipeline, inner=self.inner, outer=self.outer, local=None, t=1, h=0,
            unsent_tokens=0,
        ))  # fmt: skip
        self.checkpoints, self.events = directory / "checkpoints", list[Event]()
        self.store = CheckpointStore(
            self.checkpoints, run_id="run", spec_digest=SPEC_DIGEST, keep=1, inner_steps=H,
            key=SigningKey.generate(), kept=KeptRounds(directory / "rounds"), report=self.events.append,
        )  # fmt: skip

    def inner_steps(self, t: int) -> list[float]:
        losses = []
        for number in range(H * t, H * (t + 1)):
            self.pipeline.forward_backward(sequences(number, batch=8, padded=True))
            losses.append(self.pipeline.clip_().loss)
            self.inner.step(number)
        return losses

    def outer_step(self, t: int) -> None:
        self.outer.contribute(self.pipeline.parameters)
        average = Average(dense={name: r.clone() for name, r in self.outer.residual.items()})
        self.outer.commit(average, average)
        with self.outer.restart_(self.pipeline.parameters, 0.0):
            self.outer.step(average, t, ["alone"], "")
        self.pipeline.sync_tied_()
        self.rank.t = t + 1

    def save(self) -> None:
        self.store.save(self.rank)
        self.store.wait()
        assert [type(event) for event in self.events] == [Checkpointed] * (self.rank.index == 0)
        self.pipeline.barrier()

    def come_back(self) -> None:
        saved = newest(self.checkpoints, SPEC_DIGEST)
        assert saved is not None and load_rank(saved, self.rank)

    def tied_is_equal(self) -> bool:
        """Whether both ends hold the same bits; all ranks must ask."""
        spans = self.pipeline.spans
        ends = [span.tied_copy for span in spans if span.tied_copy is not None]
        ends += [p for name, p in self.pipeline.parameters.items() if name == spans[0].tied_name]
        digests = [hashlib.sha256(end.detach().numpy().tobytes()).hexdigest() for end in ends]
        everywhere = b" ".join(self.pipeline.gather(" ".join(digests).encode())).split()
        return len(everywhere) == min(2, self.pipeline.num_ranks) and len(set(everywhere)) == 1

    def digest(self) -> str:
        """Of parameters and anchor."""
        digest = hashlib.sha256(self.outer.digest(list(self.outer.anchor)).encode())
        for parameter in self.pipeline.all_parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def spec_of_family(family: str) -> RunSpec:
    spec = spec_of("llama", STAGES)
    return replace(spec, model=Model(config=FAMILIES[family], stages=STAGES, cut=CUTS[family]))


def train(family: str, rank: int, num_ranks: int, directory: Path) -> dict[str, object]:
    """Two outer steps, a checkpoint, and a third one twice: as if nothing had been, and resumed."""
    spec = spec_of_family(family)
    cluster = Cluster(spec, rank, num_ranks, directory)
    losses: list[float] = []
    equal = []
    for t in range(OUTER_STEPS):
        losses += cluster.inner_steps(t)
        equal.append(cluster.tied_is_equal())
        cluster.outer_step(t + 1)
        equal.append(cluster.tied_is_equal())
    cluster.save()
    again = Cluster(spec, rank, num_ranks, directory)
    again.come_back()
    assert (again.rank.t, again.digest()) == (OUTER_STEPS + 1, cluster.digest())
    equal.append(again.tied_is_equal())
    losses += cluster.inner_steps(OUTER_STEPS)
    assert again.inner_steps(OUTER_STEPS) == losses[-H:]
    for one in (cluster, again):
        one.outer_step(OUTER_STEPS + 1)
    equal.append(again.tied_is_equal())
    assert again.digest() == cluster.digest()
    return {"losses": losses, "equal": equal}


def main(rank: int, num_ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {family: train(family, rank, num_ranks, directory / family) for family in OVER_RANKS}
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
