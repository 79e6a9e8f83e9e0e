"""What from_pretrained makes of an exported model."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2p_dilocox.checkpoint.export import export_model
from p2p_dilocox.errors import StateError
from p2p_dilocox.pipeline import build_span, config_from_spec, cut_layers, read_skeleton
from tests.unit.pipeline_rank import CPU, MODELS, TOKENS, batch_of, spec_of

TOKENIZER = Path(__file__).parents[2] / "p2p_dilocox" / "data" / "corpus" / "tokenizer"
Shards = list[tuple[int, dict[str, torch.Tensor]]]


def shards_of(model: str, stages: int) -> Shards:
    skeleton = read_skeleton(config_from_spec(spec_of(model, stages).model))
    cuts = cut_layers(skeleton, stages)
    spans = [build_span(skeleton, j, j, cuts, seed=9, device=CPU) for j in range(stages)]
    return [(j, dict(span.stage_parameters[j])) for j, span in enumerate(spans)]


@pytest.mark.parametrize("stages", [1, 3, 5])
@pytest.mark.parametrize("model", MODELS)
def test_an_exported_model_reloads_without_a_difference(model: str, stages: int, tmp_path: Path) -> None:
    config = config_from_spec(spec_of(model, stages).model)
    skeleton = read_skeleton(config)
    whole = build_span(skeleton, 0, 0, cut_layers(skeleton, 1), seed=9, device=CPU)
    export_model(config, iter(reversed(shards_of(model, stages))), None, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    for name, parameter in whole.stage_parameters[0].items():
        assert torch.equal(state[name], parameter), name
    tokens = batch_of(0)[:, :TOKENS]
    assert torch.equal(loaded(tokens).logits, whole.module(tokens))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == stages
    assert ("lm_head.weight" in index["weight_map"]) == ("tied" not in model)
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_an_exported_tokenizer_is_usable(tmp_path: Path) -> None:
    config = config_from_spec(spec_of("llama", 1).model)
    export_model(config, shards_of("llama", 1), TOKENIZER, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "It is a truth universally acknowledged"
    assert str(tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)).strip() == text


def test_an_incomplete_or_wrong_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    config = config_from_spec(spec_of("llama", 2).model)
    whole = shards_of("llama", 2)
    embedding = {"model.embed_tokens.weight": torch.zeros(1, 1)}
    wrong: dict[str, Shards] = {
        "are in no stage": whole[:1],
        "given twice": [whole[0], whole[0]],
        "does not have": [*whole, (2, {"model.unknown": torch.zeros(1)})],
        "another stage brought": [*whole, (2, embedding)],
        "must be": [(0, whole[0][1] | embedding), whole[1]],
    }
    for reason, shards in wrong.items():
        with pytest.raises(StateError, match=reason):
            export_model(config, shards, None, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    config = config_from_spec(spec_of("llama", 1).model)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match="export to a new directory"):
        export_model(config, shards_of("llama", 1), None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = config_from_spec(spec_of("llama", 1).model)
    with pytest.raises(StateError, match="cannot write the model to .*file/out"):
        export_model(config, shards_of("llama", 1), None, tmp_path / "file" / "out")


def test_a_span_on_the_meta_device_has_shapes_and_no_values() -> None:
    skeleton = read_skeleton(config_from_spec(spec_of("llama", 1).model))
    span = build_span(skeleton, 0, 0, cut_layers(skeleton, 1), seed=9, device=torch.device("meta"))
    here = dict(shards_of("llama", 1)[0][1])
    assert {n: p.shape for n, p in span.stage_parameters[0].items()} == {n: p.shape for n, p in here.items()}
    assert all(parameter.is_meta for parameter in span.stage_parameters[0].values())
