"""How far a coded average is from the exact one: ways to code a pseudo-gradient, on two small models.

    python -m benchmarks.coding_errors [--json] [--only TEXT ...]

Four clusters in one process train on the embedded text with the project's own parts: Pipeline,
InnerOptimizer, OuterState, CodedStage, the codec. They start where START inner steps of one cluster have
brought the model, and average in 32 bits. Each of their pseudo-gradients is coded in every way beside that,
without error feedback: each piece of a contribution is coded, the decoded pieces are averaged, the average is
coded once, as averaging/butterfly.py does without its sockets. A basis follows its own averages.

Bytes: what a cluster encodes, both ways, without headers. Error: distance of the decoded average from the
exact one, over the norm of that, mean over the outer steps; "matrices" leaves out embeddings and vectors.
Losses over bytes: benchmarks/studies/sweep.toml. Everything is seeded; the last digits depend on the machine.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2p_dilocox.averaging.coded import CodedStage, StageLayouts, chunk_ranges
from p2p_dilocox.compression import Layout, Phase, initial_basis, round_trip
from p2p_dilocox.data import Batches, Corpus, load_tokens
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.pipeline import Pipeline
from p2p_dilocox.recipe import OVERLAP_DEFAULTS, recipes
from p2p_dilocox.settings import Adapt, Compression, Data, Eval, Inner, Local, Model, Run, RunSpec, Schedule
from p2p_dilocox.simulation.start import load_start, whole_model

CLUSTERS = 4
START = 400  # inner steps before the clusters start
STEPS = 192  # inner steps of each cluster
H = 16
ARRIVES = 4  # inner steps into the next outer step
WIDTH = 192
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "vocab_size": 2048, "hidden_size": WIDTH, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 2048, "n_embd": WIDTH, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "bos_token_id": 0, "eos_token_id": 0,
    },
}  # fmt: skip


def coding(**changes: Any) -> Compression:
    """dilocox-dense in 4 bits, changed. return_bits and strong_bits are `bits` unless given."""
    bits = changes.get("bits", 4)
    wanted: dict[str, Any] = {"bits": 4, "group": 64, "return_bits": bits, "strong_bits": bits} | changes
    return replace(recipes()["dilocox-dense"].compression, **wanted)


EIGHTH: dict[str, Any] = {"strong_bits": 8, "strong_fraction": 0.125}
CODINGS = {
    "int2": coding(bits=2),
    "int2, 4 back": coding(bits=2, return_bits=4),
    "int3": coding(bits=3),
    "int4": coding(),
    "int4, group 32": coding(group=32),
    "int4, group 128": coding(group=128),
    "int4, 8 back": coding(return_bits=8),
    "int8": coding(bits=8),
    "r24 int4": coding(lowrank=24),
    "r24 int4, 8 for an eighth": coding(lowrank=24, **EIGHTH),
    "r24 int8": coding(lowrank=24, bits=8),
    "r48 int2, 4 for a quarter": coding(lowrank=48, bits=2, strong_bits=4, strong_fraction=0.25),
    "r48 int3, 8 for an eighth": coding(lowrank=48, bits=3, **EIGHTH),
    "r48 int4": coding(lowrank=48),
    "r48 int4, group 32": coding(lowrank=48, group=32),
    "r48 int4, group 128": coding(lowrank=48, group=128),
    "r48 int4, 8 back": coding(lowrank=48, return_bits=8),
    "r48 int4, 8 for a sixteenth": coding(lowrank=48, strong_bits=8, strong_fraction=0.0625),
    "r48 int4, 8 for an eighth": coding(lowrank=48, **EIGHTH),
    "r48 int4, 8 for a quarter": coding(lowrank=48, strong_bits=8, strong_fraction=0.25),
    "r48 int4, 8 for a half": coding(lowrank=48, strong_bits=8, strong_fraction=0.5),
    "r48 int4, 8 for an eighth, embeddings whole": coding(lowrank=48, **EIGHTH, factor_embeddings=False),
    "r48 int8": coding(lowrank=48, bits=8),
    "r48 float32": coding(lowrank=48, bits=32),
    "r72 int4": coding(lowrank=72),
    "r72 int4, 8 for an eighth": coding(lowrank=72, **EIGHTH),
    "r96 int4, 8 for an eighth": coding(lowrank=96, **EIGHTH),
}
"""r48 is a quarter of the width, as the paper's 2048 of 8192; r24 an eighth."""


