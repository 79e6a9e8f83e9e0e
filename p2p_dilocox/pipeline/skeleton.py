"""What a Hugging Face causal language model is made of, read from a copy without weights that is run once.

No code here knows a model family. The copy lives on torch's meta device, hooks watch one forward pass, and
what they see decides where the model can be cut: modules called before the first layer belong to the first
stage, modules called after the last layer to the last stage. A model in which more than the hidden state
travels from layer to layer cannot be cut this way and is refused.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from p2p_dilocox.errors import ModelError

__all__ = ["Skeleton", "documents_apart", "parent_of", "read_skeleton"]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the meta device and the names of its parts. Names are those of Hugging Face."""

    model: PreTrainedModel
    layers: str
    """The ModuleList of the layers."""
    before: tuple[str, ...]
    """Modules that own parameters and run before the first layer, such as embeddings."""
    after: tuple[str, ...]
    """Modules that own parameters and run after the last layer, such as final norm and head."""
    tied: tuple[str, str] | None
    """(copy, owner): parameter names of the head and of the embedding that are one tensor, if they are."""
    layer_outputs: int
    """0 if a layer returns a tensor, else the length of the tuple it returns."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied tensor counts once."""
        return sum(p.numel() for p in self.model.parameters())

    def sizes(self) -> list[int]:
        """Parameters that each part brings to a rank: embeddings, then each layer, then norm and head.

        A tied tensor counts at both ends: the last stage holds and computes with a copy of it.
        """
        before, after = (
            sum(p.numel() for p in self._own_parameters(side)) for side in (self.before, self.after)
        )
        return [before, *(sum(p.numel() for p in layer.parameters()) for layer in self.layer_list()), after]

    def work(self) -> list[int]:
        """Multiplications with parameters per token that each part brings to a rank, norms left out. An
        embedding looks up, and of a mixture only the experts of a token compute; the head does count."""
        before, after = (
            sum(
                self._work_of(p)
                for module in map(self.model.get_submodule, side)
                if not isinstance(module, nn.Embedding)
                for p in module.parameters(recurse=False)
            )
            for side in (self.before, self.after)
        )
        layers = (sum(self._work_of(p) for p in layer.parameters()) for layer in self.layer_list())
        return [before, *layers, after]

    def ends_alone(self) -> tuple[bool, bool]:
        """Whether what runs before the layers, and what runs after them, owns a parameter. Only then it can
        be a stage without layers: a copy of a tied tensor is owned by the other end."""
        shared = self.model.get_parameter(self.tied[1]) if self.tied else None
        return (
            any(True for _ in self._own_parameters(self.before)),
            any(p is not shared for p in self._own_parameters(self.after)),
        )

    def _work_of(self, parameter: nn.Parameter) -> int:
        if parameter.dim() < 3:
            return parameter.numel() if parameter.dim() == 2 else 0
        active = getattr(self.model.config, "num_experts_per_tok", None) or len(parameter)
        return parameter.numel() * min(active, len(parameter)) // len(parameter)

    def embedding_names(self) -> frozenset[str]:
        """Parameters of embeddings, learned positions included, and of the output head."""
        model = self.model
        embeddings = [name for name in self.before if isinstance(model.get_submodule(name), nn.Embedding)]
        heads = [name for name in self.after if model.get_submodule(name) is model.get_output_embeddings()]
        return frozenset(
            f"{module}.{name}"
            for module in (*embeddings, *heads)
            for name, _ in model.get_submodule(module).named_parameters(recurse=False)
        )

    def layer_list(self) -> nn.ModuleList:
        layers = self.model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def _own_parameters(self, names: Iterable[str]) -> Iterator[nn.Parameter]:
        for module in map(self.model.get_submodule, names):
            yield from module.parameters(recurse=False)


def parent_of(name: str) -> str:
    """The module that holds a parameter or module: parent_of("lm_head.weight") == "lm_head"."""
    return name.rpartition(".")[0]


