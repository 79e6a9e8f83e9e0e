"""Kill -9 while checkpoints are written: `python -m tests.faults.saver DIRECTORY TIMES SEED`.

A child goes on from the newest checkpoint, checks that it is of one moment, and saves one outer step after
the other without a pause; its parent kills it within 400 ms of its first word. Prints one line per kill as
JSON. The parent has no threads, so that it may fork.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from p2p_dilocox.checkpoint.resume import load_rank, newest, tidy
from p2p_dilocox.swarm.process import die_with_parent
from tests.unit.saved import SPEC_DIGEST, Saver

SIDE = 250  # 2.3 MB in a checkpoint


def child(state: Path, words: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    saver = Saver(state, side=SIDE)
    saved = newest(saver.checkpoints, SPEC_DIGEST)
    tidy(saver.checkpoints, [])
    t = 0
    if saved is not None:
        load_rank(saved, saver.rank)
        t = saver.outer.t
        again = Saver(state, side=SIDE)
        again.at(t, proven=False)
        same = all(torch.equal(x, again.tensors()[n]) for n, x in saver.tensors().items())
        assert same, f"the checkpoint of outer step {t} is of more than one moment"
    os.write(words, f"{t}\n".encode())
    while True:
        t += 1
        saver.at(t)
        saver.save()
        os.write(words, f"{t}\n".encode())


def main(state: Path, times: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(times):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(state, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as words:
            resumed = int(words.readline())
            time.sleep(dice.uniform(0.0, 0.4))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            said = [resumed, *(int(word) for word in words.read().split())]
        left = sorted(p.name for p in (state / "checkpoints").glob(".partial*"))
        sys.stdout.write(json.dumps({"resumed": resumed, "saved": said[-1], "partial": left}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
