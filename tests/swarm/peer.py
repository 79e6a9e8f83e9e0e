"""A cluster of a small run: the code that a rank runs, in a thread of this process."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tiny_llama import TINY_LLAMA
from p2p_dilocox.events import Event, Finished, InnerStep
from p2p_dilocox.swarm.link import JoinLink

from .conftest import Swarm

__all__ = ["Peer", "run_text"]

RUN = (
    """
[run]
id = "test"
recipe = "{recipe}"
seed = 3
outer_steps = {outer_steps}
min_clusters = {min_clusters}
[model]
stages = 2
"""
    + TINY_LLAMA
    + """\
max_position_embeddings = 64
tie_word_embeddings = true
[data]
seq_len = 32
[inner]
H = 3
batch_size = 4
microbatches = 2
lr = 1e-2
warmup_steps = 4
[deadlines]
round_s = 20.0
[checkpoint]
every = 2
[eval]
every = 1
batches = 1
{more}
"""
)


def run_text(recipe: str = "dilocox", outer_steps: int = 4, min_clusters: int = 1, more: str = "") -> str:
    return RUN.format(recipe=recipe, outer_steps=outer_steps, min_clusters=min_clusters, more=more)


class Peer:
    """A cluster of one rank, in a thread, through `run_rank`."""

    def __init__(self, run_rank: Any, wish: Any, net: Swarm, state: Path, name: str) -> None:
        self.state = state / name
        self.state.mkdir(exist_ok=True)
        self.events: list[Event] = []
        self.wish = wish()
        self.reached = threading.Condition()
        self.error: BaseException | None = None
        config = {
            "rank": 0, "num_ranks": 1, "device": "cpu", "threads": 1, "state_dir": str(self.state),
            "link": str(JoinLink("test", net.organiser.public, tuple(net.link[1]))), "rendezvous": "",
            "run_text": net.text, "name": name, "listen": "/ip4/127.0.0.1/tcp/0", "announce": None,
            "client": False, "adamw_bits": 32, "offload": False, "schedule": "1f1b", "microbatches": 2,
            "upload_rate": None, "since": time.time(),
        }  # fmt: skip
        self.on_event: Callable[[Event], None] = lambda _event: None  # in the training loop's thread
        # A daemon: after a test that has failed it trains on, and nobody waits for it.
        self.thread = threading.Thread(target=self._run, args=(run_rank, config), name=name, daemon=True)
        self.thread.start()

    def _run(self, run_rank: Any, config: dict[str, Any]) -> None:
        try:
            run_rank(config, self._report, self.wish)
        except BaseException as error:  # noqa: BLE001 (handed to the test by `finish`)
            self.error = error
            with self.reached:
                self.reached.notify_all()

    def _report(self, event: Event) -> None:
        with self.reached:
            self.events.append(event)
            self.reached.notify_all()
        self.on_event(event)

    def until(self, done: Callable[[Event], bool]) -> None:
        with self.reached:
            assert self.reached.wait_for(lambda: self.error or any(done(e) for e in self.events), 60)
        if self.error:
            raise self.error

    def finish(self) -> Finished:
        self.thread.join(90)
        if self.error:
            raise self.error
        (finished,) = [e for e in self.events if isinstance(e, Finished)]
        return finished

    def losses(self) -> dict[tuple[int, int], float]:
        return {(e.t, e.h): e.loss for e in self.events if isinstance(e, InnerStep)}
