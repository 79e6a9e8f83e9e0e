"""A run spec on one screen, for people who decide whether to host or to join."""

from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from p2p_dilocox.data.text import source_files
from p2p_dilocox.errors import DataError
from p2p_dilocox.pipeline import config_from_spec, cut_layers
from p2p_dilocox.pipeline.load import find_weights
from p2p_dilocox.pipeline.skeleton import Skeleton, read_skeleton
from p2p_dilocox.runspec import RunSpec, total_inner_steps, warnings_for
from p2p_dilocox.traffic import fp16_bytes, round_bytes, tensors_of

from .view import bytes_text

__all__ = ["spec_summary"]


def spec_summary(spec: RunSpec) -> Group:
    """One line per subject, then the warnings. Raises ModelError if the model cannot be built and cut."""
    warnings = [*warnings_for(spec), *_data_warnings(spec)]
    table = Table.grid(padding=(0, 2))
    run, inner, data, compression = spec.run, spec.inner, spec.data, spec.compression
    tokens = total_inner_steps(spec) * inner.batch_size * data.seq_len
    coding = f"{compression.bits} bits there, {compression.return_bits} back, groups of {compression.group}"
    if compression.top < 1:
        coding = f"the largest {compression.top:.4g} of the values, {coding}"
    lowrank = f"lowrank {compression.lowrank}, " if compression.lowrank else ""
    if lowrank and not compression.factor_embeddings:
        lowrank += "embeddings and head whole, "
    if lowrank and compression.strong_bits > compression.bits and compression.strong_fraction:
        lowrank += f"the strongest {compression.strong_fraction:.4g} in {compression.strong_bits} bits, "
    model = f"{spec.model.config.get('model_type', 'from ' + spec.model.path)} in {spec.model.stages} stages"
    traffic = cut = start = "not known without the model"
    if spec.model.config or (Path(spec.model.path) / "config.json").is_file():
        skeleton = read_skeleton(config_from_spec(spec.model))  # runs the model once, without values
        tensors = tensors_of(spec, skeleton)
        model = f"{skeleton.model.config.model_type} in {spec.model.stages} stages"
        model += f", {tensors.num_parameters:,} parameters" + (", head tied" if skeleton.tied else "")
        cut, start = _cut_text(spec, skeleton), _start_text(spec, skeleton)
        traffic = (
            f"{bytes_text(round_bytes(spec, tensors, 2))} per outer step from each of two clusters "
            f"(fp16: {bytes_text(fp16_bytes(tensors.num_parameters, 2))})"
        )
    rows = {
        "run": f"{run.id}, recipe {run.recipe}, {run.outer_steps} outer steps, "
        f"at least {run.min_clusters} clusters",
        "model": model,
        "cut": cut,
        "start": start,
        "data": f"{data.source}, sequences of {data.seq_len} tokens, packing {data.packing}, "
        f"{tokens:,} tokens per cluster",
        "inner": f"H {inner.H}, batch {inner.batch_size} in {inner.microbatches} microbatches, "
        f"lr {inner.lr:g}",
        "outer": f"lr {spec.outer.lr:g}, momentum {spec.outer.momentum:g}, overlap {spec.overlap.mode}",
        "compression": f"{lowrank}{coding}, feedback {compression.feedback}",
        "traffic": traffic,
        "deadlines": f"a round within {spec.deadlines.round_s:g} s",
    }
    for subject, text in rows.items():
        table.add_row(subject, text)
    return Group(table, *(Text(f"warning: {warning}", "yellow") for warning in warnings))


def _cut_text(spec: RunSpec, skeleton: Skeleton) -> str:
    parts = []
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    for stage, layers in enumerate(cuts):
        # Costs of embedding and head stand before and after those of the layers.
        start, stop = layers.start + (stage > 0), layers.stop + 1 + (stage == len(cuts) - 1)
        memory, work = (sum(costs[start:stop]) / sum(costs) for costs in (skeleton.sizes(), skeleton.work()))
        which = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}-{layers.stop - 1}"
        which = which if layers else "head" if stage else "embedding"
        parts.append(f"{which}: {memory:.0%} of memory, {work:.0%} of work")
    return "; ".join(parts)


def _start_text(spec: RunSpec, skeleton: Skeleton) -> str:
    if spec.model.start == "seed":
        return f"parameters drawn with seed {spec.run.seed}"
    weights = find_weights(Path(spec.model.path), skeleton)
    return f"{len(weights.files)} tensors in {len(set(weights.files.values()))} files of {spec.model.path}"


def _data_warnings(spec: RunSpec) -> list[str]:
    """The machine that signs a run need not be one that trains, so its lack of the data is no error."""
    try:
        source_files(spec.data)
    except DataError as error:
        return [f"{error}; clusters need it"]
    return []
