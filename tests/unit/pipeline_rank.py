"""One rank of a cluster in a process of its own: runs every case it is given and writes down what it got.

python pipeline_rank.py RANK NUM_RANKS DIRECTORY
"""

import datetime
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from p2p_dilocox.errors import ClusterError
from p2p_dilocox.pipeline import Pipeline, build_chunks, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.placement import place
from p2p_dilocox.runspec import (
    Adapt,
    Compression,
    Data,
    Inner,
    Local,
    Model,
    Outer,
    Overlap,
    Run,
    RunSpec,
    Schedule,
)

CPU = torch.device("cpu")
SEED = 5
BATCH, TOKENS, VOCAB = 8, 12, 64
LR, CLIP_NORM = 1e-3, 0.5
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "gpt2-tied": GPT2,
    "gpt2": GPT2 | {"tie_word_embeddings": False},
    "llama-5-tied": LLAMA | {"tie_word_embeddings": True, "num_hidden_layers": 5},
}
# Drops out, keeps documents apart, pads, and computes its layers again for the gradient.
EVERYTHING = GPT2 | {"n_layer": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def spec_of(
    model: str, stages: int, schedule: str = "1f1b", microbatches: int = 4, precision: str = "auto"
) -> RunSpec:
    everything = model == "everything"
    return RunSpec(
        run=Run(id="test", seed=SEED, outer_steps=1),
        model=Model(config=EVERYTHING if everything else MODELS[model], stages=stages),
        data=Data(seq_len=TOKENS, packing="documents" if everything else "stream"),
        inner=Inner(
            H=1,
            batch_size=BATCH,
            microbatches=microbatches,
            schedule=schedule,
            lr=LR,
            clip_norm=CLIP_NORM,
            checkpointing=everything,
            precision=precision,
        ),
        outer=Outer(lr=0.7, momentum=0.7),
        local=Local(),
        adapt=Adapt(),
        schedule=Schedule(),
        overlap=Overlap(mode="none", keep=0.0),
        compression=Compression(
            bits=32,
            return_bits=32,
            strong_bits=32,
            strong_fraction=0.0,
            gather_up_to=0,
            group=64,
            lowrank=0,
            feedback="none",
            gamma=0.0,
        ),  # fmt: skip
    )


def name_of(case: Mapping[str, object]) -> str:
    return "-".join(str(case[key]) for key in ("model", "stages", "schedule", "microbatches", "precision"))


def batch_of(step: int, *, padded: bool = False) -> Tensor:
    """int64 [BATCH, TOKENS + 1], the same for everybody; with -1 behind the ends of shorter ones."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=generator)
    lengths = torch.randint(2, TOKENS + 2, (BATCH, 1), generator=generator)
    return tokens.masked_fill(torch.arange(TOKENS + 1) >= lengths, -1) if padded else tokens


def pipeline_of(spec: RunSpec, rank: int, num_ranks: int) -> Pipeline:
    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    placement, documents = (
        place(spec.inner.schedule, spec.model.stages, num_ranks),
        spec.data.packing == "documents",
    )
    spans = build_chunks(skeleton, placement, rank, cuts, seed=spec.run.seed, device=CPU, documents=documents)
    return Pipeline(spec, spans, rank, num_ranks, CPU)


def train(pipeline: Pipeline, steps: int) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Losses and norms of all steps; gradients of the first three; final parameters and tied copy."""
    optimizer = torch.optim.AdamW(pipeline.all_parameters, lr=LR)
    losses, norms = [], []
    tensors: dict[str, Tensor] = {}
    for step in range(steps):
        pipeline.forward_backward(batch_of(step, padded=pipeline.spans[0].module.draws), f"step {step}")
        result = pipeline.clip_([1.0, pipeline.rank + 2.0**40])
        losses.append(result.loss)
        norms.append(result.grad_norm)
        ranks = range(pipeline.num_ranks)
        assert result.extra == [len(ranks), sum(ranks) + len(ranks) * 2.0**40], "float32 would round"
        if step < 3:
            for name, parameter in pipeline.parameters.items():
                assert parameter.grad is not None, name
                tensors[f"grad{step}:{name}"] = parameter.grad.clone()
        optimizer.step()
    for name, parameter in pipeline.parameters.items():
        tensors[f"final:{name}"] = parameter.detach().clone()
    if (copy := pipeline.spans[-1].tied_copy) is not None:
        tensors["copy"] = copy.detach().clone()
    evaluated = pipeline.evaluate([batch_of(100), batch_of(101)])
    return {"losses": losses, "norms": norms, "evaluated": evaluated}, tensors


def main(rank: int, num_ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=30),
    )
    for case in json.loads((directory / "cases.json").read_text()):
        spec = spec_of(
            case["model"], case["stages"], case["schedule"], case["microbatches"], case["precision"]
        )
        pipeline = pipeline_of(spec, rank, num_ranks)
        numbers, tensors = train(pipeline, case["steps"])
        path = directory / f"{name_of(case)}-rank{rank}"
        save_file(tensors, f"{path}.safetensors")
        Path(f"{path}.json").write_text(json.dumps(numbers))

    pipeline = pipeline_of(spec_of("llama-tied", num_ranks), rank, num_ranks)
    heard = [pipeline.broadcast(data if rank == 1 else b"", src=1) for data in (b"", b"ab\0" * 1000)]
    assert heard == [b"", b"ab\0" * 1000]
    assert pipeline.gather(b"r" * rank) == [b"r" * r for r in range(num_ranks)]
    pipeline.barrier()
    with torch.no_grad():
        for number, parameter in enumerate(pipeline.all_parameters):
            parameter.fill_(rank + 0.25 * number)
    pipeline.sync_tied_()
    copy = pipeline.spans[-1].tied_copy
    if copy is not None:
        assert torch.equal(copy, torch.zeros_like(copy)), "the owner is parameter 0 of rank 0"

    # The last rank dies; its neighbours must say so rather than hang.
    pipeline.forward_backward(batch_of(0))
    pipeline.clip_()
    if rank == num_ranks - 1:
        os._exit(9)
    try:
        for step in range(3):  # gloo may still take the first sends
            pipeline.forward_backward(batch_of(step))
            pipeline.clip_()
    except ClusterError as error:
        (directory / f"lost-rank{rank}").write_text(str(error))
    os._exit(0)  # the process group cannot be closed in order any more


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
