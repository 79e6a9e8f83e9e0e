"""One averaging round among D clusters, each a process of its own, beside hivemind's own averager in fp16.

    python -m benchmarks.round [--clusters 2 4 8] [--rates 100mbit 1gbit] [--side 2048] [--rounds 5]

Every cluster has four matrices [side, side] and a vector, as dense int4 or fp16. A round is a whole one: roll
call, averaging, votes. "empty" is one with almost nothing to average: what agreeing costs. hivemind is
DecentralizedAverager.step with an exact target group size. Seconds are medians over rounds of the slowest
cluster; ideal_s is what the link needs for the coded size times 2 (D - 1) / D. All share this machine's
cores: compare columns, not machines. Links are those of p2p_dilocox/shaped_links.py; else loopback only.

Options: --json prints one object, --save writes it to benchmarks/results/round.json.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2p_dilocox.shaped_links import Links, bits_per_s, why_not
from tests.faults.crew import Crew, members_of, spec_text
from tests.faults.nursery import ROOT

RESULTS = Path(__file__).parent / "results" / "round.json"
MATRICES = 4
COMPRESSION = {
    "int4": "[compression]\nbits = 4\nreturn_bits = 4\nlowrank = 0\ngather_up_to = 0\n",
    "fp16": "[compression]\nbits = 16\nreturn_bits = 16\nlowrank = 0\ngather_up_to = 0\n",
}
ROUND_S = 120
STOCK_S = 300.0
Row = dict[str, Any]


class Places:
    """Where D clusters run: all on loopback, or each on a host of its own whose link can be changed."""

    def __init__(self, links: Links | None) -> None:
        self.links = links

    def of(self, number: int) -> tuple[str, str]:
        """Network namespace and address."""
        if self.links is None:
            return "", "127.0.0.1"
        return self.links.namespace(number), self.links.address(number)

    def all(self, clusters: int) -> list[tuple[str, str]]:
        return [self.of(number) for number in range(clusters)]

    def set_rate(self, clusters: int, rate: str) -> None:
        if self.links is not None:
            for number in range(clusters):
                self.links.set_rate(number, rate)

    def sent_bytes(self, clusters: int) -> int:
        """By all hosts, as their interfaces count."""
        if self.links is None:
            return 0
        return sum(self.links.count_bytes(number)[0] for number in range(clusters))


def our_rounds(
    clusters: int, places: Places, rates: list[str], side: int, rounds: int, kind: str
) -> list[Row]:
    """For every rate a row; kind: of COMPRESSION."""
    rows = []
    namespace, host = places.of(0)
    text = spec_text(min_clusters=clusters, round_s=ROUND_S, more=COMPRESSION[kind])
    with (
        tempfile.TemporaryDirectory() as directory,
        Crew(Path(directory), text, matrices=MATRICES, side=side, namespace=namespace, host=host) as crew,
    ):
        crew.join(clusters, places=places.all(clusters))
        t = 1
        crew.round(t)  # waits for the last cluster to start
        for rate in rates:
            places.set_rate(clusters, rate)
            seconds, wire, processor = [], places.sent_bytes(clusters), cpu_s(crew)
            for _ in range(rounds):
                t += 1
                outcomes = crew.round(t)
                assert all(len(members_of(o)) == clusters for o in outcomes), outcomes
                seconds.append(max(o["seconds"] for o in outcomes))
            wire = (places.sent_bytes(clusters) - wire) // rounds
            used = {name: (after - processor[name]) / rounds for name, after in cpu_s(crew).items()}
            sent = sum(o["sent"] for o in outcomes) / clusters
            predicted = outcomes[0]["predicted"]
            row: Row = {
                "what": kind, "clusters": clusters, "link": rate, "parameters": MATRICES * side**2 + side,
                "seconds": round(statistics.median(seconds), 3), "sent_bytes": int(sent),
                "sent_over_predicted": round(sent / predicted, 4),
                "cpu_python_s": round(used["python"], 3), "cpu_p2pd_s": round(used["p2pd"], 3),
            }  # fmt: skip
            rows.append(row | link_figures(rate, wire / clusters, predicted, row["seconds"]))
    return rows


def link_figures(rate: str, wire: float, predicted: float, seconds: float) -> Row:
    """What an interface counted per cluster and round, and what time the link needs for `predicted` bytes."""
    if rate == "loopback":
        return {}
    ideal_s = 8 * predicted / bits_per_s(rate)
    return {
        "wire_bytes": int(wire), "wire_over_predicted": round(wire / predicted, 3),
        "ideal_s": round(ideal_s, 3), "over_ideal": round(seconds / ideal_s, 2),
    }  # fmt: skip


def cpu_s(crew: Crew) -> dict[str, float]:
    """Processor time of all clusters so far: of the ranks, and of their p2pd."""
    used = {"python": 0.0, "p2pd": 0.0}
    for cluster in crew.clusters:
        for number, pid in enumerate(cluster.lead.pids()):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            used["p2pd" if number else "python"] += (int(fields[11]) + int(fields[12])) / os.sysconf(
                "SC_CLK_TCK"
            )
    return used


def stock_rounds(clusters: int, places: Places, rates: list[str], side: int, rounds: int) -> list[Row]:
    """hivemind's averager in fp16, for every rate a row."""
    rows = []
    predicted = 2 * (clusters - 1) / clusters * 2 * (MATRICES * side**2 + side)
    for rate in rates:
        places.set_rate(clusters, rate)
        with contextlib.ExitStack() as stack:
            boot = stack.enter_context(StockChild(places.of(0), [], clusters, side, rounds))
            peers = boot.read()
            children = [
                stack.enter_context(StockChild(place, peers, clusters, side, rounds))
                for place in places.all(clusters)
            ]
            for child in children:
                child.read()
            wire = places.sent_bytes(clusters)
            for child in children:
                child.go()
            figures = [child.read() for child in children]
            wire = (places.sent_bytes(clusters) - wire) // (rounds + 1)
        seconds = statistics.median(max(each) for each in list(zip(*figures, strict=True))[1:])
        row: Row = {
            "what": "hivemind fp16", "clusters": clusters, "link": rate,
            "parameters": MATRICES * side**2 + side, "seconds": round(seconds, 3),
        }  # fmt: skip
        rows.append(row | link_figures(rate, wire / clusters, predicted, seconds))
    return rows


