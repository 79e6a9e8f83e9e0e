"""Speed of the codec and of the low-rank path on one thread.

    python benchmarks/codec.py [--json] [--device cpu] [--repeat 9]

Codec: million values per second, groups of 64; "both" is an encode() that also tells what decode() will make
of its bytes. Low rank: million parameters of the matrix per second for each step, and for the path of a
round: project, encode, decode, orthonormalise, back project, encode, decode, own contribution off the error
buffer, average onto the parameters, next basis. What the path moves at least, 24 bytes per parameter (two
reads, two updates), is set against a large copy of the same run, and its 8 * lowrank operations against a
large product. On a CPU seconds are those of the process, so that what else runs there counts less.
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
    Layout,
    Phase,
    add_outer_,
    back_project,
    decode,
    encode,
    encoded_bytes,
    initial_basis,
    next_basis,
    orthonormalise,
    pack_chunk,
    project,
    round_trip,
    subtract_outer_,
    unpack_chunk,
)
from p2p_dilocox.recipe import recipes

GROUP = 64
VALUES = 1 << 24
SIDE = 2048
LOWRANK = 64


def codec(bits: int, device: torch.device, repeat: int) -> dict[str, float]:
    """Mval/s of each direction, and bits on the wire per value."""
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0)).to(device)
    values = values.double() if bits == 64 else values
    data, decoded = encode(values, bits, GROUP), torch.empty_like(values)
    return {
        "encode": _rate(VALUES, lambda: encode(values, bits, GROUP), device, repeat),
        "decode": _rate(VALUES, lambda: decode(data, VALUES, bits, GROUP, device=device), device, repeat),
        "both": _rate(VALUES, lambda: encode(values, bits, GROUP, decoded=decoded), device, repeat),
        "round_trip": _rate(VALUES, lambda: round_trip(values, bits, GROUP), device, repeat),
        "wire_bits": 8 * encoded_bytes(VALUES, bits, GROUP) / VALUES,
    }


def lowrank(device: torch.device, repeat: int) -> dict[str, float]:
    """Mparam/s of every step of a round of one matrix, and of all of it; and what the machine could do."""
    generator = torch.Generator().manual_seed(0)
    residual, anchor = (torch.randn(SIDE, SIDE, generator=generator).to(device) for _ in range(2))
    basis = initial_basis("matrix", (SIDE, SIDE), LOWRANK, 0, device=device)
    p = project(residual, basis)
    p_hat = orthonormalise(p)
    q = back_project(residual, p_hat)
    layout = Layout({"matrix": (SIDE, SIDE)}, recipes()["dilocox"].compression)
    vectors = {"p": layout.pack_p({"matrix": p}, {}), "q": layout.pack_q({"matrix": q})}

    def coded(phase: Phase, vector: Tensor) -> tuple[Tensor, Tensor]:
        """(what others decode of us, the average as it comes back): each encoded once and decoded once."""
        own, average = torch.empty_like(vector), torch.empty_like(vector)
        for start, end, bits, return_bits, *_ in layout.chunks(phase, 0, len(vector), 1 << 18):
            data = pack_chunk(vector[start:end], bits, layout.group, decoded=own[start:end])
            share = unpack_chunk(data, n=end - start, bits=bits, group=layout.group, device=device)
            pack_chunk(share, return_bits, layout.group, decoded=average[start:end])
        return own, average

    def path() -> None:
        p_vector = layout.pack_p({"matrix": project(residual, basis)}, {})
        p_average = layout.unpack_p(coded("p", p_vector)[1])[0]["matrix"]
        p_hat = orthonormalise(p_average)
        own, average = coded("q", layout.pack_q({"matrix": back_project(residual, p_hat)}))
        subtract_outer_(residual, p_hat, layout.unpack_q(own)["matrix"])
        q_average = layout.unpack_q(average)["matrix"]
        add_outer_(anchor, p_hat, q_average, scale=1e-3)
        next_basis(q_average)

    steps: dict[str, Callable[[], object]] = {
        "project": lambda: project(residual, basis),
        "code": lambda: [coded("p", vectors["p"]), coded("q", vectors["q"])],
        "orthonormalise": lambda: orthonormalise(p),
        "back_project": lambda: back_project(residual, p_hat),
        "subtract_outer_": lambda: subtract_outer_(residual, p_hat, q),
        "next_basis": lambda: next_basis(q),
        "path": path,
    }
    rates = {name: _rate(SIDE * SIDE, step, device, repeat) for name, step in steps.items()}
    source = torch.randn(VALUES * 4, device=device)
    target = torch.empty_like(source)
    copied = 8e-3 * _rate(len(source), lambda: target.copy_(source), device, repeat)  # read and written
    side = SIDE // 2
    square = source[: side * side].view(side, side)
    multiplied = 2e-3 * _rate(side**3, lambda: square @ square, device, repeat)
    return rates | {
        "copy GB/s": copied,
        "product Gflop/s": multiplied,
        "path, share of the copy": 24e-3 * rates["path"] / copied,
        "path, share of the product": 8e-3 * LOWRANK * rates["path"] / multiplied,
    }


def _rate(work: int, run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Millions of `work` per second: median of `repeat` runs after one that does not count."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(repeat + 1):
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
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
    columns = ("encode", "decode", "both", "round_trip", "wire_bits")
    lines = [" bits" + "".join(f"{name:>11}" for name in columns) + "   Mval/s"]
    for bits, row in coded.items():
        lines.append(
            f"{bits:>5}" + "".join(f"{row[name]:11.{2 * (name == 'wire_bits')}f}" for name in columns)
        )
    lines += ["", f"{SIDE} x {SIDE}, lowrank {LOWRANK}, Mparam/s"]
    lines += [f"{name:>28}  {value:8.{2 * ('share' in name)}f}" for name, value in factored.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
