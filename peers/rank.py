"""What a rank is made of, in the order in which it must be made."""

import asyncio
import contextlib
import datetime
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from p2p_dilocox.adapting import build_adapting
from p2p_dilocox.anchor_mean import build_anchor_mean
from p2p_dilocox.averaging.coded import StageLayouts
from p2p_dilocox.averaging.company import CALL_FAILED, Company, Progress
from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.joining import Plan, download, make_plan
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.round import Rounds, codec_thread
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.snapshot import write_snapshot
from p2p_dilocox.checkpoint.store import CheckpointStore, load_rank, newest
from p2p_dilocox.data import Batches, load_tokens
from p2p_dilocox.data_share import open_data_share
from p2p_dilocox.errors import ClusterError, DriftedError, NotTrustedError
from p2p_dilocox.events import Event, Finished, Phase, Warned
from p2p_dilocox.gradient_sum import build_inner
from p2p_dilocox.history import History
from p2p_dilocox.lineage import combined_digest, genesis
from p2p_dilocox.local_outer import build_local_outer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.pipeline import Pipeline, build_chunks, config_from_spec, cut_layers
from p2p_dilocox.placement import place
from p2p_dilocox.runspec import RunSpec, parse_run, tokens_per_outer_step
from p2p_dilocox.settings import first_inner_steps
from p2p_dilocox.sinks import TensorBoardSink
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey, ensure_libp2p_identity
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.loop import NetworkThread
from p2p_dilocox.swarm.messages import RankAddress, unpack
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.pace import Pace
from p2p_dilocox.swarm.signed import spec_digest
from p2p_dilocox.trainer import Rank, evaluate, parameter_digests, train
from p2p_dilocox.wish import Stop, Wish

__all__ = ["run_rank"]

_NETWORK_S = 60.0  # start, fetch, publish: each with its own deadlines inside, this one is the last resort
_DOWNLOADS = 5
_REST_S = 0.5  # between two looks whether a pause is over
_LOG = logging.getLogger(__name__)


def run_rank(config: dict[str, Any], report: Callable[[Event], None], wish: Wish) -> None:
    """Join the run as one rank and train until the run is
    complete or `wish` says leave. Raises DilocoxError."""
    index, num_ranks, state = int(config["rank"]), int(config["num_ranks"]), Path(config["state_dir"])
    spec, link = _as_here(parse_run(config["run_text"]), config), JoinLink.parse(config["link"])
    torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    say = partial(_say, report, index)

    with contextlib.ExitStack() as stack:
        say("connecting", f"{len(link.peers)} addresses in the link")
        network = NetworkThread()
        stack.callback(network.close)
        identity = state / f"rank{index}.key"
        ensure_libp2p_identity(identity)
        node = network.call(
            Node.start(
                run_id=link.run_id,
                organiser=link.organiser,
                initial_peers=link.peers,
                # A client's ranks reach each other, and nobody else reaches them.
                host_maddrs=["/ip4/127.0.0.1/tcp/0" if config["client"] else config["listen"]],
                announce_maddrs=[config["announce"]] if config["announce"] else [],
                identity_path=identity,
                client_mode=config["client"],
            ),
            _NETWORK_S,
        )
        stack.callback(lambda: network.call(node.close(), 5.0))

        say("starting", "model and data")
        if num_ranks > 1:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=config["rendezvous"],
                rank=index,
                world_size=num_ranks,
                timeout=datetime.timedelta(seconds=max(120.0, 4 * spec.deadlines.round_s)),
            )
            stack.callback(dist.destroy_process_group)
        rank, lead = _build(spec, config, device, node, network, link, report, wish, stack)
        if lead is not None:
            stack.callback(lambda: _quietly(network, lead.close()))
        try:
            _enter_run(spec, rank, lead, network, say)
            while not (complete := _train(spec, rank, say)) and rank.wanted < Wish.LEAVE:
                _enter_run(spec, rank, lead, network, say)  # it comes back as one that has been away
        except Stop:
            complete = False
        if lead is not None and rank.wish.value != Wish.LEAVE_NOW:
            say("leaving", "staying for clusters that are not done")
            if not complete:
                rank.progress.state = "left"
                _quietly(network, lead.company.announce())
            _quietly(network, lead.company.linger(rank.outer.t))
        reason = "complete" if complete else "left"
        report(Finished(rank=index, t=rank.outer.t, reason=reason, parameter_digests=parameter_digests(rank)))


