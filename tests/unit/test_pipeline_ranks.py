"""A cut model, in real processes over gloo, against the same model in one piece."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from p2p_dilocox.pipeline import config_from_spec
from p2p_dilocox.pipeline.schedule import TokenLoss
from tests.unit.pipeline_rank import (
    CLIP_NORM,
    CPU,
    LR,
    MODELS,
    batch_of,
    name_of,
    pipeline_of,
    spec_of,
    train,
)

STEPS, STEPS_TIED, STEPS_LONG = 5, 20, 100
DEADLINE_S = 200
pytestmark = pytest.mark.timeout(240)  # the first test starts six processes
DEEP = "llama-5-tied"


def steps_of(model: str) -> int:
    return STEPS_TIED if model in ("llama-tied", "gpt2-tied") else STEPS


def case_of(
    model: str, stages: int, schedule: str, *, microbatches: int = 4, precision: str = "fp32"
) -> dict[str, object]:
    return {
        "model": model, "stages": stages, "schedule": schedule, "microbatches": microbatches,
        "precision": precision, "steps": steps_of(model),
    }  # fmt: skip


HALF = case_of("llama", 2, "1f1b", precision="bf16")
LONG = case_of(DEEP, 4, "1f1b", microbatches=8) | {"steps": STEPS_LONG}
SHALLOW = [model for model in MODELS if model != DEEP]
LAUNCHES = {
    2: [
        *(case_of(model, stages, "1f1b") for model in (*SHALLOW, "everything") for stages in (2, 3)),
        *(case_of(model, 2, "gpipe") for model in SHALLOW),
        case_of(DEEP, 4, "interleaved-1f1b"),
        case_of(DEEP, 5, "interleaved-zero-bubble"),  # a chunk of two stages at rank 1
        case_of(DEEP, 5, "zbv"),  # both ends at rank 0, with two stages in the last chunk
        case_of(DEEP, 4, "zbv", microbatches=1),
        case_of("everything", 4, "zbv"),
        HALF,
    ],
    4: [  # of most models: they have three layers, so embedding or head is a rank without one
        *(case_of(model, 4, schedule) for model in SHALLOW for schedule in ("1f1b", "gpipe")),
        # Fewer microbatches than ranks: field report G2.
        case_of("llama-tied", 4, "interleaved-zero-bubble", microbatches=2),
        case_of("gpt2", 4, "interleaved-1f1b", microbatches=1),
        case_of("everything", 4, "1f1b"),
        case_of("everything", 4, "interleaved-zero-bubble"),
        case_of("llama-tied", 5, "1f1b"),
        LONG,
    ],
}
"""Ranks of a cluster -> its cases. With 2 ranks and 3 stages, rank 1 holds two stages."""


@dataclass
class Result:
    numbers: list[dict[str, object]]
    """Of each rank."""
    tensors: dict[str, Tensor]
    """Of all ranks together."""


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Ranks -> directory of what they wrote. Both clusters run at once."""
    root = Path(__file__).parents[2]
    directories = {num_ranks: tmp_path_factory.mktemp(f"ranks{num_ranks}") for num_ranks in LAUNCHES}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for num_ranks, directory in directories.items():
        (directory / "cases.json").write_text(json.dumps(LAUNCHES[num_ranks]))
        for rank in range(num_ranks):
            command = [
                sys.executable,
                "-m",
                "tests.unit.pipeline_rank",
                str(rank),
                str(num_ranks),
                str(directory),
            ]
            with (directory / f"log{rank}").open("w") as log:
                process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)
            processes.append((process, rank, num_ranks))
    try:
        for process, rank, num_ranks in processes:
            code = process.wait(DEADLINE_S)
            log_text = (directories[num_ranks] / f"log{rank}").read_text()
            assert code == (9 if rank == num_ranks - 1 else 0), log_text[-3000:]
    finally:
        for process, _, _ in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return directories


def result_of(directory: Path, case: Mapping[str, object], num_ranks: int) -> Result:
    tensors: dict[str, Tensor] = {}
    numbers = []
    for rank in range(num_ranks):
        path = directory / f"{name_of(case)}-rank{rank}"
        new = load_file(f"{path}.safetensors")
        assert not tensors.keys() & new.keys(), "two ranks own one tensor"
        tensors |= new
        numbers.append(json.loads(Path(f"{path}.json").read_text()))
    return Result(numbers, tensors)


