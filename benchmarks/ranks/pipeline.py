"""One rank of benchmarks/pipeline.py: python -m benchmarks.ranks.pipeline CONFIG RANK; writes RANK.json."""

import datetime
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.pipeline import Pipeline, build_chunks, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.pipeline.schedule import over_ranks
from p2p_dilocox.placement import place
from p2p_dilocox.runspec import RunSpec, parse_run


class Nap(nn.Module):
    """A stage whose forward and backward take known times and no processor. `busy_s`: what they took."""

    def __init__(self, *, first: bool, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first, self.forward_s, self.backward_s, self.busy_s = first, forward_s, backward_s, 0.0
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()[..., None] if self.first else x
        result: Tensor = _Sleep.apply(hidden * self.weight, self)  # type: ignore[no-untyped-call]
        return result

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.busy_s += time.perf_counter() - start


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, nap: Nap) -> Tensor:
        ctx.nap = nap
        nap.sleep(nap.forward_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.nap.sleep(ctx.nap.backward_s)
        return grad, None


def bubble(config: dict[str, Any], rank: int) -> dict[str, Any]:
    """The share of each step in which this rank had nothing to do."""
    ranks, microbatches = config["ranks"], config["microbatches"]
    nap = Nap(first=rank == 0, forward_s=config["forward_s"], backward_s=config["backward_s"])
    placement = place(config["schedule"], ranks, ranks)
    run = over_ranks({rank: nap}, placement, microbatches, torch.device("cpu"), schedule=config["schedule"])
    tokens, idle = torch.zeros(microbatches, 4, dtype=torch.long), []
    for step in range(config["steps"] + 1):
        dist.barrier()
        nap.busy_s, start = 0.0, time.perf_counter()
        run(tokens, tokens, {})
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if step > 0:  # torch works out shapes in the first
            idle.append(1 - nap.busy_s / seconds.item())
    return {"idle": statistics.median(idle)}


def train(config: dict[str, Any], rank: int) -> dict[str, Any]:
    """Inner steps of the run spec; with `outer`, its state is there too, for the memory."""
    spec, ranks, device = parse_run(config["run"]), config["ranks"], torch.device(config["device"])
    pipeline = pipeline_of(spec, rank, ranks, device)
    optimizer = InnerOptimizer(pipeline.all_parameters, spec.inner, 1000)
    dense = spec.compression.never_factored(pipeline.spans[0].embedding_names)
    outer = OuterState(spec, pipeline.parameters, dense, "") if config["outer"] else None
    vocabulary = int(config_from_spec(spec.model).vocab_size)
    shape = (spec.inner.batch_size, spec.data.seq_len + 1)
    seconds = []
    for step in range(config["steps"] + 1):
        tokens = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(step))
        pipeline.barrier()
        start = time.perf_counter()
        pipeline.forward_backward(tokens)
        pipeline.clip_()
        optimizer.step(step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step > 0:
            seconds.append(time.perf_counter() - start)
    return _figures(seconds, shape[0] * (shape[1] - 1), device) | {"state": outer is not None}


def plain(config: dict[str, Any], _rank: int) -> dict[str, Any]:
    """The same model, batch and optimizer in plain PyTorch: no pipeline, no swarm."""
    from transformers import AutoModelForCausalLM

    spec, device = parse_run(config["run"]), torch.device(config["device"])
    model_config = config_from_spec(spec.model)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    shape, parts = (spec.inner.batch_size, spec.data.seq_len), spec.inner.microbatches
    seconds = []
    for step in range(config["steps"] + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, int(model_config.vocab_size), shape, generator=generator).to(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        for part in tokens.chunk(parts):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=part, labels=part).loss / parts
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step > 0:
            seconds.append(time.perf_counter() - start)
    return _figures(seconds, shape[0] * shape[1], device)


def pipeline_of(spec: RunSpec, rank: int, ranks: int, device: torch.device) -> Pipeline:
    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    placement = place(spec.inner.schedule, spec.model.stages, ranks)
    spans = build_chunks(skeleton, placement, rank, cuts, seed=0, device=device)
    return Pipeline(spec, spans, rank, ranks, device)


def _figures(seconds: list[float], tokens: int, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "peak_bytes": peak or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    config = json.loads(path.read_text())
    torch.set_num_threads(config["threads"])
    if config["ranks"] > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{path.parent}/rendezvous",
            rank=rank,
            world_size=config["ranks"],
            timeout=datetime.timedelta(seconds=60),
        )
    result = {"bubble": bubble, "train": train, "plain": plain}[config["kind"]](config, rank)
    (path.parent / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