def _as_here(spec: RunSpec, config: dict[str, Any]) -> RunSpec:
    """The spec with what this cluster chose for itself; nothing of it shows in an average."""
    inner = replace(spec.inner, schedule=config["schedule"], microbatches=config["microbatches"])
    return replace(spec, inner=inner)


def _build(
    spec: RunSpec,
    config: dict[str, Any],
    device: torch.device,
    node: Node,
    network: NetworkThread,
    link: JoinLink,
    report: Callable[[Event], None],
    wish: Wish,
    stack: contextlib.ExitStack,
) -> tuple[Rank, Lead | None]:
    index, num_ranks, state = int(config["rank"]), int(config["num_ranks"]), Path(config["state_dir"])
    key = SigningKey.load_or_create(state / "cluster.key")
    digest = spec_digest(config["run_text"])
    timeouts, weight_cap = Timeouts(spec.deadlines.round_s), float(tokens_per_outer_step(spec))

    model_config = config_from_spec(spec.model)
    cuts = cut_layers(model_config, spec.model.stages, spec.model.cut)
    placement = place(spec.inner.schedule, spec.model.stages, num_ranks)
    held = placement.stages_of(index)
    spans = build_chunks(
        model_config, placement, index, cuts, seed=spec.run.seed, device=device,
        documents=spec.data.packing == "documents",
        weights=Path(spec.model.path) if spec.model.start == "weights" else None,
    )  # fmt: skip
    pipeline = Pipeline(spec, spans, index, num_ranks, device)
    if index == 0:
        load_tokens(spec, state / "tokens")  # encodes the text; the other ranks find it in the cache
    pipeline.barrier()
    batches = Batches(load_tokens(spec, state / "tokens"), spec, key.cluster_id)

    names = {s: [n for n, stage in pipeline.stage_of.items() if stage == s] for s in held}
    dense = spans[0].embedding_names
    offload = config["offload"] and device.type != "cpu"  # on a CPU all is in main memory anyway
    outer = OuterState(spec, pipeline.parameters, dense, genesis(digest), offload=offload)
    if spec.model.start == "weights":
        digests = pipeline.gather(json.dumps({s: outer.digest(names[s]) for s in held}).encode())
        whole = {int(s): d for of_rank in digests for s, d in json.loads(of_rank).items()}
        outer.lineage = genesis(digest, combined_digest(whole))
    layouts = {s: StageLayouts(outer, names[s], dense, sum(map(len, cuts))) for s in held}
    lock, progress, codec = threading.Lock(), Progress(lineage=outer.lineage), codec_thread()
    stack.callback(codec.shutdown, wait=False, cancel_futures=True)

    def snapshot_of(stage: int) -> bytes:
        with lock:
            return write_snapshot(outer, names[stage])

    service = Service(
        node,
        Gate(key, link.run_id, node.peer_id, spec.run.members),
        patience_s=timeouts.round_s,
        average_of=lambda t, stage: rounds.kept.average_of(t, stage),
        snapshot_of=snapshot_of,
        pace=Pace(config["upload_rate"]),
    )
    maddrs = network.call(node.maddrs(), _NETWORK_S)
    address = RankAddress(peer=node.peer_id, maddrs=maddrs[:16], stages=held)
    addresses = [unpack(a, RankAddress) for a in pipeline.gather(address.pack())]
    for other in addresses:
        if other.peer != node.peer_id:
            network.call(node.connect(other.peer, other.maddrs), _NETWORK_S)
    if config["client"]:
        addresses = [msgspec.structs.replace(a, maddrs=[]) for a in addresses]
    lead = None
    if index == 0:
        company = Company(
            node=node, service=service, key=key, name=config["name"], ranks=addresses,
            signed=network.call(node.fetch_run(), _NETWORK_S), timeouts=timeouts, progress=progress,
            weight_cap=weight_cap,
        )  # fmt: skip
        lead = Lead(
            company,
            spec_digest=digest,
            num_stages=spec.model.stages,
            min_clusters=spec.run.min_clusters,
            quorum=spec.run.quorum,
            result_after=lambda t: rounds.kept.result_after(t),
        )
        service.desk = lead
    rounds = Rounds(
        loop=network.loop, service=service, outer=outer, layouts=layouts, me=key.cluster_id, lead=lead,
        lead_peer=addresses[0].peer, progress=progress, timeouts=timeouts, weight_cap=weight_cap, codec=codec,
    )  # fmt: skip
    network.call(service.start([a.peer for a in addresses]), _NETWORK_S)
    if lead is not None:
        network.call(lead.company.start(), _NETWORK_S)
    pipeline.barrier()  # every rank answers now

    if index == 0:
        board = TensorBoardSink(state / "tensorboard")
        stack.callback(board.close)
        report = _both(report, board.write)
    history = History(
        state / "history" / f"rank{index}.jsonl", spec.run.id, key.cluster_id, held, spec.deadlines.round_s
    )
    stack.callback(history.close)
    if lead is not None:
        for norms in history.norms():
            lead.norm_cap.remember(norms)
    rank = Rank(
        index=index, cluster_id=key.cluster_id, pipeline=pipeline,
        inner=build_inner(spec, pipeline, outer, bits=config["adamw_bits"]),
        outer=outer, rounds=rounds, batches=batches, progress=progress, history=history,
        checkpoints=CheckpointStore(state / "checkpoints", digest, spec.checkpoint.keep),
        local=build_local_outer(spec.local, pipeline.parameters),
        anchors=build_anchor_mean(spec),
        adapting=build_adapting(spec, pipeline.stage_of, list(outer.basis)),
        wish=wish, report=report, lock=lock, share=open_data_share(spec, state, key.cluster_id, progress),
    )  # fmt: skip
    saved = newest(state / "checkpoints", digest)
    if saved is not None:
        load_rank(saved, rank)
        progress.move_to(outer.t, outer)
        _say(
            report,
            index,
            "starting",
            f"resumed outer step {outer.t}, inner step {rank.h} from {saved.path.name}",
        )
    return rank, lead


