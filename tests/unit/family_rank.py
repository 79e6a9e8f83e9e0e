"""One rank of a cluster that trains several families through outer steps and a resume.

python family_rank.py RANK NUM_RANKS DIRECTORY
"""

import datetime
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.pipeline import Pipeline, build_chunks, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.placement import place
from p2p_dilocox.runspec import Model, RunSpec
from tests.unit.families import CPU, FAMILIES, TIED, sequences
from tests.unit.pipeline_rank import spec_of

STAGES, H, OUTER_STEPS = 3, 3, 2
OVER_RANKS = sorted({*TIED, "qwen3_moe"})


class Cluster:
    """A cluster that is alone in its run, as one of its ranks holds it."""

    def __init__(self, spec: RunSpec, rank: int, num_ranks: int) -> None:
        skeleton = read_skeleton(config_from_spec(spec.model))
        cuts, placement = cut_layers(skeleton, STAGES), place(spec.inner.schedule, STAGES, num_ranks)
        spans = build_chunks(skeleton, placement, rank, cuts, seed=spec.run.seed, device=CPU)
        self.pipeline = Pipeline(spec, spans, rank, num_ranks, CPU)
        self.inner = InnerOptimizer(self.pipeline.all_parameters, spec.inner, 100)
        self.outer = OuterState(spec, self.pipeline.parameters, spans[0].embedding_names, "")

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

    def come_back(self, before: "Cluster") -> None:
        """Its parameters and AdamW's moments, as a checkpoint has them: of a tied copy the moments only."""
        with torch.no_grad():
            for name, parameter in self.pipeline.parameters.items():
                parameter.copy_(before.pipeline.parameters[name])
        self.inner.load_state({name: value.clone() for name, value in before.inner.state().items()})
        self.pipeline.sync_tied_()

    def tied_is_equal(self) -> bool:
        """Whether both ends hold the same bits; all ranks must ask."""
        spans = self.pipeline.spans
        ends = [span.tied_copy for span in spans if span.tied_copy is not None]
        ends += [p for name, p in self.pipeline.parameters.items() if name == spans[0].tied_name]
        digests = [hashlib.sha256(end.detach().numpy().tobytes()).hexdigest() for end in ends]
        everywhere = b" ".join(self.pipeline.gather(" ".join(digests).encode())).split()
        return len(everywhere) == min(2, self.pipeline.num_ranks) and len(set(everywhere)) == 1

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.pipeline.all_parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def spec_of_family(family: str) -> RunSpec:
    spec = spec_of("llama", STAGES)
    return replace(spec, model=Model(config=FAMILIES[family], stages=STAGES))


def train(family: str, rank: int, num_ranks: int) -> dict[str, object]:
    spec = spec_of_family(family)
    cluster = Cluster(spec, rank, num_ranks)
    losses: list[float] = []
    equal = []
    for t in range(OUTER_STEPS):
        losses += cluster.inner_steps(t)
        equal.append(cluster.tied_is_equal())
        cluster.outer_step(t + 1)
        equal.append(cluster.tied_is_equal())
    again = Cluster(spec, rank, num_ranks)
    again.come_back(cluster)
    equal.append(again.tied_is_equal())
    losses += cluster.inner_steps(OUTER_STEPS)
    assert again.inner_steps(OUTER_STEPS) == losses[-H:]
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
    results = {family: train(family, rank, num_ranks) for family in OVER_RANKS}
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
