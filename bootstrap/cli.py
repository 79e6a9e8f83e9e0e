"""dilocox-bootstrap: parse, call, print."""

from pathlib import Path

import click

from p2p_dilocox.program import DirectoryName, Program


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="p2p-dilocox")
def main(verbose: bool) -> None:
    """Host a DiLoCoX run: sign its spec and be the address where clusters find each other."""


@main.command()
@click.option(
    "--run", "run", required=True, metavar="RUN", help="A run.toml, or the name of a shipped one: demo."
)
@click.option(
    "--state-dir",
    required=True,
    type=DirectoryName(),
    help="Keys, spec and join link.",
)
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDR",
    help="Multiaddress to listen on. Default: /ip4/0.0.0.0/tcp/31337.",
)
@click.option(
    "--announce", multiple=True, metavar="ADDR", help="Multiaddress under which others reach this host."
)
@click.option(
    "--archive",
    type=click.IntRange(0, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="Keep the last N states of the run and the rounds since, so that it outlives its clusters. 0: none.",
)
def serve(
    run: str, state_dir: Path, listen: tuple[str, ...], announce: tuple[str, ...], archive: int
) -> None:
    """Serve RUN until Ctrl-C. Prints the link with which clusters join."""
    from .serve import serve_run

    serve_run(run, state_dir, listen=listen, announce=announce, archive=archive)
