"""dilocox-peer: parse, call, print."""

import json
from pathlib import Path
from typing import Any

import click

from p2p_dilocox.placement import SCHEDULES
from p2p_dilocox.plan.units import parse_bits_per_s, parse_bytes, parse_count, parse_flops
from p2p_dilocox.program import DirectoryName, Program, Quantity

# Commands import what they need when they run: torch and hivemind take seconds, --help should not.

STATE_DIR = DirectoryName()


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="p2p-dilocox")
def main(verbose: bool) -> None:
    """Contribute a cluster to a DiLoCoX run."""


@main.command()
@click.argument("run_file", metavar="RUN.TOML", type=click.Path(path_type=Path, dir_okay=False))
def validate(run_file: Path) -> None:
    """Check a run spec as a whole; print a summary, or every error."""
    from p2p_dilocox.runspec import load_run_file

    from .summary import spec_summary
    from .view import console

    console().print(spec_summary(load_run_file(run_file)))


@main.command()
@click.argument("run_file", metavar="[RUN.TOML]", required=False, type=click.Path(dir_okay=False))
@click.option("--devices", metavar="cpu:2|cuda:0,1|auto", help="They need not be on this machine.")
@click.option("--ranks", type=click.IntRange(min=1), help="So many GPUs. Default: one per stage.")
@click.option("--memory", type=Quantity("BYTES", parse_bytes), help="What each rank may use: 40GB, 40GiB.")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="As for join.")
@click.option("--microbatches", type=click.IntRange(min=1), help="As for join.")
@click.option("--adamw-bits", type=click.Choice(["8", "32"]), help="As for join.")
@click.option("--offload", is_flag=True, help="As for join.")
@click.option("--clusters", type=click.IntRange(2, 4096), help="In a round. Default: min_clusters.")
@click.option("--uplink", type=Quantity("RATE", parse_bits_per_s), help="Out of a cluster: 100Mbps.")
@click.option("--downlink", type=Quantity("RATE", parse_bits_per_s), help="Into it. Default: the uplink.")
@click.option("--flops", type=Quantity("FLOPS", parse_flops), help="Peak of one device: 312TFLOPS.")
@click.option("--mfu", type=click.FloatRange(0, 1, min_open=True), help="Part of it that is reached: 0.4.")
@click.option("--tokens-per-s", type=Quantity("COUNT", parse_count), help="Of a cluster, measured.")
@click.option("--tokens", type=Quantity("COUNT", parse_count), help="Goal: 20B. Default: those of the run.")
@click.option("--paper", is_flag=True, help="The cases of the DiLoCoX paper, beside its figures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(run_file: str | None, paper: bool, as_json: bool, **_options: Any) -> None:
    """What each rank of a cluster needs, and how fast the run would be. Exit code 10: it does not fit."""
    from .plan import DOES_NOT_FIT, PlanOptions, make_plan, paper_record, plan_record
    from .plan_view import paper_view, plan_view
    from .view import console

    if (run_file is None) != paper:
        raise click.UsageError("give either a RUN.TOML or --paper.")
    if run_file is None:
        click.echo(json.dumps(paper_record())) if as_json else console().print(paper_view())
        return
    made = make_plan(run_file, PlanOptions(**_options))
    click.echo(json.dumps(plan_record(made))) if as_json else console().print(plan_view(made))
    if made.fits is False:
        raise SystemExit(DOES_NOT_FIT)


@main.command("check-history")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a list of violations.")
def check_history(files: tuple[Path, ...], as_json: bool) -> None:
    """Check the rules V1 to V5 over history files or state directories. Exit code 9: a rule is broken."""
    from p2p_dilocox.invariants import check_history, read_history

    paths = [h for f in files for h in (sorted((f / "history").glob("*.jsonl")) if f.is_dir() else [f])]
    lines = read_history(paths)
    violations = check_history(lines)
    if as_json:
        click.echo(json.dumps(violations))
    else:
        for violation in violations:
            click.echo(violation)
        steps = {(line["run"], line["t"]) for line in lines}
        clusters = {line["cluster"] for line in lines}
        click.echo(
            f"{len(lines)} lines, {len(clusters)} clusters, {len(steps)} outer steps: "
            + (f"{len(violations)} violations" if violations else "no violation")
        )
    if violations:
        raise SystemExit(9)


@main.command()
@click.argument("link", required=False)
@click.option(
    "--link-file", type=click.Path(path_type=Path, dir_okay=False), help="Read the link from a file."
)
@click.option("--devices", metavar="cpu:2|cuda:0,1|auto", help="One process per device. Default: auto.")
@click.option("--state-dir", type=STATE_DIR, help="Default: ~/.dilocox/<run id>.")
@click.option("--name", help="What others see of this cluster. Default: cluster-<start of its id>.")
@click.option(
    "--listen", metavar="ADDR", help="Multiaddress to listen on; rank r takes port + r. Default: any port."
)
@click.option(
    "--announce", metavar="ADDR", help="Multiaddress under which others reach it; rank r takes port + r."
)
@click.option("--client", is_flag=True, help="Behind NAT: it dials out only, nobody can dial it.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Torch threads per process. Default: cores / processes."
)
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="Order of microbatches in the pipeline. Default: the run's.",
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    help="Pieces of a batch in the pipeline. Default: the run's.",
)
@click.option(
    "--adamw-bits",
    type=click.Choice(["8", "32"]),
    help="Of AdamW's moments; 8 needs bitsandbytes. Default: 32.",
)
@click.option(
    "--offload", is_flag=True, help="Keep the outer optimizer's state in main memory, not on a GPU."
)
@click.option("--hours", metavar="22:00-07:00", help="Local times between which it trains.")
@click.option(
    "--upload-rate", metavar="500kB", help="Bytes per second it sends at most; kB to TB, KiB to TiB."
)
@click.option("--month-bytes", metavar="50GB", help="Bytes it may send and receive in a calendar month.")
@click.option("--gpu-c", type=int, metavar="80", help="Degrees Celsius at which its GPUs rest.")
@click.option(
    "--cluster", "profile", metavar="PROFILE", help="A cluster profile (.toml) or a shipped one: cpu-2."
)
def join(
    link: str | None,
    link_file: Path | None,
    devices: str | None,
    state_dir: Path | None,
    name: str | None,
    listen: str | None,
    announce: str | None,
    client: bool,
    threads: int | None,
    schedule: str | None,
    microbatches: int | None,
    adamw_bits: str | None,
    offload: bool,
    hours: str | None,
    upload_rate: str | None,
    month_bytes: str | None,
    gpu_c: int | None,
    profile: str | None,
) -> None:
    """Join the run of LINK and train until it is complete, `leave` or Ctrl-C."""
    from .join import JoinOptions, join_run, read_link

    options = JoinOptions(
        link=read_link(link, link_file), state_dir=state_dir, name=name, listen=listen, announce=announce,
        client=client, devices=devices, threads=threads, schedule=schedule, microbatches=microbatches,
        adamw_bits=int(adamw_bits) if adamw_bits else None, offload=offload, profile=profile, hours=hours,
        upload_rate=upload_rate, month_bytes=month_bytes, gpu_c=gpu_c,
    )  # fmt: skip
    raise SystemExit(join_run(options))


