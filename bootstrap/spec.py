"""The run spec that a bootstrap node serves: found by path or name, and fixed once it has been served."""

from pathlib import Path

from p2p_dilocox.errors import StateError
from p2p_dilocox.runspec import RunSpec, parse_run, read_run_text
from p2p_dilocox.spec_diff import spec_diff
from p2p_dilocox.state_dir import write_atomic

__all__ = ["fix_spec", "load_run"]


def load_run(run: str) -> tuple[str, RunSpec]:
    """Text and parsed form of `run`: a file, or the name of a shipped spec. Raises SpecError."""
    text = read_run_text(run)
    return text, parse_run(text, name=Path(run).name)


def fix_spec(state: Path, text: str, spec: RunSpec) -> str:
    """The text to sign: the first one served from `state`, kept in STATE/run.toml. `text` must mean the same.

    Clusters of one run must train by one spec, so a change needs a new run id and a new state directory.
    Raises StateError that names what differs.
    """
    kept = state / "run.toml"
    if not kept.exists():
        write_atomic(kept, text)
        return text
    kept_text = read_run_text(kept)
    if shown := spec_diff(parse_run(kept_text, name=str(kept)), spec):
        raise StateError(
            f"{state} serves run {parse_run(kept_text).run.id!r} by another spec: {shown}. "
            "The spec of a run is fixed: give the changed one a new id and its own --state-dir."
        )
    return kept_text
