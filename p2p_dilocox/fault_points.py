"""Named places in a round at which a test lets a process fail, on the dot.

DILOCOX_FAULT="kill@averaged:12:/tmp/once" kills the process that comes to `averaged` in outer step 12 or
later, and makes the file, with which it happens once only, also if the cluster starts again. `stop` freezes
it. Nothing from the network leads here, and an installed package has none of it (env.py).
"""

import os
import signal
from pathlib import Path

from p2p_dilocox.env import fault
from p2p_dilocox.errors import SpecError

__all__ = ["POINTS", "reach"]

POINTS = ("contributed", "roll_call", "averaged", "committed", "landing", "landed")
"""In the order of an outer step: the contribution is in the residual; the roll call is about to be answered;
all stages are averaged, nobody has voted; the votes are in; the average is about to be applied; it is."""
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def reach(point: str, t: int) -> None:
    """Outer step t of this process has come to `point`. Raises SpecError for a DILOCOX_FAULT that is none."""
    text = fault()
    if not text:
        return
    what, _, once = text.partition(":")[2].partition(":")
    action, _, where = text.partition(":")[0].partition("@")
    if action not in _ACTIONS or where not in POINTS or not what.isdecimal() or not once:
        raise SpecError(
            f"DILOCOX_FAULT = {text!r}: write kill@averaged:12:/tmp/once, with one of "
            f"{', '.join(_ACTIONS)} and one of {', '.join(POINTS)}."
        )
    if where == point and t >= int(what):
        try:
            Path(once).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), _ACTIONS[action])