def _enter_run(
    spec: RunSpec, rank: Rank, lead: Lead | None, network: NetworkThread, say: Callable[[str, str], None]
) -> None:
    """Wait for enough clusters, or fetch the state of one that is
    further; then the cluster counts as training."""
    waiting_since = time.monotonic()
    rank.progress.state = "joining"
    for _ in range(_DOWNLOADS):
        plan = _next_plan(spec, rank, lead, network)
        while plan.action in ("wait", "pause"):
            if plan.action == "pause":
                plan = _rest(spec, rank, plan, lead, network, say)
                continue
            waited_s = time.monotonic() - waiting_since
            say("waiting", f"{plan.detail}, {waited_s:.0f} s")
            time.sleep(min(2.0, 0.5 + waited_s / 20))
            plan = _next_plan(spec, rank, lead, network)
        if plan.action == "leave":
            raise Stop(Wish.LEAVE_NOW)
        if plan.action == "refused":
            raise NotTrustedError(plan.detail)
        if plan.action == "start" and rank.progress.state == "training":
            break
        if plan.action == "download":
            _download(spec, rank, plan, network, say)
        rank.progress.state = "training"  # from here their rounds wait for us; look what began before
    else:
        raise ClusterError(
            f"{_DOWNLOADS} downloads, and the swarm was ahead each time: "
            "is this link fast enough for the run?"
        )
    standing = plan.standing
    if standing is not None and standing.t >= rank.t - 1 + (rank.h > 0):
        # Start where the others are, in the same outer step and about as far in it.
        rank.t, rank.h = standing.t + 1, min(standing.h, first_inner_steps(spec, standing.t + 1) - 1)
        if standing.in_flight > standing.t:
            rank.pending, rank.t = rank.rounds.follow(standing.in_flight), standing.in_flight + 1
    rank.progress.h = rank.h
    if rank.outer.t == 0:
        evaluate(spec, rank)


