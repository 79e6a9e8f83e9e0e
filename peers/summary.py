"""A run spec on one screen, for people who decide whether to host or to join."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from p2p_dilocox.runspec import RunSpec, total_inner_steps, warnings_for

__all__ = ["spec_summary"]


def spec_summary(spec: RunSpec) -> Group:
    """One line per subject, then the warnings."""
    table = Table.grid(padding=(0, 2))
    run, inner, data, compression = spec.run, spec.inner, spec.data, spec.compression
    tokens = total_inner_steps(spec) * inner.batch_size * data.seq_len
    coding = f"{compression.bits} bits there, {compression.return_bits} back, groups of {compression.group}"
    lowrank = f"lowrank {compression.lowrank}, " if compression.lowrank else ""
    model = spec.model.config.get("model_type", "from " + spec.model.path)
    rows = {
        "run": f"{run.id}, recipe {run.recipe}, {run.outer_steps} outer steps, "
        f"at least {run.min_clusters} clusters",
        "model": f"{model} in {spec.model.stages} stages",
        "data": f"{data.source}, sequences of {data.seq_len} tokens, {tokens:,} tokens per cluster",
        "inner": f"H {inner.H}, batch {inner.batch_size} in {inner.microbatches} microbatches, "
        f"lr {inner.lr:g}",
        "outer": f"lr {spec.outer.lr:g}, momentum {spec.outer.momentum:g}, overlap {spec.overlap.mode}",
        "compression": f"{lowrank}{coding}, feedback {compression.feedback}",
        "deadlines": f"a round within {spec.deadlines.round_s:g} s",
    }
    for subject, text in rows.items():
        table.add_row(subject, text)
    return Group(table, *(Text(f"warning: {warning}", "yellow") for warning in warnings_for(spec)))
