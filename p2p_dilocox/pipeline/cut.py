"""Cutting a Hugging Face causal language model into stages, without knowing its family.

A span keeps the model's class and its own forward. Layers that belong to other stages become pass-throughs
with their indices kept, so parameter names are the names of the whole model, and rotary angles, masks and
layer types come out as in the whole model. One tensor crosses a boundary: the hidden state [b, T, width].
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from p2p_dilocox.errors import SpecError
from p2p_dilocox.pipeline.init import fill_
from p2p_dilocox.pipeline.skeleton import Skeleton, parent_of, read_skeleton
from p2p_dilocox.pipeline.span import Entry, PassThrough, Span, SpanModule, Zero

__all__ = ["build_span", "cut_layers", "stages_of_rank"]


def cut_layers(config: PretrainedConfig, stages: int, cut: Sequence[int] = ()) -> list[range]:
    """The layers of each stage. SpecError for numbers that do not fit, ModelError for an unsupported model.

    cut: layers of each stage; empty: the largest stage, counted in parameters with embeddings and head, is as
    small as it can be, and the others are as even as that allows.
    """
    costs = read_skeleton(config).costs()
    if not 1 <= stages <= len(costs):
        raise SpecError(
            f"model.stages = {stages}, must be between 1 and {len(costs)}, the layers of this model: a stage "
            "holds at least one layer"
        )
    if cut and (len(cut) != stages or sum(cut) != len(costs) or min(cut) < 1):
        raise SpecError(
            f"model.cut = {list(cut)}, must be {stages} numbers (model.stages) of at least 1 that add up to "
            f"{len(costs)}, the layers of this model. Without model.cut the stages are balanced by parameters"
        )
    borders = [0, *itertools.accumulate(cut)] if cut else _balanced_borders(costs, stages)
    return [range(start, stop) for start, stop in itertools.pairwise(borders)]


def _balanced_borders(costs: list[int], parts: int) -> list[int]:
    """Borders of `parts` runs of costs: the largest sum is minimal; then the sum of squares is."""
    total = [0, *itertools.accumulate(costs)]
    # smallest[k][n]: the best largest sum of the first n costs in k parts
    smallest = [[0] + [total[-1] + 1] * len(costs)]
    for k in range(1, parts + 1):
        row = [total[-1] + 1] * (len(costs) + 1)
        for n in range(k, len(costs) + 1):
            row[n] = min(max(smallest[-1][m], total[n] - total[m]) for m in range(k - 1, n))
        smallest.append(row)
    limit = smallest[parts][len(costs)]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}  # of the first n costs: sum of squares, borders
    for _ in range(parts):
        step: dict[int, tuple[int, list[int]]] = {}
        for m, (squares, borders) in best.items():
            for n in range(m + 1, len(costs) + 1):
                if (size := total[n] - total[m]) > limit:
                    break
                candidate = (squares + size * size, [*borders, n])
                if n not in step or candidate < step[n]:
                    step[n] = candidate
        best = step
    return best[len(costs)][1]


def stages_of_rank(stages: int, num_ranks: int, rank: int) -> range:
    """The consecutive stages that a rank holds; counts differ by at most one. Raises SpecError."""
    if not 1 <= num_ranks <= stages:
        raise SpecError(
            f"{num_ranks} ranks for model.stages = {stages}, must be between 1 and {stages}: every rank "
            "holds at least one stage. Give this cluster fewer devices, or the run more stages"
        )
    if not 0 <= rank < num_ranks:
        raise SpecError(f"rank = {rank}, must be between 0 and {num_ranks - 1}")
    return range(stages * rank // num_ranks, stages * (rank + 1) // num_ranks)


def build_span(
    config: PretrainedConfig,
    first_stage: int,
    last_stage: int,
    cuts: Sequence[range],
    *,
    seed: int,
    device: torch.device,
) -> Span:
    """Stages first_stage to last_stage (included) with their initial parameters, float32 on `device`.

    cuts: what `cut_layers` returned. The whole model exists on
    the meta device only. Raises ModelError, SpecError.
    """
    skeleton = read_skeleton(config)
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
    copy_name, owner_name = skeleton.tied or ("", "")
    if skeleton.tied:
        source = model.get_submodule(parent_of(owner_name))
        _set_parameter(model, copy_name, None)
    entry = _drop_other_stages(
        skeleton, range(cuts[first_stage].start, cuts[last_stage].stop), is_first, is_last
    )

    fill_(model, "", model, seed=seed, device=device)
    tied_copy = None
    if source is not None and is_last:
        if not is_first:  # the same values as the owner's, since they depend on its name
            fill_(source, parent_of(owner_name), model, seed=seed, device=device)
        shared = source.get_parameter(owner_name.rpartition(".")[2])
        _set_parameter(model, copy_name, shared)
        tied_copy = None if is_first else shared
    return Span(
        module=SpanModule(model, entry, is_last),
        stage_parameters=_by_stage(skeleton, cuts, stages, tied_copy),
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
    layers[0] = entry = Entry(layers[0], skeleton.layer_outputs)
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
