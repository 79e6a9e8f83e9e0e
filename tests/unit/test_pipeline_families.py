"""Stages of every family against Hugging Face's model: padding, documents, dropout, recomputation."""

import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from p2p_dilocox.pipeline.reading import apart, inputs_and_targets, positions_in_documents
from tests.unit.families import END, FAMILIES, LLAMA_LIKE, TIED, Chain, config_of, sequences, whole_model

STEPS, LR = 20, 1e-3
CUTS = (1, 2, 3, 5)
"""Stages of the models of three layers. With five the embedding and the head are stages without a layer."""


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def padded_loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """As Hugging Face would have it: with an attention mask."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(input_ids=inputs.clamp(min=0), attention_mask=(inputs >= 0).long(), use_cache=False).logits
    return summed_loss(logits, targets) / (targets >= 0).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_train_like_the_whole_model_on_padded_batches(family: str) -> None:
    """Field reports G3, and G4 where the embedding is tied."""
    config = config_of(FAMILIES[family])
    chains = [Chain(config, stages) for stages in CUTS]
    theta_0 = {name: value.detach().clone() for name, value in chains[0].theta().items()}
    for chain in chains:
        assert chain.theta().keys() == theta_0.keys()
        assert all(torch.equal(value, theta_0[name]) for name, value in chain.theta().items())
    whole = whole_model(config, chains[0].theta())
    optimizers = [
        torch.optim.AdamW(m, lr=LR) for m in (whole.parameters(), *(c.everything() for c in chains))
    ]
    losses = []
    for step in range(STEPS):
        tokens = sequences(step, padded=True)
        whole.zero_grad()
        loss = padded_loss(whole, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for chain in chains:
            assert chain.forward_backward(tokens) == pytest.approx(losses[-1], rel=1e-5)
            for name, parameter in whole.named_parameters():
                grad = chain.theta()[name].grad
                assert grad is not None and parameter.grad is not None, name
                torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-5, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < losses[0] - 0.01, "nothing was learnt, so nothing was compared"
    assert (chains[0].spans[0].tied_name is not None) == (family in TIED)
    for chain in chains[1:] if family in TIED else []:
        copy, owner = chain.tied_copy(), chain.theta()[str(chain.spans[0].tied_name)]
        assert copy is not None and copy is not owner and torch.equal(copy, owner)
        assert not torch.equal(owner, theta_0[str(chain.spans[0].tied_name)])


WITHOUT: list[tuple[str, str, int | None]] = [
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "final_logit_softcapping", None),
    *((family, "sliding_window", 64) for family in ("gemma2", "gemma3", "mistral", "qwen2")),
]


@pytest.mark.parametrize(("family", "key", "without"), WITHOUT)
def test_the_small_models_have_windows_and_caps_that_show(family: str, key: str, without: int | None) -> None:
    """Else a stage that forgets them would be as good as one that does not."""
    config, tokens = config_of(FAMILIES[family]), sequences(0)
    theta = Chain(config, 1).theta()
    with torch.no_grad():
        logits = whole_model(config, theta)(input_ids=tokens, use_cache=False).logits
        assert getattr(config, key) != without
        setattr(config, key, without)
        others = whole_model(config, theta)(input_ids=tokens, use_cache=False).logits
    assert (logits - others).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_sequence_do_not_see_each_other(family: str) -> None:
    """Nor do they where layers are computed again for the gradient."""
    config = config_of(FAMILIES[family])
    tokens = sequences(7)
    tokens[0, 4] = tokens[0, 9] = tokens[1, 11] = tokens[2, 0] = END
    chains = [Chain(config, stages, documents=True) for stages in CUTS]
    whole, pieces = whole_model(config, chains[0].theta()), []
    for row in tokens:
        ends = [-1, *(row == END).nonzero().flatten().tolist(), len(row) - 1]
        pieces += [row[None, a + 1 : b + 1] for a, b in zip(ends, ends[1:], strict=False) if b - a > 1]
    losses = [
        summed_loss(whole(input_ids=piece[:, :-1], use_cache=False).logits, piece[:, 1:]) for piece in pieces
    ]
    loss = torch.stack(losses).sum() / sum(piece.shape[1] - 1 for piece in pieces)
    loss.backward()
    for chain, checkpointing in itertools.product(chains, (False, True)):
        for span in chain.spans:
            span.module.checkpointing = checkpointing
        assert chain.forward_backward(tokens) == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(chain.theta()[name].grad, parameter.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_computes_near_fp32_and_keeps_fp32_gradients(family: str) -> None:
    chain, tokens = Chain(config_of(FAMILIES[family]), 3, documents=True), sequences(7)
    tokens[0, 4] = END
    full = chain.forward_backward(tokens)
    for span in chain.spans:
        span.module.autocast_dtype, span.module.checkpointing = torch.bfloat16, True
    half = chain.forward_backward(tokens)
    assert half != full and half == pytest.approx(full, rel=1e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in chain.everything())


DROPPING: dict[str, dict[str, Any]] = {
    "gemma2": FAMILIES["gemma2"] | {"attention_dropout": 0.1},
    "gpt2": FAMILIES["gpt2"] | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": FAMILIES["gpt_neox"] | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "llama": LLAMA_LIKE | {"model_type": "llama", "attention_dropout": 0.1},
    "mixtral": FAMILIES["mixtral"] | {"router_jitter_noise": 0.1},
    "opt": FAMILIES["opt"] | {"dropout": 0.1, "attention_dropout": 0.1},
    "phi3": FAMILIES["phi3"] | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
}


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def grads_of_whole(model: PreTrainedModel, layers: Any, prefix: str, tokens: Tensor, stream: str) -> float:
    """Two microbatches through the ordinary model, whose parts are told what to draw from."""
    rows = [0]

    def draw(name: str) -> Any:
        return lambda *_: torch.manual_seed(seed_of(f"{stream}/{rows[-1]}/{name}")) and None

    handles = [x.register_forward_pre_hook(draw(f"{prefix}.{i}")) for i, x in enumerate(layers)]
    handles.append(layers[-1].register_forward_hook(draw("after the layers")))
    total = 0.0
    for row in range(len(tokens)):
        rows.append(row)
        microbatch = tokens[row : row + 1]
        draw("before the layers")()
        logits = model(input_ids=microbatch[:, :-1], use_cache=False).logits
        loss = summed_loss(logits, microbatch[:, 1:]) / microbatch[:, 1:].numel() / len(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("family", DROPPING)
def test_dropout_drops_the_same_in_every_cut_and_again_when_recomputed(family: str) -> None:
    config = config_of(DROPPING[family])
    tokens = sequences(3, batch=2)
    chains = [Chain(config, stages) for stages in CUTS]
    whole = whole_model(config, chains[0].theta())
    layers = {n: m for n, m in whole.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3}
    ((prefix, layer_list),) = layers.items()
    state = torch.get_rng_state()
    losses = set()
    for stream in ("5/abc/1/0", "5/abc/1/1"):
        whole.zero_grad()
        with torch.random.fork_rng([]):
            expected = grads_of_whole(whole, layer_list, prefix, tokens, stream)
        losses.add(expected)
        for checkpointing in (False, True):
            for chain in chains:
                for span in chain.spans:
                    span.module.checkpointing = checkpointing
                assert chain.forward_backward(tokens, 2, stream) == pytest.approx(expected, rel=1e-5)
                for name, parameter in whole.named_parameters():
                    grad = chain.theta()[name].grad
                    torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-5, msg=name)
    assert len(losses) == 2, "every inner step drops something else"
    assert torch.equal(torch.get_rng_state(), state)
    for chain in chains:
        chain.eval()
    with torch.no_grad():
        logits = whole.eval()(input_ids=tokens, use_cache=False).logits
        for chain in chains:
            torch.testing.assert_close(chain(tokens), logits, rtol=0, atol=1e-6)


def test_what_a_stage_reads_of_a_batch() -> None:
    tokens = torch.tensor([[5, END, 6, 7, END, 8], [END, 5, 6, 7, 8, 9], [5, 6, -1, -1, -1, -1]])
    inputs, targets = inputs_and_targets(tokens, END)
    assert inputs.tolist() == [[5, END, 6, 7, END], [END, 5, 6, 7, 8], [5, 6, 0, 0, 0]]
    assert targets.tolist() == [[END, -1, 7, END, -1], [-1, 6, 7, 8, 9], [6, -1, -1, -1, -1]]
    assert inputs_and_targets(tokens, None)[1].tolist() == tokens[:, 1:].tolist()
    positions = positions_in_documents(inputs, END)
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    mask = apart(positions)[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