@pytest.fixture(scope="module")
def uncut() -> dict[str, tuple[dict[str, list[float]], dict[str, Tensor]]]:
    """Model -> losses, norms and tensors of the ordinary Hugging Face model, trained by an ordinary loop."""
    return {model: train_uncut(model) for model in MODELS}


def train_uncut(model: str) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    spec = spec_of(model, 1)
    theta = pipeline_of(spec, 0, 1).parameters
    whole = AutoModelForCausalLM.from_config(config_from_spec(spec.model), dtype=torch.float32)
    lacking, unknown = whole.load_state_dict({n: p.detach() for n, p in theta.items()}, strict=False)
    assert not unknown and lacking == (["lm_head.weight"] if "tied" in model else [])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LR)
    numbers: dict[str, list[float]] = {"losses": [], "norms": []}
    tensors: dict[str, Tensor] = {}

    def loss_of(tokens: Tensor) -> Tensor:
        return functional.cross_entropy(whole(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())

    for step in range(steps_of(model)):
        optimizer.zero_grad()
        loss = loss_of(batch_of(step))
        loss.backward()  # type: ignore[no-untyped-call]
        numbers["losses"].append(loss.item())
        numbers["norms"].append(torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP_NORM).item())
        if step < 3:
            tensors |= {f"grad{step}:{n}": p.grad.clone() for n, p in whole.named_parameters()}
        optimizer.step()
    with torch.no_grad():
        numbers["evaluated"] = [torch.stack([loss_of(batch_of(100)), loss_of(batch_of(101))]).mean().item()]
    return numbers, tensors


