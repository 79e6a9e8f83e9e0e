"""Join a run: fetch and check its spec, prepare the state directory, and hand over to the supervisor."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from p2p_dilocox.errors import LinkError, SpecError, StateError
from p2p_dilocox.placement import check_microbatches, place
from p2p_dilocox.ports import check_port, shift_port
from p2p_dilocox.runspec import RunSpec, parse_run
from p2p_dilocox.spec_diff import spec_diff
from p2p_dilocox.stability import unstable
from p2p_dilocox.state_dir import locked_state_dir, write_atomic
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.maddr import check_maddr
from p2p_dilocox.tokenizer import vocabulary_size

from .devices import check_form, check_shared_memory, parse_devices
from .display import Display, LiveDisplay, PlainDisplay
from .limits import Limits, read_limits
from .meeting import with_kept_peers
from .profile import Profile, load_profile
from .progress import Progress
from .supervisor import Supervisor
from .view import ClusterView, console

__all__ = ["JoinOptions", "join_run", "read_link"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOptions:
    """What is local to a machine. None: from the profile, or the default."""

    link: JoinLink
    state_dir: Path | None = None
    name: str | None = None
    profile: str | None = None
    devices: str | None = None
    threads: int | None = None
    listen: str | None = None
    announce: str | None = None
    client: bool = False
    schedule: str | None = None
    microbatches: int | None = None
    adamw_bits: int | None = None
    offload: bool = False
    hours: str | None = None
    upload_rate: str | None = None
    month_bytes: str | None = None
    gpu_c: int | None = None


def read_link(text: str | None, file: Path | None) -> JoinLink:
    """The join link from the command line or from a file. Raises LinkError."""
    if (text is None) == (file is None):
        raise LinkError("give the join link once: as LINK or with --link-file.")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LinkError(f"cannot read a join link from {file}: {error}") from error
    return JoinLink.parse(text or "")


def join_run(options: JoinOptions) -> int:
    """Train until the run is complete, the cluster is told to leave, or a signal. Returns the exit code.

    0: complete or left; 128 + n: signal n. Raises DilocoxError otherwise, see errors.py.
    """
    since, link = time.time(), options.link
    profile = load_profile(options.profile) if options.profile is not None else Profile()
    listen = profile.listen if options.listen is None else options.listen
    announce = profile.announce if options.announce is None else options.announce
    wanted_devices = profile.devices if options.devices is None else options.devices
    if options.client and (options.listen is not None or options.announce is not None):
        raise LinkError("--client: nobody can dial this cluster. Leave out --listen and --announce.")
    check_port(check_maddr(listen))
    if announce is not None:
        check_maddr(announce, announce=True)
    check_form(wanted_devices)
    caps = read_limits(
        options.hours or profile.hours, options.upload_rate or profile.upload_rate,
        options.month_bytes or profile.month_bytes, options.gpu_c or profile.gpu_c,
    )  # fmt: skip
    if options.name is not None and not _NAME.fullmatch(options.name):
        raise SpecError(f"name {options.name!r}: must be 1 to 32 of letters, digits, '.', '_' and '-'.")
    with locked_state_dir(options.state_dir or Path.home() / ".dilocox" / link.run_id) as state:
        # These load hivemind and torch, which takes seconds. A mistake above shows before.
        from p2p_dilocox.data.text import source_files
        from p2p_dilocox.inner import check_bits
        from p2p_dilocox.swarm.identity import SigningKey

        from .visit import fetch_spec

        key = SigningKey.load_or_create(state / "cluster.key")
        link = with_kept_peers(state, link)
        text = fetch_spec(link)
        spec = _keep_spec(state, text, link)
        for warning in unstable(spec):
            click.echo(f"warning: {warning}", err=True)
        source_files(spec.data)  # before anything joins the swarm: are the files here?
        vocabulary_size(spec.data.tokenizer)
        devices = parse_devices(wanted_devices, spec.model.stages)
        schedule = options.schedule or profile.schedule or spec.inner.schedule
        microbatches = options.microbatches or profile.microbatches or spec.inner.microbatches
        adamw_bits = options.adamw_bits or profile.adamw_bits
        check_bits(adamw_bits)
        place(schedule, spec.model.stages, len(devices))
        check_microbatches(schedule, len(devices), microbatches, spec.inner.batch_size)
        check_shared_memory(devices)
        threads = options.threads or profile.threads or max(1, _cores() // len(devices))
        name = options.name or f"cluster-{key.cluster_id[:6]}"
        workers: list[dict[str, Any]] = [
            {
                "rank": rank,
                "num_ranks": len(devices),
                "device": device,
                "threads": threads,
                "state_dir": str(state),
                "link": str(link),
                "run_text": text,
                "name": name,
                "listen": shift_port(listen, rank),
                "announce": shift_port(announce, rank) if announce else None,
                "client": options.client,
                "schedule": schedule,
                "microbatches": microbatches,
                "adamw_bits": adamw_bits,
                "offload": options.offload or profile.offload,
                "since": since,
                "upload_rate": caps.upload_rate / len(devices) if caps.upload_rate else None,
            }
            for rank, device in enumerate(devices)
        ]
        for worker in workers:
            check_port(worker["listen"])
        progress = Progress(
            run_id=link.run_id,
            cluster_id=key.cluster_id,
            name=name,
            recipe=spec.run.recipe,
            num_ranks=len(devices),
            outer_steps=spec.run.outer_steps,
        )
        display = _open_display(progress)
        try:
            display.say(
                f"cluster {name} {key.cluster_id} in run {link.run_id}: "
                f"{', '.join(devices)}; state in {state}"
            )
            # The round in flight, and as long again for the inner step and the save.
            leave_s = 2 * spec.deadlines.round_s
            limits = Limits(state, caps)
            outcome = Supervisor(state, workers, progress, display, limits, leave_s=leave_s).run()
        finally:
            display.close()
        display.say(f"{outcome.reason} at outer step {progress.committed}")
        return outcome.exit_code


def _keep_spec(state: Path, text: str, link: JoinLink) -> RunSpec:
    """The parsed spec; its text is kept in STATE/run.toml and must not change between starts."""
    spec = parse_run(text, name=f"run.toml of {link.run_id}")
    if spec.run.id != link.run_id:
        raise SpecError(
            f"the link is for run {link.run_id!r}, the spec behind it is for {spec.run.id!r}. "
            "Ask for a new link."
        )
    kept = state / "run.toml"
    if kept.exists() and kept.read_bytes() != text.encode():
        raise StateError(f"{state} {_whose(kept, spec)}. Give another --state-dir.")
    write_atomic(kept, text)
    return spec


def _whose(kept: Path, spec: RunSpec) -> str:
    """What run a state directory belongs to that is not of this one."""
    try:
        old = parse_run(kept.read_text(encoding="utf-8"))
    except (SpecError, OSError, UnicodeDecodeError):
        return "belongs to another run, whose spec cannot be read"
    diff = spec_diff(old, spec) or "its comments differ"
    return f"belongs to run {old.run.id!r} by another spec (there: that directory, here: this run): {diff}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _open_display(progress: Progress) -> Display:
    screen = console()
    return LiveDisplay(screen, ClusterView(progress)) if screen.is_terminal else PlainDisplay()
