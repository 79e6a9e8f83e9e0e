"""A cell of a comparison as a real swarm: a process per cluster, hosts of their own, links of one speed."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from p2p_dilocox.comparison import Cell, Result, Setup, cell_file, keep_result, result_of
from p2p_dilocox.errors import ClusterError, SpecError, StateError
from p2p_dilocox.events import Evaluated, Event, InnerStep, RoundCommitted
from p2p_dilocox.runspec import parse_run, total_inner_steps
from p2p_dilocox.shaped_links import Links, bits_per_s, why_not
from p2p_dilocox.simulation import Point
from p2p_dilocox.sinks import read_events
from p2p_dilocox.swarm.identity import SigningKey

from .demo import Cluster, Host, cluster_name, train_clusters
from .display import PlainDisplay

__all__ = ["check_link", "run_linked_cell"]

_MOST = 26


def check_link(rate: str, setup: Setup) -> None:
    """Raises SpecError for what no links can have, StateError if there can be none here."""
    if setup.clusters > _MOST:
        raise SpecError(f"--link with {setup.clusters} clusters: at most {_MOST}, each is a process")
    if setup.warm_steps:
        raise SpecError(f"--link: real clusters cannot start after {setup.warm_steps} steps. Give --warm 0")
    if setup.away:
        raise SpecError("--link: real clusters do not come and go by themselves. Give --away 0")
    try:
        bits_per_s(rate)
    except ValueError as error:
        raise SpecError(f"--link: {error}") from error
    if reason := why_not():
        raise StateError(f"--link {rate}: {reason}. Without --link, links are simulated")


def run_linked_cell(
    setup: Setup, cell: Cell, out: Path, rate: str, progress: Callable[[int, int], None]
) -> Result:
    """Train it, and keep its result in `out`. rate: of every link, both ways, in tc's units.

    progress: inner steps done, of all clusters, and in all. Raises ClusterError if a cluster fails, or if
    they end with different parameters.
    """
    directory = out / "linked" / cell_file(setup, cell, out, rate).stem
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _give_keys(out / "linked", directory, setup.clusters)
    text = setup.run_text(cell.recipe, cell.seed)
    (directory / "run.toml").write_text(text, encoding="utf-8")
    spec, quiet = parse_run(text), PlainDisplay(lambda _line: None)
    total = setup.clusters * total_inner_steps(spec)
    clusters: Sequence[Cluster] = []
    with Links(setup.clusters + 1, rate) as links:
        hosts = [Host(links.address(n), links.prefix(n)) for n in range(setup.clusters + 1)]
        run = str(directory / "run.toml")
        with contextlib.closing(train_clusters(directory, run, spec, hosts, 1, [])) as ticks:
            for clusters in ticks:
                for cluster in clusters:
                    cluster.follow(quiet)
                done = (max(0, c.progress.t - 1) * spec.inner.H + c.progress.h for c in clusters)
                progress(sum(done), total)
    digests = [cluster.progress.digests for cluster in clusters]
    if not digests[0] or any(d != digests[0] for d in digests):
        raise ClusterError(f"{cell.recipe}: the clusters end with different parameters. See {directory}")
    utilisation = sum(cluster.progress.utilisation or 0.0 for cluster in clusters) / len(clusters)
    events = [list(read_events(cluster.state / "events.jsonl")) for cluster in clusters]
    result = _told(setup, cell, events, utilisation)
    keep_result(setup, cell, out, result, rate)
    return result


def _give_keys(shared: Path, directory: Path, clusters: int) -> None:
    """The same identities in every cell: what a cluster trains on follows from its id."""
    for number in range(clusters):
        name = cluster_name(number)
        SigningKey.load_or_create(shared / f"{name}.key")
        (directory / name).mkdir(mode=0o700)
        shutil.copy(shared / f"{name}.key", directory / name / "cluster.key")


def _told(setup: Setup, cell: Cell, events: Sequence[Sequence[Event]], utilisation: float) -> Result:
    """events: of each cluster, of one rank. Seconds count from the first inner step."""
    steps = [[e for e in of if isinstance(e, InnerStep)] for of in events]
    rounds = [[e for e in of if isinstance(e, RoundCommitted)] for of in events]
    began = min(of[0].time - of[0].seconds for of in steps)
    ended = max(e.time for of in events for e in of if isinstance(e, InnerStep | RoundCommitted))
    points = [
        Point(
            e.t, max(0.0, e.time - began), sum(s.tokens for of in steps for s in of if s.time <= e.time),
            sum(r.sent_bytes for of in rounds for r in of if r.t <= e.t) / len(events), e.val_loss,
            e.mean_val_loss,
        )
        for e in events[0] if isinstance(e, Evaluated)
    ]  # fmt: skip
    return result_of(
        setup, cell, points, tokens=sum(s.tokens for of in steps for s in of),
        sent_bytes=sum(r.sent_bytes for of in rounds for r in of) / len(events),
        utilisation=utilisation, seconds=ended - began,
    )  # fmt: skip
