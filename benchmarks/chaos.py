"""Clusters that die, freeze, lose their link, pause and come back, all the time: does the run notice?

    python -m benchmarks.chaos [--faults 50] [--seconds 450] [--seed 1] [--out DIR] [--json]

Three clusters of `dilocox-peer join`, each a host of its own (network namespaces; without root all are on
loopback, and no link is cut), train a small model twice: with faults drawn from the seed, and without a fault
until they have come as far. One cluster at least is always left alone: when all are gone at once, nobody has
the last outer step. At the end: rules broken in all histories, outer steps per second of both runs, their
validation loss at equal tokens, memory and open files of a cluster. --out keeps the state directories, to see
what broke a rule. Half an hour of faults: --faults 200 --seconds 1800.
"""

import argparse
import bisect
import contextlib
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.tiny_llama import TINY_LLAMA
from benchmarks.volunteer import Fault, Volunteer, send
from p2p_dilocox.coverage import read_coverage
from p2p_dilocox.fault_points import POINTS
from p2p_dilocox.invariants import check_history
from p2p_dilocox.shaped_links import Links, why_not
from p2p_dilocox.swarm.process import die_with_parent, remove_sockets_of

__all__ = ["Fault", "chaos", "draw"]

CLUSTERS = 3
READY_S = 240.0  # until all train together, at the start and at the end
RUN = (
    """
[run]
id = "chaos"
outer_steps = 100000
min_clusters = 3
quorum = 2
[model]
"""
    + TINY_LLAMA
    + """\
max_position_embeddings = 64
tie_word_embeddings = true
[data]
seq_len = 64
order = "shards"
[inner]
H = 20
batch_size = 4
lr = 3e-3
warmup_steps = 40
lr_schedule = "constant"
[compression]
lowrank = 8
[deadlines]
round_s = 6.0
[checkpoint]
every = 4
[eval]
every = 2
batches = 4
"""
)
Row = dict[str, Any]


def draw(seed: int, faults: int, seconds: float, *, links: bool) -> list[Fault]:
    """In order of time. kill: all processes of a cluster. rank: one, which the supervisor starts again.
    leave: Ctrl-C. freeze: SIGSTOP for all. cut: no byte passes the link. pause: as the command. The start
    after a kill or leave may be killed again at a named point of an outer step."""
    chance = random.Random(seed)
    kinds = ["kill", "rank", "leave", "freeze", "freeze", "pause", *(["cut", "cut"] if links else [])]
    times = sorted(chance.uniform(0, seconds) for _ in range(faults))
    return [
        Fault(
            at_s=at, kind=chance.choice(kinds), cluster=chance.randrange(CLUSTERS),
            seconds=chance.uniform(2.0, 8.0), point=chance.choice(["", *POINTS]),
        )
        for at in times
    ]  # fmt: skip


