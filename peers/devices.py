"""The devices of a cluster: one rank process per device."""

import re

from p2p_dilocox.errors import SpecError

__all__ = ["check_form", "parse_devices"]

_FORMS = "Give cpu:2 (two processes), cuda:0,1 (one per GPU) or auto."


_CPUS = re.compile(r"cpu(?::([0-9]{1,4}))?")
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
    if not 1 <= len(devices) <= stages:
        raise SpecError(
            f"devices = {text!r} means {len(devices)} processes; this run has {stages} stages, "
            f"so a cluster has 1 to {stages} of them."
        )
    return tuple(devices)


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
