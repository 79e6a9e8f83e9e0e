"""Serve a run: all that can be checked first, then the node."""

from collections.abc import Sequence
from pathlib import Path

import click

from p2p_dilocox.runspec import warnings_for
from p2p_dilocox.state_dir import locked_state_dir

from .addresses import DEFAULT_LISTEN, check_addresses
from .spec import fix_spec, load_run

__all__ = ["serve_run"]


def serve_run(
    run: str, state_dir: Path, *, listen: Sequence[str], announce: Sequence[str], archive: int
) -> None:
    """Serve `run` (a run.toml or a shipped name) until SIGINT or SIGTERM; then returns.

    listen, announce: multiaddresses. Port 0 in `listen` takes any free port. archive: states to keep.
    Raises SpecError, LinkError, StateError or NotTrustedError before anything is started.
    """
    listen = listen or (DEFAULT_LISTEN,)
    check_addresses(listen, announce)
    text, spec = load_run(run)
    with locked_state_dir(state_dir) as state:
        text = fix_spec(state, text, spec)
        for warning in warnings_for(spec):
            click.echo(f"warning: {warning}", err=True)
        from .host import host_run  # loads hivemind, which takes seconds: mistakes show before

        host_run(spec, text, state, listen=listen, announce=announce, archive=archive)
