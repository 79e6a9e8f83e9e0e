"""The Hugging Face config of a run's model. Only configs are read
here: no weights, no code from a model directory."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_dilocox.errors import ModelError
from p2p_dilocox.settings import Model
from p2p_dilocox.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["draws_random_numbers", "load_model_config"]

_OLDER_KEYS = {"rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor"}
"""Not fields of today's config classes, but still understood by them."""

_OTHER_HEADS = ("summary_", "classifier_")
"""Prefixes of config keys for heads that a causal language model does not have."""


def load_model_config(model: Model) -> "PretrainedConfig":
    """The config that model.config or model.path describes.

    Raises ModelError: unknown model_type, a key this model type does not have (Hugging Face would ignore it),
    values the config class refuses, a kind of model that cannot be trained here, a path without a readable
    config.json.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # here, because it takes seconds

    if model.path:
        if not (Path(model.path) / "config.json").is_file():
            raise ModelError(f"there is no config.json in {model.path}")
        model_type, has_code = _kind_of(Path(model.path) / "config.json")
        if has_code and model_type not in CONFIG_MAPPING:
            raise ModelError(f"{model_type} in {model.path} needs code of its own, which is never run here")
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                model.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ModelError(f"the config.json in {model.path}: {_first_lines(error)}") from error
        _refuse(config)
        return config
    values = dict(model.config)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ModelError('it has no model_type, a name such as "llama" or "gpt2"')
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise ModelError(_first_lines(error)) from error
    known = {f.name for f in fields(config)} | set(config.attribute_map) | _OLDER_KEYS
    for key in values:
        if key not in known:
            raise ModelError(f"{model_type} has no {key!r}{did_you_mean(key, known)}")
    _refuse(config)
    return config


def _kind_of(file: Path) -> tuple[str, bool]:
    """The model_type of a config.json, and whether it names code that comes with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return str(content.get("model_type")), "auto_map" in content
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _refuse(config: "PretrainedConfig") -> None:
    """What is wrong for training in stages can be seen from the config alone."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder-decoder model; only decoder-only models can be cut")
    if config.get_text_config() is not config:
        text = config.get_text_config().model_type
        raise ModelError(f"{kind} reads more than text; take the config of its text part, {text}")
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{kind} is quantised, and such weights cannot be trained; take the unquantised model"
        )
    if rate := getattr(config, "layerdrop", 0):
        raise ModelError(f"layerdrop = {rate:g}, must be 0: whole layers cannot be left out of a pipeline")
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits = true, must be false: the auxiliary loss of a mixture of experts needs "
            "the routers of all layers, and no stage has them"
        )


def draws_random_numbers(config: "PretrainedConfig") -> bool:
    """Whether the model draws random numbers in training: dropout, or noise in a router."""
    return any(
        value > 0
        for key, value in config.to_dict().items()
        if ("drop" in key or "jitter" in key)
        and not key.startswith(_OTHER_HEADS)
        and isinstance(value, int | float)
    )


def _first_lines(error: Exception) -> str:
    """Config classes explain themselves in several lines, and end with lists of hundreds of names."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def count_of(config: Any, key: str) -> int | None:
    """A positive size of the config, such as num_hidden_layers,
    by the name all model types share; else None."""
    value = getattr(config, key, None)
    return value if isinstance(value, int) and value > 0 else None
