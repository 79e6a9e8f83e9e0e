"""Hugging Face checkpoints in and out: every family, sharded, in its published names; what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from p2p_dilocox.checkpoint.export import export_model
from p2p_dilocox.errors import ModelError
from p2p_dilocox.pipeline import build_span, cut_layers
from p2p_dilocox.pipeline.load import find_weights
from p2p_dilocox.pipeline.skeleton import read_skeleton
from tests.unit.families import CPU, FAMILIES, TIED, Chain, config_of, sequences


def published(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A checkpoint of several files as Hugging Face writes it, with parameters that no seed here draws."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config_of(FAMILIES[family]), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            parameter.data = parameter.to(dtype)
    model.save_pretrained(directory, max_shard_size="30KB")
    return model


def keys_of(directory: Path) -> dict[str, str]:
    index: dict[str, dict[str, str]] = json.loads((directory / "model.safetensors.index.json").read_text())
    return index["weight_map"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_read_by_stages_and_written_again_without_a_difference(
    family: str, tmp_path: Path
) -> None:
    """Cut into five, the embedding and the head are stages without a layer."""
    config = config_of(FAMILIES[family])
    model = published(family, tmp_path / "in")
    assert len(set(keys_of(tmp_path / "in").values())) > 1
    theta, tokens = dict(model.named_parameters()), sequences(0)
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    for stages in (3, 5):
        chain = Chain(config, stages, weights=tmp_path / "in")
        assert chain.theta().keys() == theta.keys()
        for name, parameter in chain.theta().items():
            assert parameter.dtype == torch.float32 and parameter.requires_grad
            assert torch.equal(parameter, theta[name]), name
        copy = chain.tied_copy()
        assert (copy is not None) == (family in TIED)
        if copy is not None:
            assert torch.equal(copy, theta[str(chain.spans[0].tied_name)])
        shards: list[tuple[int, dict[str, Tensor]]] = [
            (j, dict(span.stage_parameters[j])) for j, span in enumerate(chain.spans)
        ]
        out = tmp_path / f"out-{stages}"
        export_model(config, shards, None, out)
        assert keys_of(out).keys() == keys_of(tmp_path / "in").keys()
        answer: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        loaded, info = answer
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, theta[name]), name
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits, logits)


@pytest.mark.parametrize(
    ("stages", "stage", "prefix"),
    [(3, 1, "model.layers.1."), (5, 0, "model.embed_tokens."), (5, 4, "model.norm.|lm_head.")],
)
def test_a_stage_reads_no_file_of_another(stages: int, stage: int, prefix: str, tmp_path: Path) -> None:
    skeleton = read_skeleton(config_of(FAMILIES["llama"]))
    published("llama", tmp_path)
    read = {key: f for key, f in keys_of(tmp_path).items() if key.startswith(tuple(prefix.split("|")))}
    others = set(keys_of(tmp_path).values()) - set(read.values())
    assert read and others
    for file in others:
        (tmp_path / file).write_bytes(b"not a safetensors file")
    cuts = cut_layers(skeleton, stages)
    span = build_span(skeleton, stage, stage, cuts, seed=5, device=CPU, weights=tmp_path)
    assert span.stage_parameters[stage].keys() == read.keys()
    with pytest.raises(ModelError, match="a file of it cannot be read"):
        build_span(skeleton, 2, 2, cuts, seed=5, device=CPU, weights=tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    theta = dict(published("gpt2", tmp_path, dtype).named_parameters())
    for name, parameter in Chain(config_of(FAMILIES["gpt2"]), 2, weights=tmp_path).theta().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, theta[name].float())


def one_file(family: str, directory: Path, change: Any) -> Path:
    """The checkpoint of a family as one file, after `change` of its tensors."""
    published(family, directory / "whole")
    tensors: dict[str, Tensor] = {}
    for file in sorted((directory / "whole").glob("*.safetensors")):
        tensors |= load_file(file)
    change(tensors)
    (directory / "changed").mkdir()
    save_file(tensors, directory / "changed" / "model.safetensors", metadata={"format": "pt"})
    return directory / "changed"


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # a mask that older versions stored


def under_the_name_of_the_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")


@pytest.mark.parametrize("change", [lambda _: None, without_prefix, under_the_name_of_the_head])
def test_names_of_older_files_are_understood(change: Any, tmp_path: Path) -> None:
    directory = one_file("gpt2", tmp_path, change)
    theta = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "whole").named_parameters())
    for stages in (1, 2, 5):
        chain = Chain(config_of(FAMILIES["gpt2"]), stages, weights=directory)
        assert all(torch.equal(parameter, theta[name]) for name, parameter in chain.theta().items())
        copy = chain.tied_copy()
        assert (copy is None) == (stages == 1)
        assert copy is None or torch.equal(copy, theta["transformer.wte.weight"])


def lack(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def lack_an_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]


def bring_more(tensors: dict[str, Tensor]) -> None:
    tensors |= {f"model.layers.{i}.adapter": torch.ones(1) for i in range(5)}


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(33)


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("llama", lack, r"it lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ("qwen3_moe", lack_an_expert, r"model\.layers\.1\.mlp\.experts"),
        ("llama", bring_more, r"no model\.layers\.0\.adapter, .*, model\.layers\.2\.adapter and 2 more"),
        ("llama", reshape, r"model\.norm\.weight has the shape \(33,\), and config\.json says \(32,\)"),
        ("llama", quantise, r"model\.norm\.weight is int8, must be floats"),
    ],
)
def test_weights_that_do_not_fit_are_named(family: str, change: Any, reason: str, tmp_path: Path) -> None:
    directory = one_file(family, tmp_path, change)
    with pytest.raises(ModelError, match=reason) as caught:
        Chain(config_of(FAMILIES[family]), 2, weights=directory)
    assert str(directory) in str(caught.value)


def test_checkpoints_that_cannot_be_read_say_what_would_help(tmp_path: Path) -> None:
    skeleton = read_skeleton(config_of(FAMILIES["llama"]))

    def refusal() -> str:
        with pytest.raises(ModelError) as caught:
            find_weights(tmp_path, skeleton)
        return str(caught.value)

    assert 'set model.start = "seed"' in refusal()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "are pickled (.bin)" in refusal() and "save_pretrained" in refusal()
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    single.write_bytes(b"\x00" * 100)
    assert "cannot be read" in refusal()
    index.write_text("{}")
    assert "cannot be read" in refusal()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    assert "not complete: model-1.safetensors is not there" in refusal()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    assert "../model.safetensors, which is not beside it" in refusal()
