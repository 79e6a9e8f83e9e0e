"""Where a model is cut, what each stage holds, and that initial parameters know nothing of the cut."""

import hashlib
import itertools
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from p2p_dilocox.errors import ModelError, SpecError
from p2p_dilocox.pipeline import Span, build_span, config_from_spec, cut_layers
from p2p_dilocox.pipeline.cut import _balanced_borders
from p2p_dilocox.pipeline.skeleton import Skeleton, documents_apart, read_skeleton
from p2p_dilocox.settings import Model
from tests.unit.families import FAMILIES
from tests.unit.pipeline_rank import CPU, GPT2, LLAMA, MODELS, TOKENS, VOCAB, batch_of

NARROW = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": VOCAB}
MORE_FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 8},
    "opt": NARROW | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "gpt_neox": NARROW | {"model_type": "gpt_neox", "intermediate_size": 48},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 3, "vocab_size": VOCAB},
}


def config_of(values: dict[str, object]) -> PretrainedConfig:
    return config_from_spec(Model(config=values))


def skeleton_of(values: dict[str, object]) -> Skeleton:
    return read_skeleton(config_of(values))


def spans_of(config: PretrainedConfig, stages: int, seed: int = 5) -> list[Span]:
    skeleton = read_skeleton(config)
    cuts = cut_layers(skeleton, stages)
    return [build_span(skeleton, j, j, cuts, seed=seed, device=CPU) for j in range(stages)]


def state_of(spans: list[Span]) -> dict[str, Tensor]:
    return {
        name: parameter.detach()
        for span in spans
        for parameters in span.stage_parameters.values()
        for name, parameter in parameters.items()
    }


@pytest.mark.parametrize("values", [*MODELS.values(), *MORE_FAMILIES.values()], ids=[*MODELS, *MORE_FAMILIES])
def test_theta_0_and_logits_are_the_same_for_every_number_of_stages(values: dict[str, object]) -> None:
    config = config_of(values)
    whole = spans_of(config, 1)
    tokens = batch_of(0)[:, :TOKENS]
    logits = whole[0].module(tokens)
    assert logits.std() > 0
    for stages in (2, 3):
        spans = spans_of(config, stages)
        x = tokens
        for span in spans:
            x = span.module(x)
        assert torch.equal(x, logits)
        theta, expected = state_of(spans), state_of(whole)
        assert theta.keys() == expected.keys()
        assert all(torch.equal(theta[name], expected[name]) for name in expected)
        assert sum(p.numel() for p in theta.values()) == whole[0].num_parameters == spans[-1].num_parameters