class Chaos:
    """The run, its volunteers, and what is done to them."""

    def __init__(self, directory: Path, links: Links | None) -> None:
        self._links = links
        (directory / "run.toml").write_text(RUN)
        host = links.address(0) if links else "127.0.0.1"
        serve = self._on(0, "dilocox-bootstrap", "serve", "--run", str(directory / "run.toml"))
        serve += ["--state-dir", str(directory / "boot"), "--listen", f"/ip4/{host}/tcp/0"]
        with (directory / "boot.log").open("wb") as log:
            self._boot = subprocess.Popen(serve, stdout=log, stderr=log, preexec_fn=die_with_parent)
        link = directory / "boot" / "join-link"
        _until(link.exists, "the bootstrap node")
        self.volunteers = []
        for number in range(CLUSTERS):
            address = links.address(number + 1) if links else "127.0.0.1"
            state = directory / f"c{number}"
            command = self._on(number + 1, "dilocox-peer", "join", "--link-file", str(link))
            command += ["--state-dir", str(state), "--devices", "cpu:1", "--threads", "1"]
            command += ["--name", f"c{number}", "--listen", f"/ip4/{address}/tcp/0"]
            self.volunteers.append(Volunteer(number, state, command))
            self.volunteers[-1].start()

    def _on(self, host: int, program: str, *arguments: str) -> list[str]:
        prefix = self._links.prefix(host) if self._links else []
        return [*prefix, str(Path(sys.executable).with_name(program)), *arguments]

    def together(self) -> bool:
        """All have taken one and the same outer step together, after their last fault."""
        return all(v.well() and len(v.history()[-1]["members"]) == CLUSTERS for v in self.volunteers)

    def watch(self, until: float, outer_steps: float = math.inf) -> None:
        while time.monotonic() < until and self.outer_steps() < outer_steps:
            self._tend()
            time.sleep(0.5)

    def outer_steps(self) -> int:
        """Those that were committed; one that was dropped is none, though it loses nothing."""
        return len({line["t"] for v in self.volunteers for line in v.committed()})

    def healed(self) -> bool:
        self._tend()
        return self.together()

    def strike(self, faults: list[Fault]) -> Counter[str]:
        """Do them one by one; one whose turn it is waits while no other cluster is well."""
        began, done, over = time.monotonic(), Counter[str](), list[tuple[float, Volunteer]]()
        for fault in faults:
            while True:
                now = time.monotonic()
                for when, volunteer in [o for o in over if o[0] <= now]:
                    over.remove((when, volunteer))
                    self._end(volunteer)
                victim = self._victim(fault)
                if now >= began + fault.at_s and victim is not None:
                    break
                self._tend()
                time.sleep(0.2)
            over.append((now + fault.seconds, victim))
            self._begin(victim, fault)
            done[fault.kind] += 1
        for _, volunteer in over:
            self._end(volunteer)
        return done

    def _victim(self, fault: Fault) -> Volunteer | None:
        """The cluster that was drawn, or the next one that has no fault now, if another is well."""
        order = [self.volunteers[(fault.cluster + i) % CLUSTERS] for i in range(CLUSTERS)]
        for victim in order:
            if victim.fault is None and any(v.well() for v in order if v is not victim):
                return victim
        return None

    def _begin(self, victim: Volunteer, fault: Fault) -> None:
        victim.fault = fault
        pids = victim.pids()
        match fault.kind:
            case "kill":
                victim.point = fault.point
                send(pids, signal.SIGKILL)
            case "rank":
                send(pids[1:2], signal.SIGKILL)
            case "leave":
                victim.point = fault.point
                send(pids[:1], signal.SIGINT)
            case "freeze":
                send(pids, signal.SIGSTOP)
            case "cut":
                assert self._links is not None
                self._links.cut(victim.number + 1)
            case "pause":
                _order(victim, "pause")

    def _end(self, victim: Volunteer) -> None:
        fault, victim.fault, victim.hit = victim.fault, None, time.time()
        assert fault is not None
        match fault.kind:
            case "freeze":
                send(victim.pids(), signal.SIGCONT)
            case "cut":
                assert self._links is not None
                self._links.join(victim.number + 1)
            case "pause":
                _order(victim, "resume")

    def _tend(self) -> None:
        for volunteer in self.volunteers:
            volunteer.look()
            if volunteer.fault is None and not volunteer.running:
                if volunteer.process is not None:
                    remove_sockets_of(volunteer.process.pid)
                volunteer.start()

    def close(self) -> None:
        for volunteer in self.volunteers:
            send(volunteer.pids(), signal.SIGCONT)
            send(volunteer.pids()[:1], signal.SIGINT)
        for process in [v.process for v in self.volunteers]:
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        for volunteer in self.volunteers:
            send(volunteer.pids(), signal.SIGKILL)
        send([self._boot.pid], signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._boot.wait(10)
        self._boot.kill()


def chaos(
    faults: list[Fault], seconds: float, directory: Path, links: Links | None, enough: float = math.inf
) -> Row:
    """One run of `seconds`, or until it has committed `enough` outer steps. Raises TimeoutError if the
    clusters never train together, before or after."""
    run = Chaos(directory, links)
    try:
        _until(run.together, "the clusters")
        began, first = time.monotonic(), run.outer_steps()
        done = run.strike(faults)
        run.watch(began + seconds, first + enough)
        steps, took = run.outer_steps() - first, time.monotonic() - began
        if faults:
            _until(run.healed, "the clusters, after the last fault")
    finally:
        run.close()
    coverage = read_coverage([v.state for v in run.volunteers])
    return {
        "seconds": round(took, 1),
        "faults": dict(done),
        "killed_at_points": sum(1 for v in run.volunteers for _ in v.state.glob("once-*")),
        "outer_steps": steps,
        "steps_per_s": round(steps / took, 3),
        "starts": [v.starts for v in run.volunteers],
        "violations": check_history([line for v in run.volunteers for line in v.history()]),
        "rss_mb": [_quarters([rss / 1e6 for rss, _ in v.usage]) for v in run.volunteers],
        "open_files": [_quarters([float(fds) for _, fds in v.usage]) for v in run.volunteers],
        "data_seen": {t: round(f, 3) for t, f in coverage.fractions().items()},
        "trained_twice": len(coverage.twice),
        "losses": losses(run.volunteers),
    }


def _quarters(samples: list[float]) -> list[int]:
    """Medians of the first and of the last quarter."""
    if not samples:
        return []
    size = max(1, len(samples) // 4)
    return [round(statistics.median(part)) for part in (samples[:size], samples[-size:])]


def losses(volunteers: list[Volunteer]) -> list[tuple[int, float]]:
    """(tokens that all committed rounds up to an outer step carried, validation loss after it)."""
    weights: dict[int, float] = {}
    for volunteer in volunteers:
        weights |= {line["t"]: sum(line["weights"]) for line in volunteer.committed() if line["weights"]}
    found: dict[int, float] = {}
    for volunteer in volunteers:
        for text in (volunteer.state / "events.jsonl").read_text().splitlines():
            if '"evaluated"' in text:
                event = json.loads(text)
                found[event["t"]] = event["val_loss"]
    total, curve, steps = 0.0, [], sorted(weights)
    for t in steps:
        total += weights[t]
        if t in found:
            curve.append((int(total), round(found[t], 4)))
    return curve


def loss_at(curve: list[tuple[int, float]], tokens: int) -> float:
    """On the straight line between the two evaluations around it, averaged with those next to them."""
    index = bisect.bisect_left(curve, (tokens, 0.0))
    return statistics.fmean(loss for _, loss in curve[max(0, index - 2) : index + 2])


def _order(victim: Volunteer, command: str) -> None:
    """Without a process of its own, which would take seconds to start."""
    from p2p_dilocox.errors import StateError

    with contextlib.suppress(StateError):
        _control().ask(victim.state, {"command": command})


def _control() -> Any:
    import importlib

    return importlib.import_module("p2p_dilocox.peers.control")


def _until(true: Any, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not train together within {READY_S:.0f} s")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = why_not()
    rows: dict[str, Row] = {}
    for name in ("chaos", "calm"):
        faults = options.faults if name == "chaos" else 0
        enough = math.inf if name == "chaos" else rows["chaos"]["outer_steps"]
        with contextlib.ExitStack() as stack:
            links = None if reason else stack.enter_context(Links(CLUSTERS + 1, "200mbit"))
            directory = Path(options.out or stack.enter_context(tempfile.TemporaryDirectory())) / name
            directory.mkdir(parents=True)
            plan = draw(options.seed, faults, options.seconds, links=links is not None)
            rows[name] = chaos(plan, options.seconds, directory, links, enough)
    calm, struck = (rows[name]["losses"] for name in ("calm", "chaos"))
    tokens = min(calm[-1][0], struck[-1][0])
    result = {
        "seed": options.seed,
        "links": reason or "network namespaces",
        "throughput": round(rows["chaos"]["steps_per_s"] / rows["calm"]["steps_per_s"], 3),
        "tokens": tokens,
        "loss_calm": round(loss_at(calm, tokens), 4),
        "loss_chaos": round(loss_at(struck, tokens), 4),
    }
    for row in rows.values():
        del row["losses"]
    if options.json:
        print(json.dumps(result | rows))
        return
    for what, row in {"both": result, **rows}.items():
        print({"what": what, **row})


if __name__ == "__main__":
    main()