@main.command("id")
@click.option("--state-dir", required=True, type=STATE_DIR)
def cluster_id(state_dir: Path) -> None:
    """Print the id of the cluster of a state directory, for the organiser's list of members."""
    from p2p_dilocox.state_dir import locked_state_dir
    from p2p_dilocox.swarm.identity import SigningKey

    with locked_state_dir(state_dir) as state:
        click.echo(SigningKey.load_or_create(state / "cluster.key").cluster_id)


@main.command()
@click.option("--state-dir", required=True, type=STATE_DIR)
@click.option("--now", is_flag=True, help="Do not finish the outer step, nor wait for the round in flight.")
def leave(state_dir: Path, now: bool) -> None:
    """Take the cluster of a state directory out of its run once its outer step is delivered."""
    from .control import request_leave

    click.echo(request_leave(state_dir, now=now))


@main.command()
@click.option("--state-dir", required=True, type=STATE_DIR)
@click.option("--now", is_flag=True, help="Do not finish the outer step.")
def pause(state_dir: Path, now: bool) -> None:
    """Stop training until `resume`; the processes stay, and nobody waits for them."""
    from .control import ask

    ask(state_dir, {"command": "pause", "now": now})
    click.echo(f"pauses after this {'inner' if now else 'outer'} step")


@main.command()
@click.option("--state-dir", required=True, type=STATE_DIR)
def resume(state_dir: Path) -> None:
    """Go on after `pause`, with what the others have done meanwhile."""
    from .control import ask

    ask(state_dir, {"command": "resume"})
    click.echo("resumes")


