"""Losses of benchmarks/sweep.py over bytes, and the line below which nothing is (the Pareto front).

python -m benchmarks.sweep_front [--results benchmarks/results/sweep.json] [--out docs/images/sweep-front.png]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from p2p_dilocox.pareto import pareto

__all__ = ["DEFAULT", "points"]

ROOT = Path(__file__).parent.parent
DEFAULT = "r48 int4, 8 for an eighth"  # `dilocox` at this width
INNER_STEPS = 16  # that bytes are counted for


def points(rows: list[dict[str, Any]], model: str) -> dict[str, tuple[float, float]]:
    """Of each setting that was trained: kB per 16 inner steps, and the loss."""
    return {
        row["name"]: (row["bytes"][model] * INNER_STEPS / row["H"] / 1000, row["loss"][model])
        for row in rows
        if row["loss"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "sweep.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "sweep-front.png")
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))["rows"]
    models = list(rows[0]["bytes"])
    figure = Figure(figsize=(13, 5), dpi=80, layout="constrained")
    for panel, model in zip(figure.subplots(1, len(models)), models, strict=True):
        of = points(rows, model)
        best = pareto(of)
        panel.plot(*zip(*(of[name] for name in best), strict=True), color="C1", drawstyle="steps-post")
        for name, (x, y) in of.items():
            panel.plot(
                [x], [y], "o", color="C1" if name in best else "C0", markersize=9 if name == DEFAULT else 4
            )
            if name in best or y > of[DEFAULT][1] + 0.01:
                label = f"{name} (dilocox)" if name == DEFAULT else name
                down = best.index(name) % 2 if name in best else 0
                place = {"xytext": (5, -11 if down else 4), "textcoords": "offset points"}
                panel.annotate(label, (x, y), fontsize=7, **place)
        panel.set_xscale("log")
        panel.set_title(model)
        panel.set_xlabel(f"kB per {INNER_STEPS} inner steps")
        panel.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("validation loss (nats per token)")
    figure.savefig(arguments.out, format="png")


if __name__ == "__main__":
    main()
