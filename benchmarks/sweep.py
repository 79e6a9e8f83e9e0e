"""What a byte buys: error and validation loss of ways to code a pseudo-gradient, on two small models.

    python benchmarks/sweep.py [--json] [--only TEXT ...] [--processes 2]

Four clusters in one process train on the embedded text with the project's own parts: Pipeline,
InnerOptimizer, OuterState, CodedStage, the codec. They start where START inner steps of one cluster have
brought the model. A round is what averaging/butterfly.py does without its sockets: each piece of a
contribution is coded, the decoded pieces are averaged, the average is coded once, and the reducer of a piece
keeps what that lost. An average is applied ARRIVES inner steps into the next outer step.

Bytes: what a cluster encodes, both ways, without headers. Error: distance of the decoded average from the
exact one, over the norm of that, mean over a run's outer steps; the same pseudo-gradients for every setting,
without error feedback; "matrices" leaves out embeddings and vectors. Loss: of the
last anchor on the held-out text, nats per token, in a run with the setting's own feedback. Everything is
seeded; the last digits depend on the machine.
"""

import argparse
import copy
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from p2p_dilocox.averaging.coded import CodedStage, StageLayouts, chunk_ranges
from p2p_dilocox.compression import Layout, Phase, initial_basis, round_trip
from p2p_dilocox.data import Batches, Corpus, load_tokens
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.pipeline import Pipeline, build_span, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.recipe import OVERLAP_DEFAULTS, default_gamma, recipes
from p2p_dilocox.settings import Adapt, Compression, Data, Eval, Inner, Local, Model, Run, RunSpec, Schedule

CLUSTERS = 4
START = 400  # inner steps before the clusters start
STEPS = 192  # inner steps of each cluster
H = 16
ARRIVES = 4  # of H inner steps
CPU = torch.device("cpu")
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. reducer: its error buffer takes what the coded average lost. trains: or errors only."""

    name: str
    compression: Compression
    H: int = H
    reducer: bool = True
    trains: bool = True


def coded(name: str, *, H: int = H, reducer: bool = True, trains: bool = True, **changes: Any) -> Setting:
    """dilocox-dense in 4 bits, changed. return_bits and strong_bits are `bits` unless given; feedback is that
    of dilocox with a low rank, of dilocox-dense without."""
    bits, lowrank = changes.get("bits", 4), changes.get("lowrank", 0)
    feedback = changes.get("feedback", "parameters" if lowrank else "local")
    follows: dict[str, Any] = {
        "return_bits": bits, "strong_bits": bits, "feedback": feedback,
        "gamma": default_gamma(feedback, lowrank),
    }  # fmt: skip
    wanted: dict[str, Any] = {"bits": 4, "group": 64} | follows | changes
    base = recipes()["dilocox-dense"].compression
    return Setting(name, replace(base, **wanted), H, reducer, trains)


EIGHTH: dict[str, Any] = {"strong_bits": 8, "strong_fraction": 0.125}
WHOLE: dict[str, Any] = {"factor_embeddings": False}
SETTINGS = [
    coded("float32", bits=32, feedback="none"),
    coded("int2", bits=2),
    coded("int4"),
    coded("r24 int4", lowrank=24),
    coded("r48 int4", lowrank=48),
    coded("r24 int4, 8 for an eighth", lowrank=24, **EIGHTH),
    coded("r48 int4, 8 for an eighth", lowrank=48, **EIGHTH),
    coded("r24 int4, embeddings whole", lowrank=24, **WHOLE),
    coded("r48 int4, 8 for an eighth, embeddings whole", lowrank=48, **EIGHTH, **WHOLE),
    coded("r96 int4, 8 for an eighth", lowrank=96, **EIGHTH),
    coded("r24 int8", lowrank=24, bits=8),
    coded("int3", bits=3),
    coded("r48 int3, 8 for an eighth", lowrank=48, bits=3, **EIGHTH),
    coded("r48 int2, 4 for a quarter", lowrank=48, bits=2, strong_bits=4, strong_fraction=0.25),
    coded("int2, 4 back", bits=2, return_bits=4),
    coded("int4, H 32", H=32),
    coded("r24 int4, H 8", lowrank=24, H=8),
    coded("int2, reducer forgets", bits=2, reducer=False),
    coded("r24 int4, reducer forgets", lowrank=24, reducer=False),
    coded("r24 int4, feedback local", lowrank=24, feedback="local"),
    coded("r24 int4, feedback local, gamma 1", lowrank=24, feedback="local", gamma=1.0),
    coded("r24 int4, feedback none", lowrank=24, feedback="none"),
    coded("r24 int4, feedback paper", lowrank=24, feedback="paper"),
    coded("int4, group 32", group=32, trains=False),
    coded("int4, group 128", group=128, trains=False),
    coded("int4, 8 back", return_bits=8, trains=False),
    coded("int8", bits=8, trains=False),
    coded("r48 float32", lowrank=48, bits=32, trains=False),
    coded("r48 int8", lowrank=48, bits=8, trains=False),
    coded("r48 int4, group 32", lowrank=48, group=32, trains=False),
    coded("r48 int4, group 128", lowrank=48, group=128, trains=False),
    coded("r48 int4, 8 back", lowrank=48, return_bits=8, trains=False),
    coded("r48 int4, 8 for a sixteenth", lowrank=48, strong_bits=8, strong_fraction=0.0625, trains=False),
    coded("r48 int4, 8 for a quarter", lowrank=48, strong_bits=8, strong_fraction=0.25, trains=False),
    coded("r48 int4, 8 for a half", lowrank=48, strong_bits=8, strong_fraction=0.5, trains=False),
    coded("r72 int4", lowrank=72, trains=False),
    coded("r72 int4, 8 for an eighth", lowrank=72, **EIGHTH, trains=False),
]
"""r48 is a quarter of the width, as the paper's 2048 of 8192; r24 an eighth."""


