"""Starts members (member.py) as processes, tells them what to do, and reads what they say."""

import contextlib
import json
import os
import queue
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from p2p_dilocox.invariants import Line, check_history, read_history
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.process import remove_sockets_of

from .member import Config
from .nursery import Nursery

__all__ = ["Cluster", "Crew", "Event", "FLOATS", "Process", "members_of", "spec_text", "usage"]

ANSWER_S = 90.0  # longest wait for an event: a broken member fails the test rather than hang it
Event = dict[str, Any]

SPEC = """
[run]
id = "faults"
recipe = "{recipe}"
outer_steps = 100000
min_clusters = {min_clusters}
members = {members}
[model]
stages = {stages}
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 64
intermediate_size = 128
num_hidden_layers = {stages}
num_attention_heads = 2
num_key_value_heads = 2
[data]
seq_len = 32
[inner]
H = 1
batch_size = {stages}
microbatches = {stages}
lr = 1e-3
[deadlines]
round_s = {round_s}
{more}
"""


# 16-bit floats, dense: the bytes of a round are half of the parameters', and take time on the wire.
FLOATS = "[compression]\nbits = 16\nreturn_bits = 16\nlowrank = 0\ngather_up_to = 0\n"


def spec_text(
    *,
    min_clusters: int,
    round_s: float,
    stages: int = 1,
    recipe: str = "dilocox",
    members: Sequence[str] = (),
    more: str = "",
) -> str:
    return SPEC.format(
        recipe=recipe, min_clusters=min_clusters, stages=stages, round_s=float(round_s),
        members=list(members), more=more,
    )  # fmt: skip


def members_of(outcome: Event) -> list[str]:
    """Of a round that was committed; else the reason why not, which equals no list of members."""
    return list(outcome["steps"][-1]["members"]) if outcome["steps"] else [outcome["reason"]]


