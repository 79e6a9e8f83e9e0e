"""The newest checkpoint of a cluster as a Hugging Face model."""

import itertools
from pathlib import Path

from p2p_dilocox.errors import StateError
from p2p_dilocox.runspec import parse_run, read_run_text

__all__ = ["export_newest"]


def export_newest(state: Path, out: Path, average: int = 1) -> list[int]:
    """Write the anchor of the newest complete checkpoint in `state` to `out`, or the mean of that many.
    Returns their outer steps, the newest first.

    Raises StateError if there are not as many checkpoints, `out` is there already or cannot be written.
    """
    kept = state / "run.toml"
    if not kept.is_file():
        raise StateError(f"{state} has no run.toml: is it the --state-dir of a dilocox-peer join?")
    text = read_run_text(kept)
    spec = parse_run(text, name=str(kept))

    # These load torch, which takes seconds. A mistake above shows before.
    from p2p_dilocox.anchor_mean import mean_of
    from p2p_dilocox.checkpoint.export import export_model
    from p2p_dilocox.checkpoint.resume import anchors, newest_first
    from p2p_dilocox.pipeline import config_from_spec
    from p2p_dilocox.swarm.signed import spec_digest
    from p2p_dilocox.tokenizer import tokenizer_dir
    from p2p_dilocox.traffic import model_tensors

    saved = list(itertools.islice(newest_first(state / "checkpoints", spec_digest(text)), average))
    if not saved:
        every = spec.checkpoint.every
        raise StateError(
            f"{state} has no complete checkpoint; one is made every {every} outer steps and at the end."
        )
    if len(saved) < average:
        raise StateError(
            f"{state} has {len(saved)} complete checkpoints, {average} are to be averaged; the run keeps "
            f"checkpoint.keep = {spec.checkpoint.keep}"
        )
    tensors = mean_of([anchors(each) for each in reversed(saved)])
    shards = (
        (stage, {name: tensors[name] for name in shapes if name in tensors})
        for stage, shapes in model_tensors(spec).stages.items()
    )
    export_model(config_from_spec(spec.model), shards, tokenizer_dir(spec.data.tokenizer), out)
    return [each.place.outer_t for each in saved]
