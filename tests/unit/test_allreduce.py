"""Averaged gradients are data parallelism: one AdamW on the mean gradient, to the bit; nothing is lost."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2p_dilocox.data import Batches, load_tokens
from p2p_dilocox.inner import learning_rate
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.outer_step import adamw_
from p2p_dilocox.pipeline import Pipeline, build_span, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.settings import Inner, total_inner_steps
from p2p_dilocox.simulation import Place, Simulation
from tests.unit.ledger import SHAPES, TEXT, random_tensors

LOSSLESS = "[compression]\nbits = 64\nreturn_bits = 64\n"
RUN = """
[run]
id = "allreduce"
recipe = "allreduce"
outer_steps = 6
[model]
stages = 2
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
[data]
seq_len = 16
[inner]
H = {H}
batch_size = 2
microbatches = 2
lr = 1e-2
warmup_steps = 2
clip_norm = {clip}
[eval]
batches = 1
"""


def data_parallel(text: str, state: Path, ids: list[str]) -> dict[int, str]:
    """torch.optim.AdamW on the mean of the clusters' gradients; digests by stage."""
    spec, cpu = parse_run(text), torch.device("cpu")
    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    span = build_span(skeleton, 0, len(cuts) - 1, cuts, seed=spec.run.seed, device=cpu)
    pipeline = Pipeline(spec, [span], 0, 1, cpu)
    corpus, parameters, inner = load_tokens(spec, state), pipeline.parameters, spec.inner
    batches = [Batches(corpus, spec, i) for i in ids]
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=inner.betas, eps=inner.eps)
    for t in range(1, spec.run.outer_steps + 1):
        sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
        for of_cluster in batches:
            for h in range(inner.H):
                pipeline.forward_backward(of_cluster.batch(t, h))
                for name, p in parameters.items():
                    assert p.grad is not None
                    sums[name] += p.grad.double() / inner.H
        norm = sum(float((s / len(ids)).square().sum()) for s in sums.values()) ** 0.5
        for name, p in parameters.items():
            p.grad = (sums[name] / len(ids)).float() * min(1.0, inner.clip_norm / norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(inner, (t - 1) * inner.H, total_inner_steps(spec))
        adamw.step()
        pipeline.sync_tied_()
    outer = OuterState(spec, parameters, frozenset(), "")
    stages = sorted(set(pipeline.stage_of.values()))
    return {s: outer.digest([n for n in outer.anchor if pipeline.stage_of[n] == s]) for s in stages}


@pytest.mark.parametrize("H", [1, 2])
def test_two_clusters_that_average_gradients_are_one_that_has_both_batches(tmp_path: Path, H: int) -> None:
    """With the lossless codec, bit for bit; H is gradient accumulation."""
    text = RUN.format(H=H, clip=1000.0) + LOSSLESS
    spec, threads = parse_run(text), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        simulation = Simulation(spec, [Place(cluster_id=c) for c in "ab"], load_tokens(spec, tmp_path))
        simulation.run()
        expected = data_parallel(text, tmp_path, ["a", "b"])
    finally:
        torch.set_num_threads(threads)
    assert simulation.parameter_digests() == [expected, expected]


def test_it_is_the_average_that_is_clipped(tmp_path: Path) -> None:
    """A norm summed in another order: equal up to its last bits, and far from what is not clipped."""
    ends: list[dict[str, Tensor]] = []
    for clip in (0.1, 1000.0):
        spec = parse_run(RUN.format(H=1, clip=clip) + LOSSLESS)
        simulation = Simulation(spec, [Place(cluster_id=c) for c in "ab"], load_tokens(spec, tmp_path))
        simulation.run()
        ends.append(simulation.clusters[0].rank.outer.momentum)
    clipped, whole = (sum(float(v.square().sum()) for v in end.values()) ** 0.5 for end in ends)
    assert clipped <= 0.1 < whole


def test_the_outer_step_of_a_gradient_is_torch_adamw_to_the_bit() -> None:
    inner = Inner(H=1, batch_size=1, lr=1e-2)
    theta = random_tensors(0)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in theta.items()}
    reference = {n: p.clone().requires_grad_() for n, p in theta.items()}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * (p.dim() >= 2)} for p in reference.values()],
        lr=1e-2, betas=inner.betas, eps=inner.eps,
    )  # fmt: skip
    for t in range(1, 21):
        grads = random_tensors(t)
        for name, p in reference.items():
            p.grad = grads[name].clone()
            adamw_(theta[name], moments[name], grads[name], inner=inner, lr=1e-2, t=t)
        adamw.step()
        for name, p in reference.items():
            assert torch.equal(theta[name], p.detach())


def test_a_dropped_gradient_is_in_the_next_one_and_a_delivered_one_is_not() -> None:
    text = TEXT.format(
        mode="none", bits=64, lowrank=0, feedback="none", gamma=1.0, overlap="", schedule="", more=""
    )
    spec = parse_run(text.replace("nesterov = false", 'nesterov = false\naverage = "gradient"'))
    theta = random_tensors(0)
    outer = OuterState(spec, theta, frozenset(), "")
    grads = [random_tensors(n) for n in range(1, 4)]
    for n, grad in enumerate(grads):
        outer.add_gradients(grad, 1.0)
        outer.contribute(theta)
        if n == 1:  # the first was dropped
            own = Average(dense={name: r.clone() for name, r in outer.residual.items()})
            for name in SHAPES:
                torch.testing.assert_close(own.dense[name].float(), grads[0][name] + grads[1][name])
            outer.commit(own, own)
            with outer.restart_(theta, 0.0, carry=True):
                outer.step(own, 2, ["a"], "", lr=1e-2)
    for name in SHAPES:
        torch.testing.assert_close(outer.residual[name].float(), grads[2][name])
        assert torch.equal(theta[name], outer.anchor[name])
