"""What the demo shows: figures from events, the exported model's loss, a plot, summary.json."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from p2p_dilocox.data import Batches, load_tokens, unigram_loss
from p2p_dilocox.plot import load_curves, plot_curves
from p2p_dilocox.runspec import RunSpec, parse_run
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.traffic import fp16_bytes, model_tensors, round_bytes

from .export import export_newest
from .progress import Progress
from .view import bytes_text

__all__ = ["problems", "report_demo", "summary_table"]

_EXPORT_TOLERANCE = 0.02  # nats per token: another kernel order, or bf16 in training on a GPU


def report_demo(
    out: Path, clusters: Sequence[Progress], states: Sequence[Path], seconds: float
) -> dict[str, Any]:
    """Export to OUT/model, draw OUT/loss.png, write and return OUT/summary.json.

    clusters: what each of the state directories `states` has reported, up to its end.
    """
    spec = parse_run((states[0] / "run.toml").read_text(encoding="utf-8"))
    corpus = load_tokens(spec, states[0] / "tokens")
    unigram = unigram_loss(corpus)
    tensors = model_tensors(spec)
    num_clusters = len(clusters)
    sent = statistics.fmean(t.sent_bytes for p in clusters for t in p.rounds.values())
    fp16 = fp16_bytes(tensors.num_parameters, num_clusters)
    coding = fp16 / sent if sent else None
    val = [clusters[0].val_losses[t] for t in sorted(clusters[0].val_losses)]
    export_newest(states[0], out / "model")
    summary = {
        "outer_steps": max(max(p.rounds, default=0) for p in clusters),
        "inner_steps_per_outer_step": spec.inner.H,
        "clusters": num_clusters,
        "ranks_per_cluster": clusters[0].num_ranks,
        "parameters": tensors.num_parameters,
        "val_loss_first": val[0],
        "val_loss_last": val[-1],
        "val_perplexity_last": math.exp(val[-1]),
        "exported_val_loss": _exported_loss(out / "model", Batches(corpus, spec, ""), spec),
        "unigram_loss": unigram,
        "parameter_digests": {p.name: {str(s): d for s, d in sorted(p.digests.items())} for p in clusters},
        "bytes_sent_per_outer_step": sent,
        "bytes_predicted_per_outer_step": round_bytes(spec, tensors, num_clusters),
        "fp16_bytes_per_outer_step": fp16,
        "traffic_factor_local_steps": spec.inner.H,
        "traffic_factor_coding": coding,
        "traffic_factor_total": coding * spec.inner.H if coding else None,
        "compute_utilisation": statistics.fmean(p.utilisation or 0.0 for p in clusters),
        "tokens_per_s": [p.tokens_per_s for p in clusters],
        "dropped_rounds": sum(len(p.dropped) for p in clusters),
        "seconds": seconds,
    }
    curves = [load_curves(state) for state in states]
    plot_curves(curves, out / "loss.png", unigram_loss=unigram, fp16_bytes=fp16 or None)
    write_atomic(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def problems(summary: dict[str, Any]) -> list[str]:
    """Why the demo has failed: one sentence each, empty if it has not."""
    found = []
    digests = list(summary["parameter_digests"].values())
    if not digests[0] or any(d != digests[0] for d in digests):
        found.append("the clusters end with different parameters")
    if not summary["val_loss_last"] < summary["val_loss_first"]:
        found.append(
            f"the loss did not fall: {summary['val_loss_first']:.3f} to {summary['val_loss_last']:.3f}"
        )
    gap = abs(summary["exported_val_loss"] - summary["val_loss_last"])
    if not gap < _EXPORT_TOLERANCE:
        found.append(f"the exported model's validation loss is {gap:.3f} away from the trained one's")
    return found


def summary_table(summary: dict[str, Any]) -> Table:
    s = summary
    same = len({json.dumps(d) for d in s["parameter_digests"].values()}) == 1
    table = Table.grid(padding=(0, 2))
    table.add_row("outer steps", f"{s['outer_steps']}, {s['inner_steps_per_outer_step']} inner steps each")
    table.add_row(
        "clusters", f"{s['clusters']} of {s['ranks_per_cluster']} ranks, {s['parameters']:,} parameters"
    )
    table.add_row(
        "validation loss",
        f"{s['val_loss_first']:.3f} -> {s['val_loss_last']:.3f} (unigram baseline {s['unigram_loss']:.3f})",
    )
    table.add_row("exported model", f"validation loss {s['exported_val_loss']:.3f} in transformers")
    table.add_row("same parameters", "yes, on all clusters and stages" if same else "NO")
    table.add_row(
        "sent per outer step",
        f"{bytes_text(s['bytes_sent_per_outer_step'])} per cluster "
        f"(codec predicts {bytes_text(s['bytes_predicted_per_outer_step'])}, "
        f"fp16 averaging {bytes_text(s['fp16_bytes_per_outer_step'])})",
    )
    if s["traffic_factor_total"]:
        table.add_row(
            "less traffic",
            f"{s['traffic_factor_local_steps']}x local steps * {s['traffic_factor_coding']:.1f}x coding "
            f"= {s['traffic_factor_total']:.0f}x against fp16 AllReduce at every step",
        )
    table.add_row("utilisation", f"{s['compute_utilisation']:.0%}")
    table.add_row("time", f"{s['seconds']:.0f} s")
    return table


def _exported_loss(model_dir: Path, batches: Batches, spec: RunSpec) -> float:
    """Mean validation loss, nats per token, of the model that transformers loads from `model_dir`."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.eval()
    losses = []
    with torch.no_grad():
        for tokens in batches.valid_batches(spec.eval.batches):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
                ).item()
            )
    return statistics.fmean(losses)
