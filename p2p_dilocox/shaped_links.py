"""Hosts on one machine, joined by links of a chosen speed: network namespaces on a bridge of their own.

Needs Linux, root and iproute2. Nothing touches the machine's own network: the bridge has a namespace too.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Links", "bits_per_s", "why_not"]

_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_PREFIX = "dilocox"
_SUBNET = "10.213.0"
_COMMAND_S = 20.0  # `ip` and `tc` answer at once; a machine where they do not must not hang a test
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ShapingError(RuntimeError):
    """`ip` or `tc` failed."""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True)
    except subprocess.CalledProcessError as error:
        raise ShapingError(f"{' '.join(command)}: {error.stderr.strip()}") from error
    return done.stdout


def why_not() -> str:
    """Why this machine cannot have such hosts; "" if it can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with Links(1, "1gbit"):
            return ""
    except (ShapingError, subprocess.TimeoutExpired) as error:
        return f"no network namespaces with shaped links here: {error}"


class Links:
    """`count` hosts, numbered from 0. A context: at its end all namespaces are removed, also those of earlier
    runs that were killed."""

    def __init__(self, count: int, rate: str) -> None:
        """rate: of every link, both ways, in tc's units: 2mbit, 1gbit."""
        self._count, self._rate = count, rate
        self._hub = f"{_PREFIX}-{os.getpid()}-hub"

    def __enter__(self) -> Self:
        _remove(lambda owner: not _alive(owner))
        try:
            _run("ip", "netns", "add", self._hub)
            _run("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", "br0", "up")
            for host in range(self._count):
                self._add(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        _remove(lambda owner: owner == os.getpid())

    def prefix(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def namespace(self, host: int) -> str:
        return f"{_PREFIX}-{os.getpid()}-{host}"

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def set_rate(self, host: int, rate: str) -> None:
        for namespace, device in ((self.namespace(host), "eth0"), (self._hub, f"p{host}")):
            burst = str(max(32768, int(bits_per_s(rate) / 8 / 250)))
            shape = ["tbf", "rate", rate, "burst", burst, "latency", "200ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def cut(self, host: int) -> None:
        """Unplug it: what is sent either way is lost without a word."""
        _run("ip", "-n", self._hub, "link", "set", f"p{host}", "down")

    def join(self, host: int) -> None:
        _run("ip", "-n", self._hub, "link", "set", f"p{host}", "up")

    def count_bytes(self, host: int) -> tuple[int, int]:
        """Sent and received by a host since it is there, all headers included."""
        (link,) = json.loads(_run("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", "eth0"))
        return int(link["stats64"]["tx"]["bytes"]), int(link["stats64"]["rx"]["bytes"])

    def _add(self, host: int) -> None:
        name, port = self.namespace(host), f"p{host}"
        _run("ip", "netns", "add", name)
        peer = ["peer", "name", port, "netns", self._hub]
        _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
        _run("ip", "-n", self._hub, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        # BBR takes the burst that tbf lets through for the rate of the link, and loses most of what it sends;
        # reno is what every kernel lets a namespace choose.
        _run("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {_CONGESTION}")
        self.set_rate(host, self._rate)


def bits_per_s(rate: str) -> float:
    """Of a rate in tc's units."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or not float(found[1]):
        raise ValueError(f"rate {rate!r}, must be a number above 0 and kbit, mbit or gbit")
    return float(found[1]) * _UNITS[found[2]]


def _remove(which: Callable[[int], bool]) -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-(hub|\d+)", name)
        if owner and which(int(owner[1])):
            with contextlib.suppress(ShapingError):
                _run("ip", "netns", "del", name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
