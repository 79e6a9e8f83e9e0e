"""Small models of the families that are tested, and their stages chained in one process.

B: sequences of a batch   T: tokens of a sequence that predict the next one
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from p2p_dilocox.pipeline import Span, build_span, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.pipeline.reading import inputs_and_targets
from p2p_dilocox.pipeline.schedule import alone
from p2p_dilocox.settings import Model

CPU = torch.device("cpu")
VOCAB, END = 64, 2
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
LLAMA_LIKE = _SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
_OPT = {"model_type": "opt", "ffn_dim": 48, "dropout": 0.0}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": LLAMA_LIKE
    | {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "initializer_range": 0.1}
    | {"attn_logit_softcapping": 0.1, "final_logit_softcapping": 0.5}  # low enough to cap small scores
    | _SLIDING,
    "gemma3": LLAMA_LIKE | {"model_type": "gemma3_text", "head_dim": 8} | _SLIDING,
    "gpt2": {
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
        "eos_token_id": END,
    },
    "gpt_neox": _SIZES | {"model_type": "gpt_neox", "intermediate_size": 48},
    "llama": LLAMA_LIKE | {"model_type": "llama"},
    "mistral": LLAMA_LIKE | {"model_type": "mistral", "sliding_window": 4},
    "mixtral": LLAMA_LIKE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": LLAMA_LIKE | {"model_type": "olmo"},  # its norms have no parameters
    "olmo2": LLAMA_LIKE | {"model_type": "olmo2"},
    "opt": _SIZES | _OPT,
    # As OPT-350M: projections beside a narrow embedding, norms behind the blocks.
    "opt-narrow": _SIZES | _OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "phi3": LLAMA_LIKE | {"model_type": "phi3"},
    "qwen2": LLAMA_LIKE
    | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    | _SLIDING,
    "qwen2-tied": LLAMA_LIKE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": LLAMA_LIKE | {"model_type": "qwen3", "head_dim": 8},
    "qwen3_moe": LLAMA_LIKE
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "smollm3": LLAMA_LIKE | {"model_type": "smollm3"},
}
TIED = {"gemma2", "gemma3", "gpt2", "opt", "opt-narrow", "qwen2-tied", "smollm3"}


def config_of(values: dict[str, Any]) -> PretrainedConfig:
    return config_from_spec(Model(config=values))


class Chain(nn.Module):
    """The stages of a model one after the other, each a span of its own, as ranks would hold them."""

    def __init__(
        self,
        config: PretrainedConfig,
        stages: int,
        *,
        seed: int = 5,
        documents: bool = False,
        weights: Path | None = None,
    ) -> None:
        super().__init__()
        skeleton = read_skeleton(config)
        cuts = cut_layers(skeleton, stages)
        self.spans: list[Span] = [
            build_span(skeleton, j, j, cuts, seed=seed, device=CPU, documents=documents, weights=weights)
            for j in range(stages)
        ]
        self.modules_of_spans = nn.ModuleList(span.module for span in self.spans)
        self.document_end = END if documents else None
        for span in self.spans:
            span.module.document_end = self.document_end

    def forward(self, x: Tensor, **beside: Tensor) -> Tensor:
        for span in self.spans:
            x = span.module(x, **beside)
        return x

    def theta(self) -> dict[str, nn.Parameter]:
        return {n: p for span in self.spans for s in span.stage_parameters.values() for n, p in s.items()}

    def tied_copy(self) -> nn.Parameter | None:
        return self.spans[-1].tied_copy

    def everything(self) -> list[nn.Parameter]:
        copy = self.tied_copy()
        return [*self.theta().values(), *([] if copy is None else [copy])]

    def forward_backward(self, tokens: Tensor, microbatches: int = 2, stream: str = "") -> float:
        """Loss of tokens [B, T + 1]; gradients in .grad, those of both ends of a tied embedding summed."""
        for parameter in self.everything():
            parameter.grad = None
        inputs, targets = inputs_and_targets(tokens, self.document_end)
        beside = {"tokens": inputs} if self.document_end is not None else {}
        if self.spans[0].module.draws:
            beside["row"] = torch.arange(len(tokens))
        for span in self.spans:
            span.module.stream = stream
        loss = alone(self, microbatches, training=True)(inputs, targets, beside)
        assert loss is not None
        copy = self.tied_copy()
        if copy is not None:
            owner = self.theta()[str(self.spans[0].tied_name)]
            assert owner.grad is not None and copy.grad is not None
            owner.grad += copy.grad
            copy.grad = owner.grad.clone()
        return loss.item()


def whole_model(config: PretrainedConfig, theta: dict[str, nn.Parameter]) -> PreTrainedModel:
    """The ordinary Hugging Face model with these parameters, in training mode."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lacking, unknown = model.load_state_dict({n: p.detach() for n, p in theta.items()}, strict=False)
    assert not unknown and len(lacking) == len(model.all_tied_weights_keys)
    model.train()
    return model


def sequences(seed: int, batch: int = 4, length: int = 13, *, padded: bool = False) -> Tensor:
    """int64 [batch, length] without END; with -1 behind random lengths from 3 on if padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(
        END + 1, 12, (batch, length), generator=generator
    )  # few: there is something to learn
    if padded:
        lengths = torch.randint(3, length + 1, (batch, 1), generator=generator)
        tokens = tokens.masked_fill(torch.arange(length) >= lengths, -1)
    return tokens
