"""Rules of a run spec that involve several keys, or the model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from p2p_dilocox.errors import DataError, ModelError
from p2p_dilocox.model_config import count_of, load_model_config
from p2p_dilocox.settings import RunSpec, adapted_inner_steps, most_inner_steps, total_inner_steps
from p2p_dilocox.stability import unstable
from p2p_dilocox.tokenizer import EMBEDDED_TOKENIZER, end_of_text_id, vocabulary_size

__all__ = ["RULES", "Finding", "warnings_for"]

Finding = tuple[str, str]
"""The key to blame, as "table.key", and what follows `key = value, ` (`[table.key] ` if that is a table)."""


def _quorum(spec: RunSpec) -> Iterator[Finding]:
    if spec.run.quorum > spec.run.min_clusters:
        yield (
            "run.quorum",
            f"must be at most min_clusters = {spec.run.min_clusters}, with which the run begins",
        )


def _microbatches(spec: RunSpec) -> Iterator[Finding]:
    inner = spec.inner
    if inner.batch_size % inner.microbatches:
        yield "inner.batch_size", f"must be a multiple of inner.microbatches = {inner.microbatches}"


def _warmup(spec: RunSpec) -> Iterator[Finding]:
    steps = total_inner_steps(spec)
    if spec.inner.warmup_steps > steps:
        yield "inner.warmup_steps", f"must be at most {steps}, all inner steps of the run (outer_steps * H)"


def _keep(spec: RunSpec) -> Iterator[Finding]:
    mode = spec.overlap.mode
    if mode in ("eager", "paper", "none") and spec.overlap.keep != 0:
        yield "overlap.keep", f'must be 0 with overlap.mode = "{mode}", which goes on from the anchor'


def _drawn(spec: RunSpec) -> Iterator[Finding]:
    """A fraction of the values, another one each time: no direction lasts, and no momentum of a value."""
    if spec.schedule.fraction == 1:
        return
    if spec.schedule.fragments > 1:
        yield "schedule.fragments", "must be 1 with a schedule.fraction below 1"
    if spec.outer.momentum > 0:
        yield "outer.momentum", "must be 0 with a schedule.fraction below 1: a value is averaged seldom"
    if spec.compression.lowrank > 0:
        yield "compression.lowrank", "must be 0 with a schedule.fraction below 1"
    if spec.compression.feedback not in ("parameters", "none"):
        yield "compression.feedback", 'must be "parameters" or "none" with a schedule.fraction below 1'


def _eager(spec: RunSpec) -> Iterator[Finding]:
    if spec.overlap.mode != "eager":
        return
    if spec.schedule.fragments > 1 or spec.schedule.fraction < 1:
        yield "overlap.mode", 'cannot be "eager" where a round averages a part of the model'
    if spec.compression.feedback == "parameters":
        yield "compression.feedback", 'cannot be "parameters" with overlap.mode = "eager"'


def _adapt(spec: RunSpec) -> Iterator[Finding]:
    """Rank and H are adapted where all of the model is averaged in every round."""
    adapt = spec.adapt
    if adapt.rule != "none":
        if spec.schedule.fragments > 1 or spec.schedule.fraction < 1:
            yield "adapt.rule", 'must be "none" where a round averages a part of the model'
        if spec.local.every > 0:
            yield "local.every", "must be 0 with an adapt.rule: outer steps have no fixed length"
        if adapt.H_max and adapt.H_max < max(adapt.H_min, 1):
            yield "adapt.H_max", f"must be at least H_min = {adapt.H_min}"
    longest = most_inner_steps(spec)
    if spec.data.order == "shards" and longest > spec.inner.H:
        yield "data.order", f"cannot be shards where an outer step may have {longest} inner steps, above H"
    if spec.outer.average == "gradient" and (adapt.rule != "none" or adapt.startup_steps > 0):
        yield "outer.average", 'cannot be "gradient" with an adapt.rule or a start-up phase'
    if spec.overlap.mode == "delay":
        least, _ = adapted_inner_steps(spec)
        least = min(least, adapt.startup_H) if adapt.startup_steps else least
        if spec.overlap.delay > least:
            yield "overlap.delay", f"must be at most {least}, the least H that an outer step may have"


def _gradient(spec: RunSpec) -> Iterator[Finding]:
    if spec.outer.average != "gradient":
        return
    if spec.overlap.mode != "none":
        yield "overlap.mode", 'must be "none" with outer.average = "gradient": the next one needs the step'
    if spec.local.every > 0:
        yield "local.every", 'must be 0 with outer.average = "gradient": nothing moves in between'
    if spec.schedule.fragments > 1 or spec.schedule.fraction < 1:
        yield "outer.average", "must be pseudo-gradient where a round averages a part of the model"
    if spec.compression.feedback == "parameters":
        yield "compression.feedback", 'cannot be "parameters" with outer.average = "gradient"'


def _top(spec: RunSpec) -> Iterator[Finding]:
    if spec.compression.top < 1 and spec.compression.lowrank > 0:
        yield "compression.lowrank", "must be 0 with a compression.top below 1: factors have no small values"


def _feedback_in_parameters(spec: RunSpec) -> Iterator[Finding]:
    if spec.compression.feedback != "parameters":
        return
    if spec.compression.gamma != 1:
        yield "compression.gamma", 'must be 1 with feedback = "parameters": what was not said stays in them'
    if spec.overlap.mode == "delay" and spec.overlap.keep != 0:
        yield "overlap.keep", 'must be 0 with mode = "delay" and compression.feedback = "parameters"'


def _strong_bits(spec: RunSpec) -> Iterator[Finding]:
    compression = spec.compression
    if compression.strong_bits < compression.bits:
        yield (
            "compression.strong_bits",
            f"must be at least bits = {compression.bits}, what the weaker directions have",
        )


def _source(spec: RunSpec) -> Iterator[Finding]:
    data = spec.data
    if data.source in ("text", "jsonl", "parquet"):
        if not data.paths:
            yield "data.paths", f'must name at least one file or directory for data.source = "{data.source}"'
    elif data.paths:
        yield "data.paths", f'must be left out with data.source = "{data.source}"'
    if data.source == "hub" and not data.name:
        yield "data.name", 'must name a dataset for data.source = "hub"'
    if data.source != "hub" and (data.name or data.subset):
        key = "name" if data.name else "subset"
        yield f"data.{key}", f'must be left out with data.source = "{data.source}"'


def _packing(spec: RunSpec) -> Iterator[Finding]:
    """A tokenizer that is not on this machine is left to warnings_for."""
    try:
        nothing_ends = spec.data.packing != "stream" and end_of_text_id(spec.data.tokenizer) is None
    except DataError:
        return
    if nothing_ends:
        yield (
            "data.packing",
            'must be "stream" with a tokenizer that has no end-of-text token (eos_token in '
            "tokenizer_config.json): nothing tells documents apart",
        )
    if spec.data.packing != "stream" and spec.data.seq_len < 2:
        yield "data.seq_len", f'must be at least 2 with data.packing = "{spec.data.packing}"'


def _one_model(spec: RunSpec) -> Iterator[Finding]:
    if spec.model.config and spec.model.path:
        yield "model.path", "must be left out if there is a [model.config]"
    if spec.model.start == "weights" and not spec.model.path:
        yield "model.start", 'must be "seed" without a model.path: there are no weights to read'
    if not spec.model.config and not spec.model.path:
        yield "model.config", 'must be set (or model.path), for example { model_type = "llama", ... }'


def _model(spec: RunSpec) -> Iterator[Finding]:
    """Cut, sequence length and vocabulary against the config. A model.path that is not on this machine is
    left to warnings_for: the machine that signs a run need not be one that trains."""
    model = spec.model
    if bool(model.config) == bool(model.path) or (model.path and not _has_config(model.path)):
        return
    try:
        config = load_model_config(model)
    except ModelError as error:
        yield "model.path" if model.path else "model.config", f"cannot be used: {error}"
        return
    layers = count_of(config, "num_hidden_layers")
    vocabulary = count_of(config, "vocab_size")
    if layers is None or vocabulary is None:
        missing = "num_hidden_layers" if layers is None else "vocab_size"
        key = "model.path" if model.path else "model.config"
        yield key, f"must have a positive {missing}, got {getattr(config, missing, None)}"
        return
    if model.stages > layers + 2:
        yield "model.stages", f"must be at most {layers + 2}: {layers} layers, the embedding and the head"
    elif model.cut and (len(model.cut) != model.stages or sum(model.cut) != layers or 0 in model.cut[1:-1]):
        yield (
            "model.cut",
            f"must be model.stages = {model.stages} numbers with the sum {layers}, the layers of the model; "
            f"these are {len(model.cut)} with the sum {sum(model.cut)}; only the first and the last may be 0",
        )
    positions = count_of(config, "max_position_embeddings")
    if positions is not None and spec.data.seq_len > positions:
        yield "data.seq_len", f"must be at most {positions}, the maximum positions of the model"
    try:
        tokens = vocabulary_size(spec.data.tokenizer)
    except DataError:
        return
    if tokens > vocabulary:
        yield "data.tokenizer", f"must fit the model's vocab_size = {vocabulary}, but has {tokens} tokens"


def _has_config(path: str) -> bool:
    return (Path(path) / "config.json").is_file()


RULES: tuple[tuple[tuple[str, ...], Callable[[RunSpec], Iterator[Finding]]], ...] = (
    (("inner.microbatches", "inner.batch_size"), _microbatches),
    (("run.min_clusters", "run.quorum"), _quorum),
    (("run.outer_steps", "inner.H", "adapt.startup_steps", "adapt.startup_H", "inner.warmup_steps"), _warmup),
    (("overlap.mode", "overlap.keep"), _keep),
    (("compression.top", "compression.lowrank"), _top),
    (
        (
            "adapt.rule",
            "data.order",
            "adapt.H_min",
            "adapt.H_max",
            "adapt.startup_steps",
            "adapt.startup_H",
            "inner.H",
            "schedule.fragments",
            "schedule.fraction",
            "local.every",
            "outer.average",
            "overlap.mode",
            "overlap.delay",
        ),
        _adapt,
    ),
    (
        ("overlap.mode", "schedule.fragments", "schedule.fraction", "compression.feedback"),
        _eager,
    ),
    (
        (
            "outer.average",
            "overlap.mode",
            "local.every",
            "schedule.fragments",
            "schedule.fraction",
            "compression.feedback",
        ),
        _gradient,
    ),
    (
        (
            "schedule.fraction",
            "schedule.fragments",
            "outer.momentum",
            "compression.lowrank",
            "compression.feedback",
        ),
        _drawn,
    ),
    (
        ("compression.feedback", "compression.gamma", "overlap.mode", "overlap.keep"),
        _feedback_in_parameters,
    ),
    (("compression.bits", "compression.strong_bits"), _strong_bits),
    (("data.source", "data.paths", "data.name", "data.subset"), _source),
    (("data.packing", "data.tokenizer", "data.seq_len"), _packing),
    (("model.config", "model.path", "model.start"), _one_model),
    (("model.config", "model.path", "model.stages", "model.cut", "data.seq_len", "data.tokenizer"), _model),
)
"""What each rule reads, and the rule. A rule runs if everything it reads is right by itself."""


def warnings_for(spec: RunSpec) -> list[str]:
    """What is allowed but probably not meant, a sentence each."""
    found = unstable(spec)
    if spec.inner.schedule in ("1f1b", "gpipe") and spec.inner.microbatches < spec.model.stages:
        found.append(
            f"inner.microbatches = {spec.inner.microbatches}: a cluster of more processes, and it may have "
            f"{spec.model.stages} (model.stages), is refused without --microbatches or --schedule"
        )
    if spec.model.path and not _has_config(spec.model.path):
        found.append(
            f"model.path = {json.dumps(spec.model.path)} has no config.json on this machine: stages, cut, "
            "seq_len and tokenizer were not checked against the model"
        )
    elif spec.model.path and spec.model.start == "seed" and any(Path(spec.model.path).glob("*.safetensors")):
        found.append(
            f"model.path = {json.dumps(spec.model.path)} has weights, which are not read: the run starts "
            'from drawn parameters. To go on from the weights set model.start = "weights"'
        )
    if spec.data.tokenizer != EMBEDDED_TOKENIZER:
        try:
            vocabulary_size(spec.data.tokenizer)
        except DataError as error:
            found.append(f"{error}; its size was not checked against the model")
    return found