class StockChild:
    """A process with hivemind's DHT, and its averager if it is given peers. hivemind forks processes of its
    own: all of them are one group, which ends with it."""

    def __init__(
        self, place: tuple[str, str], peers: list[str], clusters: int, side: int, rounds: int
    ) -> None:
        namespace, host = place
        prefix = ["ip", "netns", "exec", namespace] if namespace else []
        job = {"host": host, "peers": peers, "clusters": clusters, "side": side, "rounds": rounds}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.round", "--child", json.dumps(job)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip

    def read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def __enter__(self) -> "StockChild":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def be_stock_child(job: dict[str, Any]) -> None:
    import hivemind
    import torch

    told: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        while line := os.read(0, 100):  # sys.stdin has a lock, and hivemind forks while we would hold it
            told.put(line)
        os.killpg(0, signal.SIGKILL)  # whoever started us is gone

    threading.Thread(target=listen, daemon=True).start()
    torch.set_num_threads(1)
    peers, side, clusters = job["peers"], job["side"], job["clusters"]
    dht = hivemind.DHT(initial_peers=peers, start=True, host_maddrs=[f"/ip4/{job['host']}/tcp/0"])
    if not peers:
        print(json.dumps([str(maddr) for maddr in dht.get_visible_maddrs()]), flush=True)
        told.get()
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.randn(side, side) for _ in range(MATRICES)] + [torch.randn(side)],
        dht,
        prefix="bench",
        target_group_size=clusters,
        compression=hivemind.compression.Float16Compression(),
        start=True,
    )
    print(json.dumps("ready"), flush=True)
    told.get()
    seconds = []
    for _ in range(job["rounds"] + 1):
        started = time.monotonic()
        group = averager.step(timeout=STOCK_S)
        assert group is not None and len(group) == clusters
        seconds.append(time.monotonic() - started)
    print(json.dumps(seconds), flush=True)
    told.get()  # a peer that leaves at once breaks the last round of the others


def machine() -> dict[str, Any]:
    import torch

    return {
        "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def measure(
    clusters: int, rates: list[str], side: int, rounds: int, show: Callable[[Row], None]
) -> list[Row]:
    """All rows of D clusters: on loopback, then with every rate."""
    rows: list[Row] = []

    def add(more: list[Row]) -> None:
        rows.extend(more)
        for row in more:
            show(row)

    loopback = Places(None)
    empty = our_rounds(clusters, loopback, ["loopback"], 16, 3 * rounds, "int4")
    add([row | {"what": "empty"} for row in empty])
    add(our_rounds(clusters, loopback, ["loopback"], side, rounds, "int4"))
    add(stock_rounds(clusters, loopback, ["loopback"], side, rounds))
    if rates:
        with Links(clusters, rates[0]) as links:
            places = Places(links)
            for kind in COMPRESSION:
                add(our_rounds(clusters, places, rates, side, rounds, kind))
            add(stock_rounds(clusters, places, rates, side, rounds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help=f"to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        be_stock_child(options.child)
    if options.rates and (reason := why_not()):
        print(f"loopback only: {reason}", file=sys.stderr)
        options.rates = []
    described, rows = machine(), []
    for clusters in options.clusters:
        show = (lambda _: None) if options.json else print
        rows += measure(clusters, options.rates, options.side, options.rounds, show)
    result = {"date": datetime.date.today().isoformat(), "machine": described, "rows": rows}
    if options.json:
        print(json.dumps(result))
    if options.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
