"""First parameters from a Hugging Face checkpoint. A rank reads the tensors of its own stages and no others.

Checkpoints may have names and layouts that transformers has since changed: GPT-NeoX's head, experts one by
one. Its own table of conversions is used, one parameter at a time, and by export.py the other way round.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import conversion_mapping, core_model_loading

from p2p_dilocox.errors import ModelError
from p2p_dilocox.pipeline.skeleton import Skeleton

__all__ = ["Weights", "find_weights"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_BUFFERS_OF_OLDER_FILES = (r"rotary_emb\.inv_freq$",)
_SHOWN = 3


@dataclass(frozen=True)
class Weights:
    """What a checkpoint has for a model, by names and files. Nothing has been read yet."""

    directory: Path
    files: Mapping[str, str]
    """Key of the checkpoint -> file."""
    sources: Mapping[str, Any]
    """Name of a parameter -> transformers' rule that makes it, and perhaps others beside it, from `keys`."""
    keys: Mapping[str, list[tuple[str, str]]]
    """Name of a parameter -> (key, the rule's pattern that it matches), in order."""
    tied: tuple[str, str] | None

    def read_into(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Fill parameters, by their names in the whole model, from floats of any width. Raises ModelError:
        one is missing, has another shape or another kind of numbers, or a file cannot be read."""
        missing = dict(parameters)
        with self._open() as tensor_of:
            for name, keys in self.keys.items():
                if self._owner(name) not in parameters:
                    continue
                rule = copy.deepcopy(self.sources[name])
                for key, pattern in keys:
                    rule.add_tensor(name, key, pattern, partial(tensor_of, key))
                try:
                    made = rule.convert(name, model=model, config=model.config)
                except (RuntimeError, ValueError, IndexError) as error:
                    raise self._wrong(
                        f"{_few([k for k, _ in keys])} cannot become {name}: {error}"
                    ) from error
                for target, value in made.items():
                    value = value[0] if isinstance(value, list) else value
                    if (parameter := missing.pop(self._owner(target), None)) is not None:
                        self._fill(parameter, target, value)
        if missing:
            raise self._wrong(f"it lacks {_few(missing)}")

    def _fill(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        if value.shape != parameter.shape:
            raise self._wrong(
                f"{name} has the shape {tuple(value.shape)}, and config.json says {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(value)

    def _owner(self, name: str) -> str:
        """Some files store a tied tensor under the head's name."""
        return self.tied[1] if self.tied and name == self.tied[0] and self.tied[1] not in self.keys else name

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}

            def tensor_of(key: str) -> Tensor:
                file = self.files[key]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(self.directory / file, "pt"))
                tensor: Tensor = opened[file].get_tensor(key)
                if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                    raise self._wrong(f"{key} is {str(tensor.dtype).removeprefix('torch.')}, must be floats")
                return tensor

            try:
                yield tensor_of
            except (OSError, SafetensorError) as error:
                raise self._wrong(f"a file of it cannot be read: {error}") from error

    def _wrong(self, reason: str) -> ModelError:
        return ModelError(f"the weights in {self.directory} do not fit: {reason}")


def find_weights(directory: Path, skeleton: Skeleton) -> Weights:
    """Look through a checkpoint's index. Raises ModelError: there is none or only a pickled one, a file of it
    is not there, it has a tensor that the model does not have."""
    files = _files(directory)
    if absent := sorted({file for file in files.values() if not (directory / file).is_file()}):
        raise ModelError(f"the weights in {directory} are not complete: {_few(absent)} is not there")
    model = skeleton.model
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [r for r in rules if isinstance(r, core_model_loading.WeightRenaming)]
    converters = [r for r in rules if isinstance(r, core_model_loading.WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = dict(model.named_parameters(remove_duplicate=False))
    sources: dict[str, Any] = {}
    keys: dict[str, list[tuple[str, str]]] = {}
    unknown = []
    for key in sorted(files, key=core_model_loading.dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, names)
        if name not in names:
            name, pattern = core_model_loading.rename_source_key(key, [], [], prefix, names)
        if name not in names:
            unknown.append(key)
            continue
        rule = converter_of[pattern] if pattern else core_model_loading.WeightRenaming(key, name)
        sources.setdefault(name, rule)
        keys.setdefault(name, []).append((key, pattern or key))
    ignored = (*_BUFFERS_OF_OLDER_FILES, *(model._keys_to_ignore_on_load_unexpected or ()))
    unknown = [key for key in unknown if not any(re.search(pattern, key) for pattern in ignored)]
    if unknown:
        raise ModelError(f"the weights in {directory} do not fit: this model has no {_few(unknown)}")
    return Weights(directory, files, sources, keys, skeleton.tied)


def _files(directory: Path) -> dict[str, str]:
    index, single = directory / _INDEX, directory / _SINGLE
    try:
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(key): str(file) for key, file in weight_map.items()}
            if outside := sorted({file for file in files.values() if Path(file).name != file}):
                raise ModelError(f"{index} names {outside[0]}, which is not beside it")
            return files
        if single.is_file():
            with safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ModelError(f"the weights in {directory} cannot be read: {error}") from error
    if any((directory / name).is_file() for name in _PICKLED):
        raise ModelError(
            f"the weights in {directory} are pickled (.bin), and reading those can run any code. Where you "
            "trust them, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors"
        )
    raise ModelError(
        f'model.start = "weights", but {directory} has neither {_SINGLE} nor {_INDEX}. Put them there, or '
        'set model.start = "seed"'
    )


def _few(names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
