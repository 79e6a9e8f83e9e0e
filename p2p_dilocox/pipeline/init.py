"""Initial parameters that depend on the seed of the run and on names only.

Every rank fills just the modules it holds, each from a random stream of its own, so theta_0 is the same for
every number of stages and ranks. It is not what `from_config` gives under one global seed: there the values
of a layer depend on all layers drawn before it.
"""

import hashlib
import math
import threading

import torch
from torch import nn
from transformers import PreTrainedModel

from p2p_dilocox.errors import ModelError

__all__ = ["fill_", "stream_of"]

_GENERATOR = threading.Lock()  # Hugging Face classes draw from torch's global one, which all threads share


def fill_(
    module: nn.Module,
    name: str,
    model: PreTrainedModel,
    *,
    seed: int,
    device: torch.device,
    draw: bool = True,
) -> None:
    """Give a module on the meta device its tensors, with the values `model`'s class prescribes. In place.

    name: of `module` in the whole model, "" for the model itself. Parameters become float32 on `device`.
    draw: False leaves parameters, not buffers, without values, for others to fill them.
    torch's global random state is the same afterwards. Raises
    ModelError if the class leaves a tensor without values.
    """
    if device.type == "meta":
        return  # only shapes are wanted
    with _GENERATOR, torch.no_grad(), torch.random.fork_rng(devices=[]):
        _fill(module, name, model, seed, device, draw)
        _settle(module, device)
    for path, values in module.named_buffers(prefix=name):
        if values.isnan().any():
            raise ModelError(f"{model.config.model_type}: {path} is a tensor without a rule for its values")
    for path, part in module.named_modules(prefix=name):
        for key, value in part.__dict__.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ModelError(
                    f"{model.config.model_type}: {path}.{key} is a tensor without a rule for its values"
                )


def _fill(
    module: nn.Module, name: str, owner: PreTrainedModel, seed: int, device: torch.device, draw: bool
) -> None:
    """Children first, as in transformers: some classes (GPT-2) rescale what their children have drawn."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for key, child in module.named_children():
        _fill(child, f"{name}.{key}" if name else key, owner, seed, device, draw)
        if isinstance(module, PreTrainedModel | nn.ModuleList):
            _settle(child, device)  # a whole layer at a time: nothing above a layer rescales it
    # Drawn in float64 and rounded: torch's float32 normal_() gives other bits on processors without AVX2, and
    # theta_0 must not depend on a volunteer's hardware.
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            dtype = torch.float64 if draw else torch.float32
            values = torch.empty_like(parameter, device="cpu", dtype=dtype)
            if draw:
                values.fill_(math.nan)  # shows what has no rule
            module._parameters[key] = drawn = nn.Parameter(values, requires_grad=parameter.requires_grad)
            drawn._is_hf_initialized = not draw  # type: ignore[attr-defined]  # transformers leaves those alone
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = values = torch.empty_like(buffer, device="cpu")
            if values.is_floating_point():
                values.fill_(math.nan)
    torch.default_generator.manual_seed(stream_of(f"{seed}:{name}"))
    owner._init_weights(module)


def _settle(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if parameter.dtype == torch.float64 and parameter.isnan().any():
                    raise ModelError(
                        f"{key} of {type(part).__name__} is a tensor without a rule for its values"
                    )
                settled = parameter.data.to(device, torch.float32)
                part._parameters[key] = nn.Parameter(settled, requires_grad=parameter.requires_grad)
        for key, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[key] = buffer.to(device)


def stream_of(name: str) -> int:
    """The seed of the random stream that has this name."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes seeds below 2^63