@main.command("link")
@click.option("--state-dir", required=True, type=STATE_DIR)
def link_command(state_dir: Path) -> None:
    """Print a join link that works while this cluster runs, also when the bootstrap node is gone."""
    from .meeting import read_kept_link

    click.echo(read_kept_link(state_dir))


@main.command()
@click.argument("link", required=False)
@click.option("--state-dir", type=STATE_DIR, help="A cluster of this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(link: str | None, state_dir: Path | None, as_json: bool) -> None:
    """What a cluster of this machine is doing, or who is in the run of LINK."""
    from .status import cluster_status, status_table, swarm_status, swarm_table
    from .view import console

    if (link is None) == (state_dir is None):
        raise click.UsageError("give either a LINK or --state-dir.")
    if state_dir is not None:
        record = cluster_status(state_dir)
        click.echo(json.dumps(record)) if as_json else console().print(status_table(record))
    elif link is not None:
        clusters = swarm_status(link)
        click.echo(json.dumps(clusters)) if as_json else console().print(swarm_table(clusters))


@main.command()
@click.argument("state_dirs", metavar="STATE_DIR...", nargs=-1, required=True, type=STATE_DIR)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def coverage(state_dirs: tuple[Path, ...], as_json: bool) -> None:
    """Which share of the data the clusters have seen how often. For runs with data.order = "shards"."""
    from p2p_dilocox.coverage import read_coverage

    found = read_coverage(state_dirs)
    if as_json:
        record = {"num_shards": found.num_shards, "seen": found.seen, "times": found.fractions()}
        click.echo(json.dumps(record | {"twice": found.twice, "outer_steps": found.by_cluster}))
        return
    for times, fraction in found.fractions().items():
        click.echo(f"{fraction:7.1%} of the data seen {times} times")
    steps = sum(found.by_cluster.values())
    click.echo(
        f"{found.num_shards} shards, {steps} outer steps of {len(found.by_cluster)} clusters; "
        f"{len(found.twice)} shards were trained by two at once or again after a crash"
    )


@main.command()
@click.argument("state_dir", type=STATE_DIR)
@click.argument("out", type=DirectoryName())
@click.option(
    "--average", type=click.IntRange(1), default=1, show_default=True, help="Mean of so many checkpoints."
)
def export(state_dir: Path, out: Path, average: int) -> None:
    """Write the last checkpoint of STATE_DIR to OUT as a Hugging Face model."""
    from .export import export_newest

    steps = export_newest(state_dir, out, average)
    which = (
        f"outer step {steps[0]}" if average == 1 else f"the mean of outer steps {', '.join(map(str, steps))}"
    )
    click.echo(f"wrote the model of {which} to {out}")


@main.command()
@click.argument("state_dirs", metavar="STATE_DIR...", nargs=-1, required=True, type=STATE_DIR)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("loss.png"), show_default=True
)
def plot(state_dirs: tuple[Path, ...], out: Path) -> None:
    """Draw loss, throughput and bytes of one or several clusters."""
    from p2p_dilocox.plot import load_curves, plot_curves

    plot_curves([load_curves(path) for path in state_dirs], out)
    click.echo(f"wrote {out}")


