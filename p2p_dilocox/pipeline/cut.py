"""Cutting a Hugging Face causal language model into stages, without knowing its family.

A span keeps the model's class and its own forward. Layers that belong to other stages become pass-throughs
with their indices kept, so parameter names are the names of the whole model, and rotary angles, masks and
layer types come out as in the whole model. One tensor crosses a boundary: the hidden state [b, T, width].
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from p2p_dilocox.errors import SpecError
from p2p_dilocox.model_config import draws_random_numbers
from p2p_dilocox.pipeline.init import fill_
from p2p_dilocox.pipeline.load import find_weights
from p2p_dilocox.pipeline.skeleton import Skeleton, documents_apart, parent_of
from p2p_dilocox.pipeline.span import Entry, PassThrough, Span, SpanModule, Zero

__all__ = ["build_span", "cut_layers"]


def cut_layers(skeleton: Skeleton, stages: int, cut: Sequence[int] = ()) -> list[range]:
    """The layers of each stage. SpecError for numbers that do not fit.

    cut: layers of each stage; empty: balanced. A stage's share is that of the model's parameters or that of
    its compute, whichever is more. The largest share is as small as it can be, the others are as even as that
    allows. Embeddings belong to the first stage, norm and head to the last one. Each may be a stage alone,
    without a layer: if `cut` says so, or if there are more stages than layers.
    """
    layers, (first, last) = len(skeleton.layer_list()), skeleton.ends_alone()
    if not 1 <= stages <= layers + first + last:
        raise SpecError(
            f"model.stages = {stages}, must be between 1 and {layers + first + last}: a stage holds one of "
            f"the {layers} layers of this model at least, the first and the last one an embedding or a head"
        )
    if cut:
        least = [1 - first, *[1] * (stages - 2), 1 - last] if stages > 1 else [1]
        if len(cut) != stages or sum(cut) != layers or any(n < m for n, m in zip(cut, least, strict=True)):
            raise SpecError(
                f"model.cut = {list(cut)}, must be {stages} numbers (model.stages) that add up to {layers}, "
                "the layers of this model; 0 is for a first stage that holds the embedding alone, or a last "
                "one with the head. Without model.cut the stages are balanced"
            )
        borders = [0, *itertools.accumulate(cut)]
    else:
        first, last = first and stages > layers, last and stages > layers
        sizes, work = (_parts(costs, first, last) for costs in (skeleton.sizes(), skeleton.work()))
        borders = [min(max(n - first, 0), layers) for n in _balanced_borders(sizes, work, stages)]
    return [range(start, stop) for start, stop in itertools.pairwise(borders)]


def _parts(costs: list[int], first: bool, last: bool) -> list[int]:
    """Costs of what a stage can be made of. first, last: embedding and head need no layer beside them."""
    before, *layers, after = costs
    if not first:
        layers[0] += before
    if not last:
        layers[-1] += after
    return [*[before] * first, *layers, *[after] * last]


def _balanced_borders(sizes: list[int], work: list[int], parts: int) -> list[int]:
    """Borders of `parts` runs of costs: the largest share is minimal; then the sum of squared shares is.

    Shares are whole numbers, so that every machine finds the same borders.
    """
    num, all_size, all_work = len(sizes), sum(sizes), max(1, sum(work))
    size_to, work_to = ([0, *itertools.accumulate(costs)] for costs in (sizes, work))

    def share(m: int, n: int) -> int:
        return max((size_to[n] - size_to[m]) * all_work, (work_to[n] - work_to[m]) * all_size)

    worst = share(0, num) + 1
    # smallest[k][n]: the best largest share of the first n layers in k parts
    smallest = [[0] + [worst] * num]
    for k in range(1, parts + 1):
        row = [worst] * (num + 1)
        for n in range(k, num + 1):
            row[n] = min(max(smallest[-1][m], share(m, n)) for m in range(k - 1, n))
        smallest.append(row)
    limit = smallest[parts][num]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}  # of the first n layers: sum of squares, borders
    for _ in range(parts):
        step: dict[int, tuple[int, list[int]]] = {}
        for m, (squares, borders) in best.items():
            for n in range(m + 1, num + 1):
                if (here := share(m, n)) > limit:
                    break
                candidate = (squares + here * here, [*borders, n])
                if n not in step or candidate < step[n]:
                    step[n] = candidate
        best = step
    return best[num][1]


def build_span(
    skeleton: Skeleton,
    first_stage: int,
    last_stage: int,
    cuts: Sequence[range],
    *,
    seed: int,
    device: torch.device,
    documents: bool = False,
    weights: Path | None = None,
) -> Span:
    """Stages first_stage to last_stage (included) with their initial parameters, float32 on `device`.

    cuts: what `cut_layers` returned. documents: the documents of a sequence will be kept apart. weights: a
    checkpoint to read the parameters from; None: they are drawn. The whole model exists on the meta device
    only, where a checkpoint is looked through but not read. Raises ModelError, SpecError.
    """
    skeleton = replace(skeleton, model=copy.deepcopy(skeleton.model))  # what follows changes it
    documents_by = documents_apart(skeleton) if documents else ""
    found = find_weights(weights, skeleton) if weights is not None else None
    num_parameters, embedding_names = skeleton.num_parameters, skeleton.embedding_names()
    layers = skeleton.layer_list()
    if not 0 <= first_stage <= last_stage < len(cuts) or cuts[-1].stop != len(layers):
        raise SpecError(
            f"stages {first_stage} to {last_stage} asked for, of {len(cuts)} stages over {cuts[-1].stop} "
            f"layers; the model has {len(layers)} layers"
        )
    stages = range(first_stage, last_stage + 1)
    is_first, is_last = stages.start == 0, stages.stop == len(cuts)
    source = None
    model = skeleton.model
    # Hugging Face's choice, grouped_mm, knows no autocast: experts would compute in float32.
    model.set_experts_implementation("eager")
    copy_name, owner_name = skeleton.tied or ("", "")
    if skeleton.tied:
        source = model.get_submodule(parent_of(owner_name))
        _set_parameter(model, copy_name, None)
    here = range(cuts[first_stage].start, cuts[last_stage].stop)
    own_layers = {f"{skeleton.layers}.{index}": layers[index] for index in here}
    entry = _drop_other_stages(skeleton, here, is_first, is_last)

    drawn = found is None
    fill_(model, "", model, seed=seed, device=device, draw=drawn)
    tied_copy = None
    if source is not None and is_last:
        if not is_first:  # the same values as the owner's, since they depend on its name
            fill_(source, parent_of(owner_name), model, seed=seed, device=device, draw=drawn)
        shared = source.get_parameter(owner_name.rpartition(".")[2])
        _set_parameter(model, copy_name, shared)
        tied_copy = None if is_first else shared
    stage_parameters = _by_stage(skeleton, cuts, stages, tied_copy)
    if found is not None and device.type != "meta":
        held = {name: p for parameters in stage_parameters.values() for name, p in parameters.items()}
        found.read_into(held if tied_copy is None else held | {owner_name: tied_copy}, model)
    return Span(
        module=SpanModule(
            model,
            own_layers,
            layers[max(0, here.stop - 1)],
            entry,
            is_last,
            draws=draws_random_numbers(model.config),
            documents=documents_by,
        ),
        stage_parameters=stage_parameters,
        stages=stages,
        num_stages=len(cuts),
        num_parameters=num_parameters,
        embedding_names=embedding_names,
        tied_name=owner_name or None,
        tied_copy=tied_copy,
    )


def _drop_other_stages(skeleton: Skeleton, here: range, is_first: bool, is_last: bool) -> Entry | None:
    """Replace what other stages hold, also layers outside
    `here`. Returns where activations enter the span."""
    model, layers = skeleton.model, skeleton.layer_list()
    for index, layer in enumerate(layers):
        if index not in here:
            layers[index] = PassThrough(layer, skeleton.layer_outputs)
    for name in () if is_first else skeleton.before:
        module = model.get_submodule(name)
        model.set_submodule(
            name, Zero(module) if isinstance(module, nn.Embedding) else PassThrough(module, 0)
        )
    for name in () if is_last else skeleton.after:
        model.set_submodule(name, PassThrough(model.get_submodule(name), 0))
    if is_first:
        return None
    entry = Entry()
    layers[0].register_forward_pre_hook(entry, with_kwargs=True)
    return entry


def _by_stage(
    skeleton: Skeleton, cuts: Sequence[range], stages: range, tied_copy: nn.Parameter | None
) -> dict[int, dict[str, nn.Parameter]]:
    """The parameters of the span's model under their stages, in the order of the model."""
    found: dict[int, dict[str, nn.Parameter]] = {stage: {} for stage in stages}
    prefix = f"{skeleton.layers}."
    for name, parameter in skeleton.model.named_parameters():
        if parameter is tied_copy:
            continue
        if name.startswith(prefix):
            layer = int(name.removeprefix(prefix).partition(".")[0])
            stage = next(stage for stage in stages if layer in cuts[stage])
        else:
            stage = 0 if parent_of(name) in skeleton.before else len(cuts) - 1
        found[stage][name] = parameter
    return found


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    model.get_submodule(parent_of(name)).register_parameter(name.rpartition(".")[2], parameter)