class Process:
    """One member process. Its events wait in order; `wait` takes the first of a kind."""

    def __init__(self, config: Config, namespace: str = "") -> None:
        """namespace: the network namespace it runs in, "" for ours."""
        self.config = config
        Path(config.state).mkdir(parents=True, exist_ok=True)
        self.log = Path(config.state) / f"rank{config.rank}.log"
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        with self.log.open("wb") as log:
            self._child = Nursery.start(
                json.dumps(asdict(config)), namespace, (theirs_in, theirs_out, log.fileno())
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running()

    def tell(self, do: str, /, **values: object) -> None:
        os.write(self._in, json.dumps({"do": do, **values}).encode() + b"\n")

    def wait(self, event: str, timeout_s: float = ANSWER_S) -> Event:
        while True:
            try:
                found = self._events.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(
                    f"no {event!r} in {timeout_s} s from {self.log}:\n{self.trace()}"
                ) from None
            if found is None:
                self._events.put(None)
                raise AssertionError(f"{self.log} ended before {event!r}:\n{self.trace()}")
            if found["event"] == event:
                return found

    def trace(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def pids(self) -> list[int]:
        """The process and its children, p2pd."""
        children = []
        for file in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += [int(pid) for pid in file.read_text().split()]
        return [self.pid, *children]

    def send(self, number: signal.Signals) -> None:
        """To p2pd too, the children first: a rank that is killed or frozen as a whole."""
        for pid in reversed(self.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self._child.kill()
        self._reader.join(5.0)
        os.close(self._in)
        self._child.close()
        remove_sockets_of(self.pid)

    def _read(self) -> None:
        with os.fdopen(self._out, "rb") as lines:
            for line in lines:
                self._events.put(json.loads(line))
        self._events.put(None)


class Cluster:
    """The ranks of one cluster."""

    def __init__(self, cluster_id: str, ranks: list[Process]) -> None:
        self.id, self.ranks = cluster_id, ranks
        self.peer = ""  # the lead's, in libp2p
        self.lineage = ""
        self.t = 0  # the last outer step that is over for it
        self.in_step = True  # it has taken the last round or learned what became of it

    @property
    def lead(self) -> Process:
        return self.ranks[0]

    @property
    def running(self) -> bool:
        return all(rank.running for rank in self.ranks)

    def start_round(self, t: int, **values: object) -> None:
        """values: more of Member.round's arguments."""
        for rank in self.ranks:
            rank.tell("round", t=t, **values)

    def outcome(self) -> Event:
        """The lead's; the other ranks' are the same or the history shows it."""
        outcome = [rank.wait("outcome") for rank in self.ranks][0]
        self.in_step = bool(outcome["steps"]) and not outcome["failed"]
        self.t, self.lineage = outcome["at"], outcome["lineage"]
        return outcome

    def digests(self) -> dict[str, str]:
        """Of every stage's anchor."""
        found: dict[str, str] = {}
        for rank in self.ranks:
            rank.tell("digests")
        for rank in self.ranks:
            found |= rank.wait("digests")["digests"]
        return found

    def send(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send(number)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class Crew:
    """A bootstrap node and clusters on this machine, in `directory`. Ends all its processes with itself.

    matrices, side: of every stage's synthetic parameters. namespace: of the bootstrap node, at address host.
    """

    def __init__(
        self, directory: Path, text: str, *, matrices: int = 1, side: int = 64, namespace: str = "",
        host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self.directory, self.text = directory, text
        self.config = Config(
            text=text, state=str(directory / "boot"), host=host, matrices=matrices, side=side
        )
        self.clusters: list[Cluster] = []
        self.boot = Process(self.config, namespace)
        try:
            self.link = self.boot.wait("link")
        except BaseException:
            self.boot.close()
            raise

    def join(
        self,
        count: int = 1,
        *,
        split: Sequence[Sequence[int]] = ((0,),),
        places: Sequence[tuple[str, str]] = (),
    ) -> list[Cluster]:
        """Start `count` clusters at once and bring them into the run.

        split: the stages of each rank. places: per cluster its network namespace and its address.
        """
        new = []
        for number in range(count):
            namespace, host = places[number] if places else ("", self.config.host)
            seed = len(self.clusters) + number + 1
            config = replace(
                self.config, state=str(self.directory / f"c{seed}"), host=host, seed=seed,
                organiser=self.link["organiser"], signed=self.link["signed"], peers=self.link["peers"],
            )  # fmt: skip
            cluster_id = self.make_key(self.directory, seed)
            new.append(
                Cluster(
                    cluster_id,
                    [
                        Process(replace(config, rank=r, stages=list(s)), namespace)
                        for r, s in enumerate(split)
                    ],
                )
            )
        for cluster in new:
            addresses = [rank.wait("address") for rank in cluster.ranks]
            cluster.peer = addresses[0]["peer"]
            for rank in cluster.ranks:
                rank.tell("enter", ranks=[a["packed"] for a in addresses])
        for cluster in new:
            for rank in cluster.ranks:
                rank.wait("entered")
        self.clusters += new
        self.introduce(self.clusters)
        return new

    @staticmethod
    def make_key(directory: Path, number: int) -> str:
        """The id of the cluster that is the number-th to join, from 1 on."""
        state = directory / f"c{number}"
        state.mkdir(parents=True, exist_ok=True)
        return SigningKey.load_or_create(state / "cluster.key").cluster_id

    def bring_back(self, cluster: Cluster, t: int, within: int = 3) -> None:
        """A cluster whose fault is over is in the others' rounds again, `within` outer steps from t on."""
        for back in range(t, t + within):
            if not cluster.in_step:
                self.catch_up(cluster)
            self.introduce(self.clusters)
            outcomes = self.round(back)
            if all(members_of(o) == sorted(c.id for c in self.clusters) for o in outcomes):
                return
        raise AssertionError("\n".join(json.dumps(outcome) for outcome in outcomes))

    def catch_up(self, cluster: Cluster) -> None:
        """Give it the state of the others, as at the start of a cluster that joins a run."""
        cluster.lead.tell("catch_up")
        cluster.lead.wait("caught_up")
        self.introduce(self.clusters)

    def introduce(self, clusters: Iterable[Cluster]) -> None:
        """What the next heartbeat of each would do."""
        running = [c for c in clusters if c.running]
        for cluster in running:
            cluster.lead.tell("refresh")
        for cluster in running:
            cluster.lead.wait("refreshed")

    def round(self, t: int, clusters: Sequence[Cluster] | None = None) -> list[Event]:
        """The round of outer step t with all clusters, or with some."""
        taking = self.clusters if clusters is None else clusters
        for cluster in taking:
            cluster.start_round(t)
        return [cluster.outcome() for cluster in taking]

    def history(self) -> list[Line]:
        return read_history(sorted(self.directory.glob("c*/*.jsonl")))

    def check(self, survivors: Sequence[Cluster]) -> None:
        """No rule is broken in any history, and the survivors hold the same parameters."""
        assert check_history(self.history()) == []
        digests = [cluster.digests() for cluster in survivors]
        assert all(d == digests[0] for d in digests), digests

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close()
        self.boot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def usage(process: Process) -> dict[str, int]:
    """Resident bytes and open files of a process and its p2pd, together."""
    total = {"rss": 0, "fds": 0}
    for pid in process.pids():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total["rss"] += next(
                int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmRSS")
            )
            total["fds"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return total