def read_skeleton(config: PretrainedConfig) -> Skeleton:
    """Raises ModelError, with the reason, for a model that cannot be cut. Takes 0.2 s for 28 layers."""
    model = _model_on_meta(config)
    layers = _layers_name(model)
    watch = _Watch(model, layers)
    if kept := model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        raise watch.refusal(
            f"it keeps {min(kept)} beside its parameters, which nothing would average or save"
        )
    _forward(model, watch)
    return Skeleton(
        model=model,
        layers=layers,
        before=tuple(watch.before),
        after=tuple(watch.after),
        tied=_tied_pair(model, watch),
        layer_outputs=watch.layer_outputs,
    )


def documents_apart(skeleton: Skeleton) -> Literal["positions", "mask"]:
    """What the model must be given so that tokens see their own document only: positions that begin again,
    which most families read so, or a mask as well. Raises ModelError if it has no such input."""
    model, positions = skeleton.model, torch.zeros(1, 4, dtype=torch.long, device="meta")
    kind = model.config.model_type
    try:
        with _packing_read():
            model(input_ids=positions, position_ids=positions, use_cache=False)
    except _PackingRead:
        return "positions"
    except Exception as error:  # any code of a model may fail; a ModelError says how
        raise ModelError(
            f"{kind} cannot keep documents apart: it takes no positions ({_brief(error)}). Set "
            'data.packing = "stream" or "padded"'
        ) from error
    mask, seen = torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta"), 0

    def look(_layer: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal seen
        seen += kwargs.get("attention_mask") is mask

    handles = [x.register_forward_pre_hook(look, with_kwargs=True) for x in skeleton.layer_list()]
    with contextlib.suppress(Exception):
        model(input_ids=positions, position_ids=positions, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    windows = getattr(model.config, "sliding_window", None)
    if seen != len(handles) or windows or model.config._attn_implementation != "sdpa":
        raise ModelError(
            f"{kind} cannot keep documents apart: its layers take no mask as it is. Set "
            'data.packing = "stream" or "padded"'
        )
    return "mask"


class _PackingRead(Exception):  # noqa: N818  # a signal
    """The model is about to take positions that begin again for documents."""


@contextlib.contextmanager
def _packing_read() -> Iterator[None]:
    """Raises _PackingRead where a model would look at its positions. Without values it could not go on."""

    def read(position_ids: Tensor) -> NoReturn:
        raise _PackingRead

    real = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = read
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = real


def _model_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    failures: list[Exception] = []
    for attention in ("sdpa", "eager"):  # a few families (Gemma 2, Bloom) have no sdpa
        try:
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config),
                    dtype=torch.float32,
                    attn_implementation=attention,
                    experts_implementation="batched_mm",  # takes float32 and needs no values
                    trust_remote_code=False,
                )
        except Exception as error:  # noqa: BLE001  # Hugging Face raises anything; it becomes a ModelError below
            failures.append(error)
            continue
        if getattr(model, "_is_stateful", False):
            raise ModelError(f"{config.model_type} keeps a recurrent state; only attention models can be cut")
        fills_gaps = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
            config, "is_decoder", False
        )
        if fills_gaps or any(getattr(module, "is_causal", True) is False for module in model.modules()):
            raise ModelError(f"{config.model_type} looks at the tokens it predicts; causal models can be cut")
        return model
    raise ModelError(
        f"{config.model_type} is no causal language model: {_brief(failures[-1])}"
    ) from failures[-1]