def spec_of(model: str, compression: Compression) -> RunSpec:
    overlap, outer = OVERLAP_DEFAULTS["arrival"]
    return RunSpec(
        run=Run(id="errors", outer_steps=STEPS // H),
        model=Model(config=MODELS[model]),
        data=Data(seq_len=64),
        inner=Inner(H=H, batch_size=4, lr=3e-3, warmup_steps=32),
        outer=outer,
        local=Local(),
        adapt=Adapt(),
        schedule=Schedule(),
        overlap=overlap,
        compression=compression,
        eval=Eval(),
    )


@dataclass
class Cluster:
    pipeline: Pipeline
    inner: InnerOptimizer
    outer: OuterState
    batches: Batches

    @classmethod
    def fresh(cls, spec: RunSpec, corpus: Corpus, name: str) -> "Cluster":
        pipeline, _, _ = whole_model(spec)
        inner = InnerOptimizer(pipeline.all_parameters, spec.inner, START + STEPS)
        return cls(pipeline, inner, outer_state(spec, pipeline), Batches(corpus, spec, name))

    @classmethod
    def like(cls, other: "Cluster", spec: RunSpec, corpus: Corpus, name: str) -> "Cluster":
        """Where another is, with data of its own."""
        cluster = cls.fresh(spec, corpus, name)
        load_start(other.pipeline.parameters, cluster.pipeline)
        cluster.inner.load_state({key: value.clone() for key, value in other.inner.state().items()})
        cluster.outer = outer_state(spec, cluster.pipeline)
        return cluster

    def inner_step(self, number: int) -> None:
        self.pipeline.forward_backward(self.batches.batch(1, number))
        self.pipeline.clip_()
        self.inner.step(number)

    def land(self, t: int, average: Average, own: Average, keep: float) -> None:
        """As trainer.land."""
        self.outer.commit(average, own)
        with self.outer.restart_(self.pipeline.parameters, keep):
            self.outer.step(average, t, [], "")


def outer_state(spec: RunSpec, pipeline: Pipeline) -> OuterState:
    dense = spec.compression.never_factored(pipeline.spans[0].embedding_names)
    return OuterState(spec, pipeline.parameters, dense, "")


def averaged(layout: Layout, phase: Phase, vectors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(the average, what all decode of each contribution), as a butterfly with equal weights."""
    average = torch.empty_like(vectors[0])
    own = [torch.empty_like(vector) for vector in vectors]
    for part in chunk_ranges(layout, phase, [1.0] * len(vectors)):
        for start, end, bits, return_bits, *_ in part:
            for mine, vector in zip(own, vectors, strict=True):
                mine[start:end] = round_trip(vector[start:end], bits, layout.group)
            exact = torch.stack([mine[start:end] for mine in own]).mean(0)
            average[start:end] = round_trip(exact, return_bits, layout.group)
    return average, own


def averaging_round(layout: Layout, outers: list[OuterState]) -> tuple[Average, list[Average]]:
    """Both phases of the pseudo-gradients in `outers`: the average, and what all decode of each."""
    stages = [CodedStage(outer, layout) for outer in outers]
    p, own_p = averaged(layout, "p", [stage.vector_p() for stage in stages])
    q, own_q = averaged(layout, "q", [stage.vector_q(p) for stage in stages])
    owns = [stage.decode(a, b) for stage, a, b in zip(stages, own_p, own_q, strict=True)]
    return stages[0].decode(p, q), owns


class Probe:
    """The errors of one coding on pseudo-gradients that are given; its basis follows its own averages."""

    def __init__(self, spec: RunSpec, outer: OuterState, embeddings: frozenset[str]) -> None:
        self.layout = Layout({n: tuple(a.shape) for n, a in outer.anchor.items()}, spec.compression,
                             dense_names=spec.compression.never_factored(embeddings))  # fmt: skip
        self.matrices = {n for n, a in outer.anchor.items() if a.dim() > 1 and n not in embeddings}
        r, seed = spec.compression.lowrank, spec.run.seed
        self.basis = {n: initial_basis(n, outer.anchor[n].shape, r, seed) for n in self.layout.lowrank_names}
        self.outers = [copy.copy(outer) for _ in range(CLUSTERS)]
        self.errors: list[tuple[float, float]] = []  # of the matrices, of everything
        self.num_bytes = sum(self.layout.coded_bytes())

    def measure(self, deltas: list[dict[str, Tensor]]) -> None:
        for outer, delta in zip(self.outers, deltas, strict=True):
            outer.basis, outer.undelivered, outer.residual = self.basis, delta, delta
        average, _ = averaging_round(self.layout, self.outers)
        exact = {name: torch.stack([d[name] for d in deltas]).double().mean(0) for name in deltas[0]}
        wanted = self._squares(exact)
        average.add_to_(exact, -1.0)
        pairs = zip(self._squares(exact), wanted, strict=True)
        matrices, everything = ((missed / all_) ** 0.5 for missed, all_ in pairs)
        self.errors.append((matrices, everything))
        self.basis.update({name: q for name, (_, q) in average.factors.items()})

    def result(self) -> tuple[int, float, float]:
        """Bytes and mean errors, of the matrices and of everything."""
        matrices, everything = (statistics.fmean(errors) for errors in zip(*self.errors, strict=True))
        return self.num_bytes, matrices, everything

    def _squares(self, tensors: dict[str, Tensor]) -> tuple[float, float]:
        squares = {name: float(tensor.square().sum()) for name, tensor in tensors.items()}
        return sum(squares[name] for name in self.matrices), sum(squares.values())


def measure(model: str, codings: Mapping[str, Compression]) -> dict[str, tuple[int, float, float]]:
    """By name of a coding its bytes and errors, of the matrices and of everything, on one run of a model."""
    torch.set_num_threads(1)
    exact = spec_of(model, coding(bits=32, feedback="none"))
    with tempfile.TemporaryDirectory() as temporary:
        corpus = load_tokens(exact, Path(temporary))
    first = Cluster.fresh(exact, corpus, "start")
    for number in range(START):
        first.inner_step(number)
    clusters = [Cluster.like(first, exact, corpus, str(number)) for number in range(CLUSTERS)]
    outers = [cluster.outer for cluster in clusters]
    embeddings = clusters[0].pipeline.spans[0].embedding_names
    layout = StageLayouts(outers[0], list(outers[0].anchor), frozenset(), 1).at(1)
    probes = {name: Probe(spec_of(model, c), outers[0], embeddings) for name, c in codings.items()}
    pending: tuple[Average, list[Average]] | None = None
    for t in range(1, exact.run.outer_steps + 1):
        for h in range(H):
            for cluster in clusters:
                cluster.inner_step(START + (t - 1) * H + h)
            if pending and h + 1 == ARRIVES:
                for cluster, own in zip(clusters, pending[1], strict=True):
                    cluster.land(t - 1, pending[0], own, exact.overlap.keep)
        for cluster in clusters:
            cluster.outer.contribute(cluster.pipeline.parameters)
        for probe in probes.values():
            probe.measure([outer.undelivered for outer in outers])
        pending = averaging_round(layout, outers)
    return {name: probe.result() for name, probe in probes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="codings whose name contains one of these")
    arguments = parser.parse_args()
    wanted = {name: c for name, c in CODINGS.items() if any(text in name for text in arguments.only or [""])}
    if not wanted:
        parser.error(f"no coding has one of {arguments.only} in its name: {', '.join(CODINGS)}")
    started = time.monotonic()
    with ProcessPoolExecutor(len(MODELS), get_context("spawn")) as pool:
        found = dict(zip(MODELS, pool.map(measure, MODELS, [wanted] * len(MODELS)), strict=True))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            **{
                key: {m: found[m][name][index] for m in MODELS}
                for index, key in enumerate(("bytes", "error_of_matrices", "error"))
            },
        }
        for name in wanted
    ]  # fmt: skip
    if arguments.json:
        record = {
            "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "clusters": CLUSTERS, "start": START, "steps": STEPS, "H": H,
            "seconds": round(time.monotonic() - started), "rows": rows,
        }  # fmt: skip
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return
    print(f"{'coding':44}{'kB':^14}{'error, matrices':^16}{'error, all':^14}")
    print(f"{'':44}" + "".join(f"{model:>7}" for model in MODELS) * 3)
    for row in rows:
        kilobytes = "".join(f"{value / 1000:7.0f}" for value in row["bytes"].values())
        errors = "".join(f"{e:7.3f}" for key in ("error_of_matrices", "error") for e in row[key].values())
        print(f"{row['name']:44}{kilobytes}{errors}")


if __name__ == "__main__":
    main()
