"""What a run has to end with, found without a swarm."""

from pathlib import Path

import torch

from p2p_dilocox.data import Batches, load_tokens
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.pipeline import Pipeline, build_span, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.runspec import parse_run, total_inner_steps
from p2p_dilocox.simulation import Place, Simulation

__all__ = ["plain_training", "simulated_training"]


def plain_training(text: str, state: Path, cluster_id: str) -> dict[int, str]:
    """The same model on the same batches with AdamW and nothing else; digests of its parameters by stage."""
    spec = parse_run(text)
    torch.set_num_threads(1)  # as the peer's configuration says: more threads round differently
    cpu = torch.device("cpu")
    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    pipeline = Pipeline(
        spec, [build_span(skeleton, 0, len(cuts) - 1, cuts, seed=spec.run.seed, device=cpu)], 0, 1, cpu
    )
    inner = InnerOptimizer(pipeline.all_parameters, spec.inner, total_inner_steps(spec))
    batches = Batches(load_tokens(spec, state / "tokens"), spec, cluster_id)
    for t in range(1, spec.run.outer_steps + 1):
        for h in range(spec.inner.H):
            pipeline.forward_backward(batches.batch(t, h))
            pipeline.clip_()
            inner.step((t - 1) * spec.inner.H + h)
    outer = OuterState(spec, pipeline.parameters, frozenset(), "")
    stage_of = pipeline.stage_of
    return {
        s: outer.digest([n for n in outer.anchor if stage_of[n] == s]) for s in sorted(set(stage_of.values()))
    }


def simulated_training(text: str, state: Path, cluster_ids: list[str]) -> dict[int, str]:
    """The same run with its clusters simulated; digests of its parameters by stage."""
    spec = parse_run(text)
    corpus = load_tokens(spec, state / "tokens")
    simulation = Simulation(spec, [Place(cluster_id=c) for c in cluster_ids], corpus)
    simulation.run()
    return simulation.parameter_digests()[0]
