"""What a rank is made of, in the order in which it must be made."""

import asyncio
import contextlib
import datetime
import json
import logging
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
from p2p_dilocox.averaging.coded import StageLayouts, codec_thread
from p2p_dilocox.averaging.company import CALL_FAILED, Company, Progress
from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.round import Rounds
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.states import StateShelf
from p2p_dilocox.checkpoint.store import CheckpointStore, names_of_stages
from p2p_dilocox.data import Batches, load_tokens
from p2p_dilocox.data_share import open_data_share
from p2p_dilocox.errors import DriftedError, LostError
from p2p_dilocox.events import Event, Finished, Phase, Warned
from p2p_dilocox.gradient_sum import build_inner
from p2p_dilocox.history import History
from p2p_dilocox.lineage import combined_digest, genesis
from p2p_dilocox.local_outer import build_local_outer
from p2p_dilocox.outer import OuterState
from p2p_dilocox.pipeline import Pipeline, build_chunks, config_from_spec, cut_layers, read_skeleton
from p2p_dilocox.placement import place
from p2p_dilocox.runspec import RunSpec, parse_run, tokens_per_outer_step
from p2p_dilocox.settings import most_inner_steps
from p2p_dilocox.sinks import TensorBoardSink
from p2p_dilocox.swarm.gate import Gate, allowed_with
from p2p_dilocox.swarm.identity import SigningKey, cluster_id_of, ensure_libp2p_identity
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.loop import NetworkThread
from p2p_dilocox.swarm.messages import RankAddress, unpack
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.pace import Pace
from p2p_dilocox.swarm.signed import spec_digest
from p2p_dilocox.trainer import Rank, evaluate, parameter_digests, train
from p2p_dilocox.wish import Stop, Wish

from .entering import enter_run
from .farewell import who_keeps
from .meeting import keep_link
from .recovery import recover
from .timeline import Timeline

__all__ = ["run_rank"]

_NETWORK_S = 60.0  # start, fetch, publish: each with its own deadlines inside, this one is the last resort
_FAREWELL_S = 20.0
_LOG = logging.getLogger(__name__)


def run_rank(config: dict[str, Any], report: Callable[[Event], None], wish: Wish) -> None:
    """Join the run as one rank and train until the run is
    complete or `wish` says leave. Raises DilocoxError."""
    index, num_ranks, state = int(config["rank"]), int(config["num_ranks"]), Path(config["state_dir"])
    spec, link = _as_here(parse_run(config["run_text"]), config), JoinLink.parse(config["link"])
    torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    report = Timeline(report, max(0.0, time.time() - config["since"])) if index == 0 else report
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
        for address, why in node.unreachable.items():
            _LOG.warning("%s: %s", address, why)

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
            keeping = asyncio.run_coroutine_threadsafe(
                keep_link(state, link, lead.company.addresses), network.loop
            )
            stack.callback(keeping.cancel)
        try:
            enter_run(spec, rank, lead, network, state, say)
            while not (complete := _train(spec, rank, say)) and rank.wanted < Wish.LEAVE:
                enter_run(spec, rank, lead, network, state, say)  # it comes back as one that has been away
        except Stop:
            complete = False
        if lead is not None and rank.wish.value != Wish.LEAVE_NOW:
            say("leaving", "staying for clusters that are not done")
            with contextlib.suppress(*CALL_FAILED, TimeoutError):
                if kept := network.call(who_keeps(lead.company), _FAREWELL_S):
                    report(Warned(rank=index, message=kept))
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

    skeleton = read_skeleton(config_from_spec(spec.model))
    cuts = cut_layers(skeleton, spec.model.stages, spec.model.cut)
    placement = place(spec.inner.schedule, spec.model.stages, num_ranks)
    held = placement.stages_of(index)
    spans = build_chunks(
        skeleton, placement, index, cuts, seed=spec.run.seed, device=device,
        documents=spec.data.packing == "documents",
        weights=Path(spec.model.path) if spec.model.start == "weights" else None,
    )  # fmt: skip
    pipeline = Pipeline(spec, spans, index, num_ranks, device)
    if index == 0:
        load_tokens(spec, state / "tokens")  # encodes the text; the other ranks find it in the cache
    pipeline.barrier()
    batches = Batches(load_tokens(spec, state / "tokens"), spec, key.cluster_id)

    names = names_of_stages(pipeline.stage_of)
    embeddings = spans[0].embedding_names
    dense = spec.compression.never_factored(embeddings)
    offload = config["offload"] and device.type != "cpu"  # on a CPU all is in main memory anyway
    outer = OuterState(spec, pipeline.parameters, dense, genesis(digest), offload=offload)
    if spec.model.start == "weights":
        digests = pipeline.gather(json.dumps({s: outer.digest(names[s]) for s in held}).encode())
        whole = {int(s): d for of_rank in digests for s, d in json.loads(of_rank).items()}
        outer.lineage = genesis(digest, combined_digest(whole))
    layouts = {s: StageLayouts(outer, names[s], dense, sum(map(len, cuts))) for s in held}
    progress, codec = Progress(lineage=outer.lineage), codec_thread()
    stack.callback(codec.shutdown, wait=False, cancel_futures=True)

    kept, shelf = KeptRounds(state / "rounds", lead=index == 0), StateShelf(state / "checkpoints")
    service = Service(
        node,
        Gate(key, link.run_id, node.peer_id, allowed_with(spec.run.members, cluster_id_of(link.organiser))),
        patience_s=timeouts.round_s,
        average_of=kept.average_of,
        piece_of=shelf.piece,
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
            result_after=kept.result_after,
            offer=shelf.offer,
        )
        service.desk = lead
    rounds = Rounds(
        loop=network.loop, service=service, outer=outer, layouts=layouts, me=key.cluster_id, lead=lead,
        lead_peer=addresses[0].peer, progress=progress, timeouts=timeouts, weight_cap=weight_cap, codec=codec,
        kept=kept,
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
        checkpoints=CheckpointStore(
            state / "checkpoints", run_id=spec.run.id, spec_digest=digest, keep=spec.checkpoint.keep,
            inner_steps=most_inner_steps(spec), key=key, kept=kept, report=report,
        ),
        local=build_local_outer(spec.local, pipeline.parameters),
        anchors=build_anchor_mean(spec),
        adapting=build_adapting(spec, pipeline.stage_of, outer.basis, embeddings),
        wish=wish, report=report, share=open_data_share(spec, state, key.cluster_id, progress),
    )  # fmt: skip
    recover(spec, rank, state, digest)
    return rank, lead


def _train(spec: RunSpec, rank: Rank, say: Callable[[str, str], None]) -> bool:
    say("warming up", "trains; its first round makes it count")
    try:
        complete = train(spec, rank)
    except DriftedError:
        if rank.index == 0:  # else the cluster would come back with the same parameters
            aside = rank.checkpoints.set_aside()
            rank.report(Warned(rank=0, message=f"the checkpoints of drifted parameters are now in {aside}"))
        raise
    except LostError as error:
        if rank.lost_at == rank.outer.t:  # looking has not helped
            raise
        rank.lost_at, rank.pending, rank.progress.astray = rank.outer.t, None, ""
        if rank.index == 0:
            rank.report(Warned(rank=0, message=str(error)))
        complete = False
    if complete:
        say("draining", "final evaluation and checkpoint")
        evaluate(spec, rank)
    rank.checkpoints.wait()
    rank.checkpoints.save(rank)
    rank.checkpoints.wait()
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