def spec_of(model: str, setting: Setting) -> RunSpec:
    overlap, outer = OVERLAP_DEFAULTS["arrival"]
    return RunSpec(
        run=Run(id="sweep", outer_steps=STEPS // setting.H),
        model=Model(config=MODELS[model]),
        data=Data(seq_len=64),
        inner=Inner(H=setting.H, batch_size=4, lr=3e-3, warmup_steps=32),
        outer=outer,
        local=Local(),
        adapt=Adapt(),
        schedule=Schedule(),
        overlap=overlap,
        compression=setting.compression,
        eval=Eval(batches=32),
    )


@dataclass
class Cluster:
    pipeline: Pipeline
    inner: InnerOptimizer
    outer: OuterState
    batches: Batches

    @classmethod
    def fresh(cls, spec: RunSpec, corpus: Corpus, name: str) -> "Cluster":
        skeleton = read_skeleton(config_from_spec(spec.model))
        span = build_span(skeleton, 0, 0, cut_layers(skeleton, 1, ()), seed=spec.run.seed, device=CPU)
        pipeline = Pipeline(spec, [span], 0, 1, CPU)
        inner = InnerOptimizer(pipeline.all_parameters, spec.inner, START + STEPS)
        return cls(pipeline, inner, outer_state(spec, pipeline), Batches(corpus, spec, name))

    @classmethod
    def load(cls, spec: RunSpec, corpus: Corpus, name: str, file: Path) -> "Cluster":
        cluster, state = cls.fresh(spec, corpus, name), load_file(file)
        with torch.no_grad():
            for key, parameter in cluster.pipeline.parameters.items():
                parameter.copy_(state.pop(f"parameter/{key}"))
        cluster.inner.load_state(state)
        cluster.outer = outer_state(spec, cluster.pipeline)
        return cluster

    def save(self, file: Path) -> None:
        parameters = {f"parameter/{key}": value.detach() for key, value in self.pipeline.parameters.items()}
        save_file(self.inner.state() | parameters, file)

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


def averaged(
    layout: Layout, phase: Phase, vectors: list[Tensor], *, reducer: bool
) -> tuple[Tensor, list[Tensor]]:
    """(the average, what of each contribution needs no feedback), as a butterfly with equal weights."""
    average = torch.empty_like(vectors[0])
    own = [torch.empty_like(vector) for vector in vectors]
    for member, part in enumerate(chunk_ranges(layout, phase, [1.0] * len(vectors))):
        for start, end, bits, return_bits, *_ in part:
            for mine, vector in zip(own, vectors, strict=True):
                mine[start:end] = round_trip(vector[start:end], bits, layout.group)
            exact = torch.stack([mine[start:end] for mine in own]).mean(0)
            average[start:end] = round_trip(exact, return_bits, layout.group)
            if reducer:
                own[member][start:end] -= (exact - average[start:end]) * len(vectors)
    return average, own


def averaging_round(
    layout: Layout, outers: list[OuterState], *, reducer: bool
) -> tuple[Average, list[Average]]:
    """Both phases of the pseudo-gradients in `outers`: the average, and what all decode of each."""
    stages = [CodedStage(outer, layout) for outer in outers]
    p, own_p = averaged(layout, "p", [stage.vector_p() for stage in stages], reducer=reducer)
    q, own_q = averaged(layout, "q", [stage.vector_q(p) for stage in stages], reducer=reducer)
    owns = [stage.decode(a, b) for stage, a, b in zip(stages, own_p, own_q, strict=True)]
    return stages[0].decode(p, q), owns


class Probe:
    """The errors of one setting on pseudo-gradients that are given; its basis follows its own averages."""

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
        average, _ = averaging_round(self.layout, self.outers, reducer=False)
        exact = {name: torch.stack([d[name] for d in deltas]).double().mean(0) for name in deltas[0]}
        wanted = self._squares(exact)
        average.add_to_(exact, -1.0)
        pairs = zip(self._squares(exact), wanted, strict=True)
        matrices, everything = ((missed / all_) ** 0.5 for missed, all_ in pairs)
        self.errors.append((matrices, everything))
        self.basis.update({name: q for name, (_, q) in average.factors.items()})

    def _squares(self, tensors: dict[str, Tensor]) -> tuple[float, float]:
        squares = {name: float(tensor.square().sum()) for name, tensor in tensors.items()}
        return sum(squares[name] for name in self.matrices), sum(squares.values())


def train(
    model: str, setting: Setting, corpus: Corpus, start: Path, probed: Iterable[Setting] = ()
) -> dict[str, Any]:
    """One run. probed: settings whose error is measured on this run's pseudo-gradients."""
    spec = spec_of(model, setting)
    clusters = [Cluster.load(spec, corpus, str(number), start) for number in range(CLUSTERS)]
    outers = [cluster.outer for cluster in clusters]
    embeddings = clusters[0].pipeline.spans[0].embedding_names
    dense_names = setting.compression.never_factored(embeddings)
    layout = StageLayouts(outers[0], list(outers[0].anchor), dense_names, 1).at(1)
    probes = {s.name: Probe(spec_of(model, s), outers[0], embeddings) for s in probed}
    pending: tuple[Average, list[Average]] | None = None

    def land(t: int) -> None:
        assert pending is not None
        for cluster, own in zip(clusters, pending[1], strict=True):
            cluster.land(t, pending[0], own, spec.overlap.keep)

    for t in range(1, spec.run.outer_steps + 1):
        for h in range(spec.inner.H):
            for cluster in clusters:
                cluster.inner_step(START + (t - 1) * spec.inner.H + h)
            if pending and h + 1 == spec.inner.H * ARRIVES // H:
                land(t - 1)
        for cluster in clusters:
            cluster.outer.contribute(cluster.pipeline.parameters)
        for probe in probes.values():
            probe.measure([outer.undelivered for outer in outers])
        pending = averaging_round(layout, outers, reducer=setting.reducer)
    land(spec.run.outer_steps)
    first = clusters[0]
    with torch.no_grad():
        for name, parameter in first.pipeline.parameters.items():
            parameter.copy_(first.outer.anchor[name])
    loss = first.pipeline.evaluate(first.batches.valid_batches(spec.eval.batches))
    errors = {
        name: [sum(errors) / len(probe.errors) for errors in zip(*probe.errors, strict=True)]
        for name, probe in probes.items()
    }
    return {
        "loss": loss,
        "errors": errors,
        "bytes": {name: probe.num_bytes for name, probe in probes.items()},
    }


def job(model: str, setting: Setting, directory: Path, probed: list[Setting]) -> dict[str, Any]:
    torch.set_num_threads(1)
    corpus = load_tokens(spec_of(model, setting), directory)
    return train(model, setting, corpus, directory / f"{model}.safetensors", probed)


def start(model: str, directory: Path) -> None:
    """The model that all runs start from, and its AdamW moments."""
    torch.set_num_threads(1)
    spec = spec_of(model, SETTINGS[0])
    cluster = Cluster.fresh(spec, load_tokens(spec, directory), "start")
    for number in range(START):
        cluster.inner_step(number)
    cluster.save(directory / f"{model}.safetensors")


def rows(settings: list[Setting], processes: int) -> Iterator[dict[str, Any]]:
    """One per setting, in their order."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        load_tokens(spec_of("llama", SETTINGS[0]), directory)
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            list(pool.map(start, MODELS, [directory] * len(MODELS)))
            reference = {m: pool.submit(job, m, SETTINGS[0], directory, settings) for m in MODELS}
            runs = {
                s.name: {m: pool.submit(job, m, s, directory, []) for m in MODELS}
                for s in settings
                if s.trains
            }
            for setting in settings:
                name, probed = setting.name, {m: future.result() for m, future in reference.items()}
                losses = {m: future.result()["loss"] for m, future in runs.get(name, {}).items()}
                yield {
                    "name": name, "H": setting.H, "reducer": setting.reducer,
                    **asdict(setting.compression),
                    "bytes": {m: r["bytes"][name] for m, r in probed.items()},
                    "error_of_matrices": {m: r["errors"][name][0] for m, r in probed.items()},
                    "error": {m: r["errors"][name][1] for m, r in probed.items()},
                    "loss": losses or None,
                }  # fmt: skip


def table(row: dict[str, Any]) -> str:
    """One line: the setting, then a column per model."""
    kilobytes = "".join(f"{value * H / row['H'] / 1000:7.0f}" for value in row["bytes"].values())
    errors = "".join(f"{value:7.3f}" for key in ("error_of_matrices", "error") for value in row[key].values())
    losses = "".join(f"{value:8.4f}" for value in (row["loss"] or {}).values())
    return f"{row['name']:32}{row['H']:4}{kilobytes}{errors}{losses}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="settings whose name contains one of these")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    wanted = [s for s in SETTINGS if not arguments.only or any(text in s.name for text in arguments.only)]
    if not wanted:
        parser.error(f"no setting has one of {arguments.only} in its name: {[s.name for s in SETTINGS]}")
    started, found = time.monotonic(), []
    if not arguments.json:
        print(f"{'':36}{'KB per 16 steps':^14}{'error, matrices':^14}{'error, all':^14}{'loss':^16}")
        print(f"{'setting':32}{'H':>4}" + "".join(f"{model:>7}" for model in MODELS) * 3 + "   llama    gpt2")
    for row in rows(wanted, arguments.processes):
        found.append(row)
        if not arguments.json:
            print(table(row), flush=True)
    if arguments.json:
        record = {
            "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "clusters": CLUSTERS, "start": START, "steps": STEPS, "arrives": ARRIVES / H,
            "seconds": round(time.monotonic() - started), "rows": found,
        }  # fmt: skip
        sys.stdout.write(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