def _next_plan(spec: RunSpec, rank: Rank, lead: Lead | None, network: NetworkThread) -> Plan:
    packed = b""
    if lead is not None:
        if rank.wish.value >= Wish.LEAVE:
            plan = Plan(action="leave")
        elif rank.wish.value:
            plan = Plan(action="pause", detail=rank.wish.reason)
        else:
            needed = spec.run.quorum if rank.outer.t else spec.run.min_clusters
            plan = network.call(make_plan(lead.company, rank.outer, needed), _NETWORK_S)
        packed = plan.pack()
    return unpack(rank.pipeline.broadcast(packed), Plan)


def _rest(
    spec: RunSpec, rank: Rank, plan: Plan, lead: Lead | None, network: NetworkThread,
    say: Callable[[str, str], None],
) -> Plan:  # fmt: skip
    """Stay in memory and do nothing until the wish is another one; nobody's round waits for us."""
    rank.progress.state = "paused"
    if lead is not None:
        _quietly(network, lead.company.announce())
    reason = None
    while plan.action == "pause":
        if plan.detail != reason:
            reason = plan.detail
            say("paused", reason)
        time.sleep(_REST_S)
        plan = _next_plan(spec, rank, lead, network)
    rank.progress.state = "joining"
    return plan


def _download(
    spec: RunSpec, rank: Rank, plan: Plan, network: NetworkThread, say: Callable[[str, str], None]
) -> None:
    """Try one donor. All ranks must get the same outer step of
    the same history, else none keeps what it has."""
    last = [0.0]

    def show(fraction: float) -> None:
        if fraction - last[0] > 0.05 or fraction == 1.0:
            last[0] = fraction
            say(
                "downloading",
                f"outer step {plan.standing.t if plan.standing else 0}, {fraction:.0%} from {plan.detail}",
            )

    stage_of = rank.pipeline.stage_of
    names = {s: [n for n in stage_of if stage_of[n] == s] for s in sorted(set(stage_of.values()))}
    service = rank.rounds.service
    snapshots, places = [], ""
    try:
        body = download(service, rank.outer, names, plan.donor, show)
        snapshots = network.call(body, 20 * spec.deadlines.round_s)
        places = ",".join(sorted({f"{s.t} {s.lineage}" for s in snapshots}))
    except (*CALL_FAILED, asyncio.CancelledError) as error:
        _LOG.warning("download from %s failed: %s", plan.detail, error)
        rank.report(Warned(rank=rank.index, message=f"download from {plan.detail} failed: {error}"))
    everywhere = {p.decode() for p in rank.pipeline.gather(places.encode())}
    if len(everywhere) == 1 and places and "," not in places:
        with rank.lock, torch.no_grad():
            for snapshot in snapshots:
                snapshot.load_into(rank.outer)
            for name, parameter in rank.pipeline.parameters.items():
                parameter.copy_(rank.outer.anchor[name])
            if rank.local:
                rank.local.reset_(rank.pipeline.parameters)
        rank.pipeline.sync_tied_()
        rank.unsent_tokens = 0
        rank.progress.move_to(rank.outer.t, rank.outer)
        rank.t, rank.h = rank.outer.t + 1, 0


def _train(spec: RunSpec, rank: Rank, say: Callable[[str, str], None]) -> bool:
    say("training", "")
    try:
        complete = train(spec, rank)
    except DriftedError:
        if rank.index == 0:  # else the cluster would come back with the same parameters
            aside = rank.checkpoints.set_aside()
            rank.report(Warned(rank=0, message=f"the checkpoints of drifted parameters are now in {aside}"))
        raise
    if complete:
        say("draining", "final evaluation and checkpoint")
        evaluate(spec, rank)
    rank.checkpoints.save(rank)
    return complete


def _both(first: Callable[[Event], None], second: Callable[[Event], None]) -> Callable[[Event], None]:
    def report(event: Event) -> None:
        first(event)
        second(event)

    return report


def _say(report: Callable[[Event], None], index: int, name: str, detail: str) -> None:
    report(Phase(rank=index, name=name, detail=detail))


def _quietly(network: NetworkThread, body: Any) -> None:
    """At the end, when others may be gone already: nothing that fails here may hide how the run ended."""
    with contextlib.suppress(*CALL_FAILED, TimeoutError):
        network.call(body, 15.0)
