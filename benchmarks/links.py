"""What one TCP stream carries between two hosts of p2p_dilocox/shaped_links.py, to judge figures by.

    python -m benchmarks.links [--rates 100mbit 1gbit] [--json]

Needs Linux, root and iproute2.
"""

import argparse
import json
import subprocess
import sys

from p2p_dilocox.shaped_links import Links, bits_per_s, why_not

_COMMAND_S = 20.0

_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    stream, _ = server.accept()
    total, began = 0, None
    while data := stream.recv(1 << 16):
        began = began or time.monotonic()
        total += len(data)
    print(8 * total / (time.monotonic() - began))
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), 5) as stream:
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        stream.sendall(bytes(1 << 16))
"""


def measure(rate: str, seconds: float) -> float:
    """Bits per second of payload that one TCP stream carries between two hosts."""
    with Links(2, rate) as links:
        receive = [*links.prefix(0), sys.executable, "-c", _RECEIVE, links.address(0)]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            send = [*links.prefix(1), sys.executable, "-c", _SEND, links.address(0), str(seconds)]
            subprocess.run(send, capture_output=True, timeout=_COMMAND_S, check=True)
            return float(receiver.communicate(timeout=_COMMAND_S)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["2mbit", "100mbit", "1gbit"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := why_not():
        print(json.dumps([]) if options.json else f"not measured: {reason}")
        return
    rows = []
    for rate in options.rates:
        measured = measure(rate, options.seconds)
        rows.append({"rate": rate, "measured_over_rate": round(measured / bits_per_s(rate), 3)})
        if not options.json:
            print(rows[-1])
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