def test_theta_0_follows_the_seed_and_leaves_the_global_random_state_alone() -> None:
    config = config_of(LLAMA)
    state = torch.get_rng_state()
    one, two = (state_of(spans_of(config, 1, seed)) for seed in (1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    matrices = [name for name, value in one.items() if value.dim() == 2]
    assert matrices
    for name in matrices:
        assert not torch.equal(one[name], two[name])
    layers = [one[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(3)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(layers, 2))


def test_theta_0_has_the_scales_that_hugging_face_prescribes() -> None:
    theta = state_of(spans_of(config_of(GPT2 | {"n_embd": 64}), 2))
    assert theta["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    scaled = 0.02 / (2 * 3) ** 0.5  # residual projections are scaled down by their number
    assert theta["transformer.h.2.mlp.c_proj.weight"].std().item() == pytest.approx(scaled, rel=0.05)
    assert torch.equal(theta["transformer.ln_f.weight"], torch.ones(64))


@pytest.mark.parametrize("forgotten", [torch.nn.Linear, LlamaRotaryEmbedding])
def test_a_tensor_that_a_class_forgets_to_initialise_is_named(
    forgotten: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = PreTrainedModel._init_weights

    def forgetful(self: PreTrainedModel, module: torch.nn.Module) -> None:
        if not isinstance(module, forgotten):
            init(self, module)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(PreTrainedModel, "_init_weights", forgetful)
    with pytest.raises(ModelError, match="is a tensor without a rule for its values"):
        spans_of(config_of(LLAMA), 1)


def test_theta_0_has_the_same_bits_without_vector_instructions() -> None:
    script = (
        "from tests.unit.test_pipeline_cut import digest_of_theta_0\n"
        "import sys; sys.stdout.write(digest_of_theta_0())"
    )
    plain = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=100,
        check=True,
        text=True,
    )
    assert plain.stdout == digest_of_theta_0()


def digest_of_theta_0() -> str:
    digest = hashlib.sha256()
    for family in ("gemma3", "gpt2", "gpt_neox", "llama", "qwen3_moe"):
        for value in state_of(spans_of(config_of(FAMILIES[family]), 1)).values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def test_seven_layers_on_three_stages_are_balanced_by_parameters_and_compute() -> None:
    """Field report G11."""
    small_vocabulary = skeleton_of(LLAMA | {"num_hidden_layers": 7})
    assert [len(layers) for layers in cut_layers(small_vocabulary, 3)] == [2, 3, 2]
    # An embedding as large as six layers: as much memory in front as the head needs behind, but no work.
    large_vocabulary = skeleton_of(LLAMA | {"num_hidden_layers": 7, "vocab_size": 1500})
    assert [len(layers) for layers in cut_layers(large_vocabulary, 3)] == [2, 4, 1]
    assert cut_layers(small_vocabulary, 7) == [range(i, i + 1) for i in range(7)]
    assert cut_layers(small_vocabulary, 3, (1, 1, 5)) == [range(1), range(1, 2), range(2, 7)]


def test_no_other_cut_has_a_smaller_largest_stage() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes: list[int] = torch.randint(1, 100, (8,), generator=generator).tolist()
        work: list[int] = torch.randint(1, 100, (8,), generator=generator).tolist()
        for parts in (1, 2, 3, 4, 8):
            cuts = [(0, *inner, 8) for inner in itertools.combinations(range(1, 8), parts - 1)]
            ranked = {
                cut: (max(shares), sum(share**2 for share in shares))
                for cut in cuts
                for shares in [
                    [
                        max(Fraction(sum(sizes[a:b]), sum(sizes)), Fraction(sum(work[a:b]), sum(work)))
                        for a, b in itertools.pairwise(cut)
                    ]
                ]
            }
            assert ranked[tuple(_balanced_borders(sizes, work, parts))] == min(ranked.values())


@pytest.mark.parametrize("stages", [0, -1, 6])
def test_stages_that_would_hold_nothing_are_refused(stages: int) -> None:
    """Field report G11; tests/unit/test_runspec.py has them in a run.toml."""
    with pytest.raises(SpecError, match=f"model.stages = {stages}, must be between 1 and 5"):
        cut_layers(skeleton_of(LLAMA), stages)


def test_embedding_and_head_are_stages_of_their_own_where_layers_are_too_few() -> None:
    heavy = skeleton_of(LLAMA | {"num_hidden_layers": 4, "vocab_size": 3000})
    assert [len(layers) for layers in cut_layers(heavy, 4)] == [1, 1, 1, 1]
    assert [len(layers) for layers in cut_layers(heavy, 5)] == [0, 1, 1, 2, 0]
    assert cut_layers(skeleton_of(LLAMA), 5)[0] == range(0) and cut_layers(skeleton_of(LLAMA), 5)[4] == range(
        3, 3
    )
    assert [len(layers) for layers in cut_layers(skeleton_of(LLAMA), 3, (0, 3, 0))] == [0, 3, 0]
    first, *_, last = spans_of(config_of(LLAMA | {"tie_word_embeddings": True}), 5)
    assert set(first.stage_parameters[0]) == {"model.embed_tokens.weight"}
    assert set(last.stage_parameters[4]) == {"model.norm.weight"} and last.tied_copy is not None


def test_one_layer_on_two_stages_leaves_the_embedding_or_the_head_alone() -> None:
    """Field report G11."""
    one = skeleton_of(LLAMA | {"num_hidden_layers": 1})
    assert [len(layers) for layers in cut_layers(one, 2)] == [1, 0]
    assert [len(layers) for layers in cut_layers(one, 2, (0, 1))] == [0, 1]
    assert [len(layers) for layers in cut_layers(one, 3)] == [0, 1, 0]
    with pytest.raises(SpecError, match="model.stages = 4, must be between 1 and 3"):
        cut_layers(one, 4)


def test_a_stage_that_would_own_no_parameter_is_refused() -> None:
    """OLMo's norms have none, and a tied head is owned by the first stage."""
    tied = skeleton_of(LLAMA | {"model_type": "olmo", "tie_word_embeddings": True})
    assert [len(layers) for layers in cut_layers(tied, 4)] == [0, 1, 1, 1]
    for stages, cut in ((5, ()), (4, (1, 1, 1, 0))):
        with pytest.raises(SpecError, match="model.stages = 5, must be between 1 and 4|model.cut = "):
            cut_layers(tied, stages, cut)


@pytest.mark.parametrize("cut", [(1, 1), (1, 1, 2), (1, 0, 2), (0, 0, 3), (3,)])
def test_a_cut_that_does_not_add_up_is_refused(cut: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="must be 3 numbers"):
        cut_layers(skeleton_of(LLAMA), 3, cut)


def test_a_middle_stage_holds_its_own_layers_only() -> None:
    config = config_of(LLAMA)
    middle = spans_of(config, 3)[1]
    assert {name.split(".")[2] for name in middle.stage_parameters[1]} == {"1"}
    assert sum(p.numel() for p in middle.module.parameters()) == sum(
        p.numel() for p in middle.stage_parameters[1].values()
    )


def test_embeddings_and_head_are_named_on_every_stage() -> None:
    gpt2 = {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}
    for values, names in ((LLAMA, {"model.embed_tokens.weight", "lm_head.weight"}), (GPT2, gpt2)):
        assert all(span.embedding_names == names for span in spans_of(config_of(values), 3))


def test_work_is_what_a_token_is_multiplied_with() -> None:
    width, hidden, vocabulary = 32, 48, VOCAB
    attention, mlp = width * (2 * 32 + 2 * 16), 3 * width * hidden
    skeleton = skeleton_of(LLAMA | {"model_type": "mixtral", "num_local_experts": 8})
    router, experts = 8 * width, 2 * mlp  # two of the eight work for a token
    per_layer = attention + router + experts
    assert skeleton.work() == [0, per_layer, per_layer, per_layer, width * vocabulary]
    assert skeleton.sizes()[2] == attention + router + 8 * mlp + 2 * width


REFUSED = [
    ({"model_type": "t5", "dropout_rate": 0.0}, "t5 is an encoder-decoder model"),
    ({"model_type": "bart"}, "bart is an encoder-decoder model"),
    ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, "keeps a recurrent state"),
    ({"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2}, "keeps a recurrent state"),
    ({"model_type": "gemma3"}, "gemma3 reads more than text; take the config of its text part, gemma3_text"),
    ({"model_type": "llava"}, "llava reads more than text"),
    ({"model_type": "vit"}, "no causal language model"),
    (NARROW | {"model_type": "bert", "tie_word_embeddings": False}, "looks at the tokens it predicts"),
    (NARROW | {"model_type": "roformer", "tie_word_embeddings": False}, "looks at the tokens it predicts"),
    (NARROW | {"model_type": "opt", "layerdrop": 0.1}, r"layerdrop = 0\.1, must be 0"),
    (LLAMA | {"model_type": "mixtral", "output_router_logits": True}, "auxiliary loss"),
    (
        {"model_type": "xlnet", "d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48, "d_head": 8},
        "xlnet cannot be cut into stages: transformer holds parameters of its own",
    ),
]


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_models_that_cannot_be_cut_are_refused_with_the_reason(
    values: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        skeleton_of(values)


def test_documents_are_kept_apart_or_the_model_is_refused() -> None:
    for values, given in ((LLAMA, "positions"), (MORE_FAMILIES["opt"], "mask")):
        assert documents_apart(skeleton_of(values)) == given
    with pytest.raises(ModelError, match='bloom cannot keep documents apart.*packing = "stream"'):
        documents_apart(skeleton_of(MORE_FAMILIES["bloom"]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "llama is quantised"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}}, "needs code of its own"),
        ({"model_type": "own"}, "own"),
    ],
)
def test_config_files_of_models_that_cannot_be_trained_are_refused(
    change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    config_of(LLAMA).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (tmp_path / "code.py").write_text("raise SystemExit('code from a model directory was run')")
    with pytest.raises(ModelError, match=reason):
        config_from_spec(Model(path=str(tmp_path)))


def test_a_config_directory_is_read(tmp_path: Path) -> None:
    config_of(LLAMA).save_pretrained(tmp_path)
    skeleton = read_skeleton(config_from_spec(Model(path=str(tmp_path))))
    assert cut_layers(skeleton, 3) == [range(i, i + 1) for i in range(3)]
