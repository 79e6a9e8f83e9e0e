"""The Hugging Face config of a run's model. Only configs are read here: no weights, no code from a model
directory."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_dilocox.errors import ModelError
from p2p_dilocox.settings import Model
from p2p_dilocox.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["load_model_config"]

_OLDER_KEYS = {"rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor"}
"""Not fields of today's config classes, but still understood by them."""


def load_model_config(model: Model) -> "PretrainedConfig":
    """The config that model.config or model.path describes.

    Raises ModelError: unknown model_type, a key this model type does not have (Hugging Face would ignore it),
    values the config class refuses, a path without a readable config.json."""
    from transformers import (
        AutoConfig,
    )  # takes seconds, and a run spec without a model check does not need it

    if model.path:
        if not (Path(model.path) / "config.json").is_file():
            raise ModelError(f"model.path = {model.path}: there is no config.json in it")
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(model.path, local_files_only=True)
        except Exception as error:
            raise ModelError(f"model.path = {model.path}: {_first_lines(error)}") from error
        return config
    values = dict(model.config)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ModelError('model.config has no model_type, a name such as "llama" or "gpt2"')
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise ModelError(f"model.config: {_first_lines(error)}") from error
    known = {f.name for f in fields(config)} | set(config.attribute_map) | _OLDER_KEYS
    for key in values:
        if key not in known:
            raise ModelError(f"model.config: {model_type} has no {key!r}{did_you_mean(key, known)}")
    return config


def _first_lines(error: Exception) -> str:
    """Config classes explain themselves in several lines, and end with lists of hundreds of names."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def count_of(config: Any, key: str) -> int | None:
    """A positive size of the config, such as num_hidden_layers, by the name all model types share; else
    None."""
    value = getattr(config, key, None)
    return value if isinstance(value, int) and value > 0 else None
