"""Speed of the codec and of the low-rank path on one thread.

    python benchmarks/codec.py [--json] [--device cpu] [--repeat 9]

Codec: million values per second, groups of 64. Low rank: million parameters of the matrix per second, where
"contribute" is what a cluster computes for its message and its error buffer, and "whole round" also rounds
both factors to 4 bits, adds the average to the parameters and prepares the next basis.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from p2p_dilocox.compression import (
    BITS,
    add_outer_,
    back_project,
    decode,
    encode,
    encoded_bytes,
    initial_basis,
    next_basis,
    orthonormalise,
    project,
    round_trip,
    subtract_outer_,
)

GROUP = 64
VALUES = 1 << 24
SIDE = 2048
LOWRANK = 64


def codec(bits: int, device: torch.device, repeat: int) -> dict[str, float]:
    """Mval/s of each direction, and bits on the wire per value."""
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0)).to(device)
    values = values.double() if bits == 64 else values
    data = encode(values, bits, GROUP)
    return {
        "encode": _rate(VALUES, lambda: encode(values, bits, GROUP), device, repeat),
        "decode": _rate(VALUES, lambda: decode(data, VALUES, bits, GROUP, device=device), device, repeat),
        "round_trip": _rate(VALUES, lambda: round_trip(values, bits, GROUP), device, repeat),
        "wire_bits": 8 * encoded_bytes(VALUES, bits, GROUP) / VALUES,
    }


def lowrank(device: torch.device, repeat: int) -> dict[str, float]:
    """Mparam/s of every step of a round of one matrix, of a contribution, and of all of it."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(SIDE, SIDE, generator=generator).to(device)
    anchor = matrix.clone()
    basis = initial_basis("matrix", (SIDE, SIDE), LOWRANK, 0, device=device)
    p = project(matrix, basis)
    p_hat = orthonormalise(p)
    q = back_project(matrix, p_hat)

    def rounded(factor: Tensor) -> Tensor:
        return round_trip(factor.T.reshape(-1), 4, GROUP).view(LOWRANK, -1).T

    def contribute() -> None:
        p_hat = orthonormalise(project(matrix, basis))
        subtract_outer_(matrix, p_hat, back_project(matrix, p_hat))

    def whole_round() -> None:
        p_hat = orthonormalise(rounded(project(matrix, basis)))
        q = rounded(back_project(matrix, p_hat))
        subtract_outer_(matrix, p_hat, q)
        add_outer_(anchor, p_hat, q, scale=1e-3)
        next_basis(q)

    steps: dict[str, Callable[[], object]] = {
        "project": lambda: project(matrix, basis),
        "orthonormalise": lambda: orthonormalise(p),
        "back_project": lambda: back_project(matrix, p_hat),
        "subtract_outer_": lambda: subtract_outer_(matrix, p_hat, q),
        "contribute": contribute,
        "whole round": whole_round,
    }
    return {name: _rate(SIDE * SIDE, step, device, repeat) for name, step in steps.items()}


def _rate(work: int, run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Millions of `work` per second: median of `repeat` runs after one that does not count."""
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return work / statistics.median(seconds[1:]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    coded = {bits: codec(bits, device, arguments.repeat) for bits in BITS}
    factored = lowrank(device, arguments.repeat)
    if arguments.json:
        record = {"torch": torch.__version__, "device": str(device), "codec": coded, "lowrank": factored}
        sys.stdout.write(json.dumps(record) + "\n")
        return
    lines = [
        f"{'bits':>4}  {'encode':>6}  {'decode':>6}  {'round_trip':>10}  Mval/s  {'wire bits per value':>20}"
    ]
    for bits, row in coded.items():
        lines.append(
            f"{bits:>4}  {row['encode']:6.0f}  {row['decode']:6.0f}  {row['round_trip']:10.0f}"
            f"          {row['wire_bits']:20.2f}"
        )
    lines += ["", f"{SIDE} x {SIDE}, lowrank {LOWRANK}  Mparam/s"]
    lines += [f"{name:>24}  {value:8.0f}" for name, value in factored.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