def assert_equals_uncut(
    numbers: dict[str, object],
    tensors: dict[str, Tensor],
    whole: tuple[dict[str, list[float]], dict[str, Tensor]],
) -> None:
    expected, grads = whole
    assert max(expected["norms"]) > CLIP_NORM, "the case must clip"
    assert numbers["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert numbers["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert numbers["evaluated"] == pytest.approx(expected["evaluated"][0], rel=1e-5)
    assert {n for n in tensors if n.startswith("grad")} == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(tensors[name], grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_trains_like_the_uncut_model(
    model: str, uncut: dict[str, tuple[dict[str, list[float]], dict[str, Tensor]]]
) -> None:
    for stages in (1, 3):  # one process that holds all stages
        numbers, tensors = train(pipeline_of(spec_of(model, stages), 0, 1), steps_of(model))
        assert_equals_uncut(numbers, tensors, uncut[model])


@pytest.mark.parametrize("num_ranks", LAUNCHES)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_train_like_the_uncut_model(
    model: str,
    num_ranks: int,
    clusters: dict[int, Path],
    uncut: dict[str, tuple[dict[str, list[float]], dict[str, Tensor]]],
) -> None:
    cases = [c for c in LAUNCHES[num_ranks] if c["model"] == model and c not in (HALF, LONG)]
    assert cases or model == DEEP
    for case in cases:
        result = result_of(clusters[num_ranks], case, num_ranks)
        assert all(numbers == result.numbers[0] for numbers in result.numbers), "every rank must get the same"
        assert_equals_uncut(result.numbers[0], result.tensors, uncut[model])


@pytest.mark.parametrize("num_ranks", LAUNCHES)
def test_dropout_documents_padding_and_recomputation_are_the_same_over_ranks(
    num_ranks: int, clusters: dict[int, Path]
) -> None:
    expected, whole = train(pipeline_of(spec_of("everything", 1), 0, 1), STEPS)
    for case in (case for case in LAUNCHES[num_ranks] if case["model"] == "everything"):
        result = result_of(clusters[num_ranks], case, num_ranks)
        for key in ("losses", "evaluated"):
            assert result.numbers[0][key] == pytest.approx(expected[key], rel=1e-5)
        for name in (name for name in whole if name.startswith("grad")):
            torch.testing.assert_close(result.tensors[name], whole[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("num_ranks", LAUNCHES)
def test_tied_copies_are_bit_equal_after_20_steps(num_ranks: int, clusters: dict[int, Path]) -> None:
    owners = {"llama-tied": "model.embed_tokens.weight", "gpt2-tied": "transformer.wte.weight"}
    for case in LAUNCHES[num_ranks]:
        if steps_of(str(case["model"])) == STEPS_TIED:
            tensors = result_of(clusters[num_ranks], case, num_ranks).tensors
            owner = tensors[f"final:{owners[str(case['model'])]}"]
            assert torch.equal(tensors["copy"], owner)
            assert not torch.equal(owner, tensors["copy"].roll(1)), "a constant tensor would prove nothing"


def test_a_hundred_steps_of_eight_microbatches_over_four_ranks_end_as_on_one(
    clusters: dict[int, Path],
) -> None:
    """Field report G1: torch once waited for one of several messages only, and hung on gloo. AdamW makes much
    of rounding over so many steps."""
    result = result_of(clusters[4], LONG, 4)
    numbers, _ = train(pipeline_of(spec_of(DEEP, 4, microbatches=1), 0, 1), STEPS_LONG)
    assert result.numbers[0]["losses"] == pytest.approx(numbers["losses"], rel=1e-3)


def test_bf16_over_two_ranks_is_bf16_on_one(clusters: dict[int, Path]) -> None:
    """Master weights, gradients, loss and norms are float32; what crosses the boundary loses nothing."""
    result = result_of(clusters[2], HALF, 2)
    numbers, tensors = train(pipeline_of(spec_of("llama", 2, precision="bf16"), 0, 1), STEPS)
    full, _ = train(pipeline_of(spec_of("llama", 2, precision="fp32"), 0, 1), STEPS)
    assert result.numbers[0]["losses"] == pytest.approx(numbers["losses"], rel=1e-6)
    assert result.numbers[0]["evaluated"] == pytest.approx(numbers["evaluated"], rel=1e-6)
    assert numbers["losses"] != pytest.approx(full["losses"], rel=1e-5)
    for name, tensor in tensors.items():
        assert result.tensors[name].dtype == torch.float32
        torch.testing.assert_close(result.tensors[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("num_ranks", LAUNCHES)
def test_neighbours_of_a_dead_rank_raise_cluster_error(num_ranks: int, clusters: dict[int, Path]) -> None:
    for rank in range(num_ranks - 1):
        message = (clusters[num_ranks] / f"lost-rank{rank}").read_text()
        assert f"rank {rank} of {num_ranks} lost another rank of this cluster" in message


def test_gradients_that_are_not_finite_are_dropped_and_move_nothing() -> None:
    pipeline = pipeline_of(spec_of("llama", 1), 0, 1)
    optimizer = torch.optim.AdamW(pipeline.all_parameters, lr=LR)
    before = {name: p.detach().clone() for name, p in pipeline.parameters.items()}
    pipeline.forward_backward(batch_of(0))
    grad = pipeline.all_parameters[3].grad
    assert grad is not None
    grad[0] = float("inf")
    assert pipeline.clip_().grad_norm == float("inf")
    optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in pipeline.parameters.items())


def test_a_batch_that_microbatches_cannot_share_evenly_is_refused() -> None:
    pipeline = pipeline_of(spec_of("llama", 1, microbatches=3), 0, 1)
    with pytest.raises(ValueError, match=r"8 sequences, must be a multiple of inner\.microbatches = 3"):
        pipeline.forward_backward(batch_of(0))


class _Casts(TorchDispatchMode):
    """Counts how often each parameter becomes bf16."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of = {p.data_ptr(): 0 for p in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.of:
            self.of[args[0].data_ptr()] += 1
        return result


def test_microbatches_share_one_bf16_copy_of_each_weight_and_gradients_keep_their_bits() -> None:
    shared, apart = (pipeline_of(spec_of("llama", 1, precision="bf16"), 0, 1) for _ in range(2))
    casts = _Casts(shared.all_parameters)
    with casts:
        shared.forward_backward(batch_of(0))
    assert set(casts.of.values()) == {0, 1}
    module, tokens = apart.spans[0].module.train(), batch_of(0)
    loss_of = TokenLoss(tokens[:, 1:], 4)
    for part in tokens.chunk(4):
        (loss_of(module(part[:, :-1]), part[:, 1:]) / 4).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(shared.all_parameters, apart.all_parameters, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_bf16_computes_near_fp32_and_keeps_fp32_gradients() -> None:
    full, half = (pipeline_of(spec_of("llama", 1), 0, 1) for _ in range(2))
    half.spans[0].module.autocast_dtype = torch.bfloat16
    assert half.device == CPU
    for pipeline in (full, half):
        pipeline.forward_backward(batch_of(0))
    losses = [pipeline.clip_().loss for pipeline in (full, half)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in half.all_parameters)
