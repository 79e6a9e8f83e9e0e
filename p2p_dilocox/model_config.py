"""The Hugging Face config of a run's model. Only configs are read
here: no weights, no code from a model directory."""

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

_OTHER_HEADS = ("summary_", "classifier_")
"""Prefixes of config keys for heads that a causal language model does not have."""


def load_model_config(model: Model) -> "PretrainedConfig":
    """The config that model.config or model.path describes.

    Raises ModelError: unknown model_type, a key this model type does not have (Hugging Face would ignore it),
    values the config class refuses, dropout, a path without a readable config.json.
    """
    from transformers import AutoConfig  # here, because it takes seconds

    if model.path:
        if not (Path(model.path) / "config.json").is_file():
            raise ModelError(f"there is no config.json in {model.path}")
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                model.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ModelError(f"the config.json in {model.path}: {_first_lines(error)}") from error
        _refuse_dropout(config)
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
    _refuse_dropout(config)
    return config


def _refuse_dropout(config: "PretrainedConfig") -> None:
    """Each stage draws from its own random stream: cut models with dropout differ from the whole one."""
    given = [
        f"{key} = {value:g}"
        for key, value in config.to_dict().items()
        if "drop" in key and not key.startswith(_OTHER_HEADS) and isinstance(value, int | float) and value > 0
    ]
    if given:
        raise ModelError(f"{', '.join(given)}, must be 0: stages cannot drop out as the whole model would")


def _first_lines(error: Exception) -> str:
    """Config classes explain themselves in several lines, and end with lists of hundreds of names."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def count_of(config: Any, key: str) -> int | None:
    """A positive size of the config, such as num_hidden_layers,
    by the name all model types share; else None."""
    value = getattr(config, key, None)
    return value if isinstance(value, int) and value > 0 else None
