"""The devices of a cluster: one rank process per device."""

import math
import os
import re
from collections.abc import Sequence

from p2p_dilocox.errors import SpecError

__all__ = ["check_form", "check_shared_memory", "parse_devices"]

_FORMS = "Give cpu:2 (two processes), cuda:0,1 (one per GPU) or auto."


_CPUS = re.compile(r"cpu(?::([1-9][0-9]{0,3}))?")
_GPUS = re.compile(r"cuda:([0-9]{1,4}(?:,[0-9]{1,4})*)")


def check_form(text: str) -> None:
    """Raises SpecError if `text` means no devices on any machine. Loads nothing."""
    if text != "auto" and not _CPUS.fullmatch(text) and not _GPUS.fullmatch(text):
        raise SpecError(f"devices = {text!r} is not a list of devices. {_FORMS}")


def parse_devices(text: str, stages: int) -> tuple[str, ...]:
    """A torch device per rank. `auto`: every GPU, up to one per stage; without a GPU one CPU process.

    stages: of the run; a rank holds one or more whole stages, so there can be no more ranks.
    Raises SpecError that names the value and the limit.
    """
    check_form(text)
    if text == "auto":
        gpus = min(_num_gpus(), stages)
        return tuple(f"cuda:{i}" for i in range(gpus)) or ("cpu",)
    if match := _CPUS.fullmatch(text):
        devices = ["cpu"] * int(match[1] or 1)
    else:
        devices = [f"cuda:{int(index)}" for index in text.removeprefix("cuda:").split(",")]
        _check_gpus(text, devices)
    if len(devices) > stages:
        raise SpecError(
            f"devices = {text!r} means {len(devices)} processes; this run has {stages} stages, "
            f"so a cluster has 1 to {stages} of them."
        )
    return tuple(devices)


NCCL_SEGMENT_BYTES = 9_637_888
"""What NCCL takes from /dev/shm for each direction of a channel between two GPUs that cannot reach each
other's memory: the size its errors name, with its default buffers (NVIDIA/nccl issues 342 and 1518)."""
NCCL_SEGMENTS_PER_RANK = 10
"""Two channels, as such GPUs get (issue 1518), of a ring, of a tree's two directions, and of sends to both
neighbours in the pipeline. NVIDIA's guide (NCCL, "Shared memory") asks for 1g; this is 0.8 GB for 8 GPUs."""


def check_shared_memory(devices: Sequence[str], directory: str = "/dev/shm") -> None:
    """Raises SpecError if NCCL would not find room there for the ranks of this cluster.

    It would fail, or die of SIGBUS, when the first ranks talk, after the cluster has joined. Only several
    GPUs need any: the ranks of a CPU cluster talk through sockets, and nothing else of ours is in /dev/shm.
    """
    if len(devices) < 2 or not devices[0].startswith("cuda"):
        return
    try:
        state = os.statvfs(directory)
    except OSError:
        return  # NCCL has other ways where there is no such directory
    free, need = state.f_bavail * state.f_frsize, len(devices) * NCCL_SEGMENTS_PER_RANK * NCCL_SEGMENT_BYTES
    if free < need:
        raise SpecError(
            f"{directory} has {free / 1e6:.0f} MB free, and NCCL needs {need / 1e6:.0f} MB there between "
            f"{len(devices)} GPUs. In Docker start the container with --shm-size {math.ceil(need / 2**30)}g; "
            "without Docker, look what fills it, or use one GPU."
        )


def _check_gpus(text: str, devices: list[str]) -> None:
    if len(set(devices)) != len(devices):
        raise SpecError(f"devices = {text!r} names a GPU twice; a GPU holds one process.")
    found = _num_gpus()
    for device in devices:
        if int(device.removeprefix("cuda:")) >= found:
            raise SpecError(
                f"devices = {text!r}: there is no {device}; torch finds {found} GPUs on this machine. "
                "Without a GPU use cpu:1."
            )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
