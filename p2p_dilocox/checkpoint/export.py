"""A trained model as a Hugging Face directory: safetensors per stage, index, configs, tokenizer."""

import copy
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, core_model_loading

from p2p_dilocox.errors import StateError
from p2p_dilocox.pipeline.skeleton import Skeleton, read_skeleton

__all__ = ["export_model"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def export_model(
    config: PretrainedConfig,
    shards: Iterable[tuple[int, dict[str, Tensor]]],
    tokenizer_dir: Path | None,
    out: Path,
) -> None:
    """Write a directory that
    `AutoModelForCausalLM.from_pretrained(out)` reads. `out` appears whole or not at all.

    shards: (stage, tensors by Hugging Face name), any order; one is in memory at a time. Dtypes are kept. A
    tied head is not stored: its embedding is. tokenizer_dir: None leaves the tokenizer out. Raises
    StateError: `out` is there already or cannot be written, a tensor is missing, unknown, given twice or of
    another shape.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StateError(f"{out} exists already and is not an empty directory; export to a new directory")
    skeleton = read_skeleton(config)
    try:
        _write_directory(config, skeleton, shards, tokenizer_dir, out)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot write the model to {out}: {error}") from error


def _write_directory(
    config: PretrainedConfig,
    skeleton: Skeleton,
    shards: Iterable[tuple[int, dict[str, Tensor]]],
    tokenizer_dir: Path | None,
    out: Path,
) -> None:
    copies = {skeleton.tied[0]} if skeleton.tied else set()
    missing = {
        name: tuple(parameter.shape)
        for name, parameter in skeleton.model.named_parameters(remove_duplicate=False)
        if name not in copies
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        dtype = _write_shards(skeleton.model, shards, missing, copies, partial)
        exported = copy.deepcopy(config)
        exported.architectures = [type(skeleton.model).__name__]
        exported.dtype = dtype
        exported.save_pretrained(partial)
        GenerationConfig.from_model_config(exported).save_pretrained(partial)
        if tokenizer_dir is not None:
            _copy_tokenizer(tokenizer_dir, partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_shards(
    model: PreTrainedModel,
    shards: Iterable[tuple[int, dict[str, Tensor]]],
    missing: dict[str, tuple[int, ...]],
    copies: set[str],
    directory: Path,
) -> str:
    """Shards and index. Returns the dtype that most parameters have."""
    files: dict[int, Path] = {}
    stage_of: dict[str, int] = {}
    total_bytes = total_parameters = 0
    dtypes: dict[str, int] = {}
    for stage, given in shards:
        if stage in files:
            raise StateError(f"stage {stage} was given twice to the export")
        ours = {name: tensor.detach().cpu() for name, tensor in given.items() if name not in copies}
        for name, tensor in ours.items():
            if name not in missing:
                raise StateError(
                    f"stage {stage} brings {name}, which this model does not have or another stage brought"
                )
            if tuple(tensor.shape) != (shape := missing.pop(name)):
                raise StateError(
                    f"{name} of stage {stage} has the shape {tuple(tensor.shape)}, must be {shape}"
                )
        # The names and layouts that are published for this family, which all programs read.
        reverted = core_model_loading.revert_weight_conversion(model, ours)
        tensors = {name: tensor.contiguous() for name, tensor in reverted.items()}
        for name, tensor in tensors.items():
            stage_of[name] = stage
            total_bytes += tensor.nbytes
            total_parameters += tensor.numel()
            dtype = str(tensor.dtype).removeprefix("torch.")
            dtypes[dtype] = dtypes.get(dtype, 0) + tensor.numel()
        files[stage] = directory / f"stage-{stage}"
        save_file(tensors, files[stage], metadata={"format": "pt"})
        files[stage].chmod(0o644)  # safetensors makes it private, as no other file here is
    if missing:
        names = sorted(missing)
        raise StateError(
            f"{len(names)} tensors of the model are in no stage, {names[0]} among them; export all stages"
        )
    names_by_stage = {
        stage: f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, stage in enumerate(sorted(files), 1)
    }
    for stage, file in files.items():
        file.rename(directory / names_by_stage[stage])
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
        "weight_map": {name: names_by_stage[stage] for name, stage in sorted(stage_of.items())},
    }
    (directory / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )
    return max(dtypes, key=lambda dtype: dtypes[dtype])


def _copy_tokenizer(source: Path, target: Path) -> None:
    """The files of a tokenizer, and a minimal tokenizer_config.json where only tokenizer.json is there."""
    if not (source / "tokenizer.json").is_file() and not (source / "tokenizer_config.json").is_file():
        raise StateError(
            f"{source} has neither tokenizer.json nor tokenizer_config.json: no tokenizer to export"
        )
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if not (target / "tokenizer_config.json").exists():
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n"
        (target / "tokenizer_config.json").write_text(content, encoding="utf-8")