@main.command()
@click.option("--out", type=STATE_DIR, default=Path("runs/demo"), show_default=True)
@click.option("--run", default="demo", show_default=True, help="Another shipped run, or a run.toml.")
@click.option("--clusters", type=click.IntRange(1, 8), default=2, show_default=True)
def demo(out: Path, run: str, clusters: int) -> None:
    """Train a small model on this machine: a bootstrap node and clusters of two processes each."""
    from .demo import run_demo

    raise SystemExit(run_demo(out, run=run, num_clusters=clusters))


@main.command()
@click.argument("recipe_names", metavar="[RECIPE]...", nargs=-1)
@click.option(
    "--run", default="compare", show_default=True,
    help="A shipped run, or a run.toml: model, data, inner; and, if it has them, [compare] and [methods].",
)  # fmt: skip
@click.option("--clusters", type=click.IntRange(1, 64), help="Default: that of the run, or 4.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), help="Runs of each recipe. Default: as the run has it, or 1."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Inner steps of a cluster. Default: as the run has it, or 384.",
)
@click.option(
    "--warm", type=click.IntRange(min=0),
    help="Inner steps of an AllReduce before, as the start of all. Default: as the run has it, or 0.",
)  # fmt: skip
@click.option(
    "--allreduce-steps", type=click.FloatRange(min=0, min_open=True),
    help="Link speed: an fp16 AllReduce takes so many inner steps. Default: as the run has it, or 31.",
)  # fmt: skip
@click.option(
    "--away", type=click.FloatRange(0, 0.9),
    help="Part of its time that a cluster is gone, the first excepted. Default: as the run has it, or 0.",
)  # fmt: skip
@click.option(
    "--link", metavar="100mbit", default="",
    help="Real clusters on links of this rate, not simulated ones; needs root and iproute2.",
)  # fmt: skip
@click.option(
    "--quick", is_flag=True, help="64 inner steps of 2 clusters: whether every recipe works at all."
)
@click.option("--processes", type=click.IntRange(min=1), help="At a time. Default: one per core.")
@click.option("--out", type=DirectoryName(), default=Path("runs/compare"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per recipe.")
def compare(
    recipe_names: tuple[str, ...],
    run: str,
    clusters: int | None,
    seeds: int | None,
    steps: int | None,
    warm: int | None,
    allreduce_steps: float | None,
    away: float | None,
    link: str,
    quick: bool,
    processes: int | None,
    out: Path,
    as_json: bool,
) -> None:
    """Train one model by several recipes and set them side by side. Default: all that the run has in
    [methods], or all recipes; on simulated links.

    What OUT has from an earlier call is not run again.
    """
    from p2p_dilocox.comparison import Cell, Setup
    from p2p_dilocox.recipe import recipes
    from p2p_dilocox.runspec import read_run_text
    from p2p_dilocox.study import read_study

    from .compare import compare as run_all
    from .compare import comparison_table, default_processes, summary_record, write_comparison
    from .view import console

    text = read_run_text(run)
    study = read_study(text, Path(run).name)
    if quick:
        clusters, steps, seeds, warm = 2, 64, 1, 0
    setup = Setup(
        text=text, name=Path(run).name, methods=study.methods, clusters=clusters or study.clusters,
        inner_steps=steps or study.steps, warm_steps=study.warm if warm is None else warm,
        allreduce_steps=allreduce_steps or study.allreduce_steps,
        away=study.away if away is None else away, away_steps=study.away_steps,
    )  # fmt: skip
    if link:
        from .linked import check_link

        check_link(link, setup)
    names = recipe_names or list(study.methods) or list(recipes())
    cells = [
        Cell(name, seed) for name in names for seed in range(seeds or study.of_method.get(name, study.seeds))
    ]
    summaries = run_all(setup, cells, out, processes or default_processes(), link)
    files = write_comparison(summaries, out)
    if as_json:
        for summary in summaries:
            click.echo(json.dumps(summary_record(summary)))
        return
    console().print(comparison_table(summaries))
    click.echo(f"in {out}: {', '.join(files)}")