def _layers_name(model: PreTrainedModel) -> str:
    """The outermost ModuleList with one entry per layer."""
    wanted = getattr(model.config, "num_hidden_layers", None)
    found = [
        str(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if not wanted or len(outermost) != 1:
        raise ModelError(
            f"{model.config.model_type} cannot be cut: it has {len(outermost)} lists of "
            f"num_hidden_layers = {wanted} modules, and exactly one is needed"
        )
    return outermost[0]


class _Watch:
    """Sees one forward pass through hooks."""

    def __init__(self, model: PreTrainedModel, layers: str) -> None:
        self.model_type: str = model.config.model_type
        self.layers = layers
        self.layer_list = list(model.get_submodule(layers).children())
        self.owners = {
            name: module
            for name, module in model.named_modules()
            if not name.startswith(f"{layers}.") and any(True for _ in module.parameters(recurse=False))
        }
        self.start()

    def start(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        self.layer_outputs = 0
        self.layers_done = 0
        self.hidden: Tensor | None = None

    def hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for index, layer in enumerate(self.layer_list):
            yield layer.register_forward_pre_hook(self.layer_called(index), with_kwargs=True)
            yield layer.register_forward_hook(self.layer_returned)
        for name, module in self.owners.items():
            yield module.register_forward_pre_hook(self.owner_called(name))

    def layer_called(self, index: int) -> Any:
        def hook(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index != self.layers_done:
                raise self.refusal(f"layer {index} runs as number {self.layers_done + 1}")
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, Tensor) or hidden.dim() != 3:
                raise self.refusal("its layers do not take one hidden state [batch, sequence, width]")
            if index > 0 and hidden is not self.hidden:
                raise self.refusal(f"the input of layer {index} is not the output of the layer before it")
            beside = (*args[1:], *(value for value in kwargs.values() if value is not hidden))
            if any(tensor.requires_grad for tensor in _tensors(beside)):
                raise self.refusal(f"layer {index} needs a second trained input beside the hidden state")

        return hook

    def layer_returned(self, _layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.layer_outputs = len(output) if isinstance(output, tuple) else 0
        self.hidden = output[0] if isinstance(output, tuple) else output
        self.layers_done += 1

    def owner_called(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...]) -> None:
            if self.layers == name or self.layers.startswith(f"{name}.") or name == "":
                raise self.refusal(f"{name or 'the model'} holds parameters of its own beside its layers")
            if 0 < self.layers_done < len(self.layer_list):
                raise self.refusal(f"{name} runs between two layers")
            side = self.before if self.layers_done == 0 else self.after
            if side is self.after and name in self.before:
                raise self.refusal(f"{name} runs before and after the layers")
            if name not in side:
                side.append(name)

        return hook

    def refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self.model_type} cannot be cut into stages: {reason}")


def _forward(model: PreTrainedModel, watch: _Watch) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    # Hugging Face looks into the data when it builds a causal mask, and there is none here: a finished mask
    # avoids that. Models that insist on a 2D mask get none.
    masks = (torch.zeros(1, 1, 4, 4, device="meta"), None)
    handles = list(watch.hooks())
    failures: list[Exception] = []
    try:
        for mask in masks:
            watch.start()
            try:
                model(input_ids=tokens, attention_mask=mask, use_cache=False)
                break
            except Exception as error:  # noqa: BLE001  # any code of a model may fail; a ModelError says how
                failures.append(error)
        else:
            refusals = [failure for failure in failures if isinstance(failure, ModelError)]
            raise refusals[0] if refusals else watch.refusal(f"a trial run failed: {_brief(failures[0])}")
    finally:
        for handle in handles:
            handle.remove()
    if watch.layers_done != len(watch.layer_list):
        raise watch.refusal(f"{watch.layers_done} of {len(watch.layer_list)} layers ran")
    if unused := [name for name in watch.owners if name not in (*watch.before, *watch.after)]:
        raise watch.refusal(f"{', '.join(unused)} did not run")


def _tied_pair(model: PreTrainedModel, watch: _Watch) -> tuple[str, str] | None:
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    groups = [names for names in shared.values() if len(names) > 1]
    if not groups:
        return None
    names = groups[0]
    owner = [name for name in names if parent_of(name) in watch.before]
    held = [name for name in names if parent_of(name) in watch.after]
    if len(groups) > 1 or len(owner) != 1 or len(held) != 1 or len(names) != 2:
        raise watch.refusal(f"it ties {', '.join(names)}; only one embedding and one head may share a tensor")
    return held[0], owner[0]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."
