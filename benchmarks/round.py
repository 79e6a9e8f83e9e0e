"""One averaging round among D clusters, each a process of its own, beside hivemind's own averager in fp16.

    python benchmarks/round.py [--clusters 2 4] [--side 1024] [--rounds 7] [--json]

Every cluster has four matrices [side, side] and a vector. "ours" is a whole round of the recipe `dilocox`:
roll call, both phases, votes, decoding, error feedback. "empty" is the same with almost nothing to average:
what agreeing costs. "hivemind fp16" is DecentralizedAverager.step with an exact target group size. Seconds
are medians over rounds of the slowest cluster. All share this machine's cores: compare columns, not machines.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

SPEC = """
[run]
id = "bench"
recipe = "{recipe}"
outer_steps = 1000
min_clusters = {clusters}
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
[inner]
H = 1
batch_size = 1
lr = 1e-3
"""


def our_rounds(link: dict[str, Any], clusters: int, side: int, rounds: int) -> list[dict[str, float]]:
    import torch

    from p2p_dilocox.averaging.coded import stage_layout
    from p2p_dilocox.averaging.company import Company, Progress
    from p2p_dilocox.averaging.deadlines import Timeouts
    from p2p_dilocox.averaging.lead import Lead
    from p2p_dilocox.averaging.offer import Offer
    from p2p_dilocox.averaging.round import Rounds, codec_thread
    from p2p_dilocox.averaging.service import Service
    from p2p_dilocox.lineage import genesis
    from p2p_dilocox.outer import OuterState
    from p2p_dilocox.runspec import parse_run
    from p2p_dilocox.swarm.gate import Gate
    from p2p_dilocox.swarm.identity import SigningKey
    from p2p_dilocox.swarm.loop import NetworkThread
    from p2p_dilocox.swarm.messages import RankAddress
    from p2p_dilocox.swarm.node import Node
    from p2p_dilocox.swarm.signed import SignedRun, spec_digest

    torch.set_num_threads(1)
    text = SPEC.format(recipe="dilocox", clusters=clusters)
    spec, digest, timeouts = parse_run(text), spec_digest(text), Timeouts(60.0)
    theta = {f"matrix{i}": torch.randn(side, side) for i in range(4)} | {"vector": torch.randn(side)}
    outer = OuterState(spec, theta, frozenset(), genesis(digest))
    progress, key, network = (
        Progress(lineage=outer.lineage, state="training"),
        SigningKey.generate(),
        NetworkThread(),
    )
    node = network.call(
        Node.start(
            run_id="bench",
            organiser=bytes.fromhex(link["organiser"]),
            initial_peers=link["peers"],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        ),
        30.0,
    )
    service = Service(
        node,
        Gate(key, "bench", node.peer_id),
        patience_s=60.0,
        average_of=lambda t, stage: made.kept.average_of(t, stage),
        snapshot_of=lambda stage: b"",
    )
    address = RankAddress(
        peer=node.peer_id, maddrs=network.call(node.maddrs(), 10.0), first_stage=0, last_stage=0
    )
    company = Company(
        node=node, service=service, key=key, name="bench", ranks=[address],
        signed=SignedRun.from_bytes(bytes.fromhex(link["signed"])), timeouts=timeouts, progress=progress,
        weight_cap=1.0,
    )  # fmt: skip
    lead = Lead(
        company,
        spec_digest=digest,
        num_stages=1,
        min_clusters=clusters,
        result_after=lambda t: made.kept.result_after(t),
    )
    service.desk = lead
    layout = stage_layout(outer, list(theta), frozenset())
    made = Rounds(
        loop=network.loop, service=service, outer=outer, layouts={0: layout}, me=key.cluster_id, lead=lead,
        lead_peer=node.peer_id, progress=progress, timeouts=timeouts, weight_cap=1.0,
        codec=codec_thread(),
    )  # fmt: skip
    network.call(service.start([node.peer_id]), 10.0)
    network.call(company.start(), 10.0)
    coded = layout.coded_bytes()
    predicted = (clusters - 1) / clusters * (coded.contribution + coded.average)
    results = []
    for t in range(1, rounds + 1):
        for p in theta.values():
            p.sub_(0.01 * torch.randn_like(p))
        outer.contribute(theta)
        norm = math.sqrt(sum(float(r.double().square().sum()) for r in outer.residual.values()))
        started = time.monotonic()
        outcome = made.start(t, Offer(1.0, norm)).wait(lambda: False)
        assert outcome is not None
        assert len(outcome.steps[0].members) == clusters, outcome.reason
        step = outcome.steps[0]
        assert step.own is not None
        outer.commit(step.average, step.own)
        with outer.restart_(theta, 0.5):
            outer.step(step.average, t, step.members, step.digest)
        seconds = time.monotonic() - started
        progress.move_to(t, outer)
        results.append({"seconds": seconds, "sent": outcome.sent_bytes, "predicted": predicted})
    network.call(lead.close(), 10.0)
    network.call(node.close(), 10.0)
    network.close()
    return results


def stock_rounds(link: dict[str, Any], clusters: int, side: int, rounds: int) -> list[dict[str, float]]:
    import hivemind
    import torch

    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=link["peers"], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.randn(side, side) for _ in range(4)] + [torch.randn(side)],
        dht,
        prefix="bench",
        target_group_size=clusters,
        compression=hivemind.compression.Float16Compression(),
        start=True,
    )
    results = []
    for _ in range(rounds):
        started = time.monotonic()
        group = averager.step(timeout=60)
        assert group is not None and len(group) == clusters
        results.append({"seconds": time.monotonic() - started})
    time.sleep(2.0)  # a peer that leaves at once breaks the last round of the others
    averager.shutdown()
    dht.shutdown()
    return results


async def host(kind: str, clusters: int, side: int, rounds: int) -> list[list[dict[str, float]]]:
    """A bootstrap node here, the clusters as children; their figures, cluster by cluster."""
    from p2p_dilocox.swarm.identity import SigningKey
    from p2p_dilocox.swarm.node import Node
    from p2p_dilocox.swarm.signed import sign_run

    key = SigningKey.generate()
    node = await Node.start(run_id="bench", organiser=key.public, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if kind == "stock":
        node.dht.protocol.record_validator = None  # hivemind's matchmaking stores keys of its own
    signed = sign_run(key, "bench", SPEC.format(recipe="dilocox", clusters=clusters))
    link = {"organiser": key.public.hex(), "signed": signed.pack().hex(), "peers": await node.maddrs()}
    arguments = [
        sys.executable,
        __file__,
        "--child",
        kind,
        "--link",
        json.dumps(link),
        "--clusters",
        str(clusters),
    ]
    arguments += ["--side", str(side), "--rounds", str(rounds)]
    children = [
        await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(clusters)
    ]
    try:
        outputs = await asyncio.wait_for(asyncio.gather(*(c.communicate() for c in children)), 300)
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
        await node.close()
    figures: list[list[dict[str, float]]] = [json.loads(out) for out, _ in outputs]
    return figures


def median_of_slowest(figures: list[list[dict[str, float]]], what: str) -> float:
    by_round = list(zip(*figures, strict=True))[1:]  # the first round waits for the last cluster to start
    return float(statistics.median(max(cluster[what] for cluster in each) for each in by_round))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=["ours", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--link", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run = our_rounds if options.child == "ours" else stock_rounds
        print(json.dumps(run(options.link, options.clusters[0], options.side, options.rounds)))
        sys.stdout.flush()
        os._exit(0)
    rows = []
    for clusters in options.clusters:
        ours = asyncio.run(host("ours", clusters, options.side, options.rounds))
        empty = asyncio.run(host("ours", clusters, 64, options.rounds))
        stock = asyncio.run(host("stock", clusters, options.side, options.rounds))
        sent, predicted = median_of_slowest(ours, "sent"), median_of_slowest(ours, "predicted")
        rows.append(
            {
                "clusters": clusters,
                "parameters": 4 * options.side**2 + options.side,
                "ours_s": round(median_of_slowest(ours, "seconds"), 3),
                "empty_s": round(median_of_slowest(empty, "seconds"), 3),
                "hivemind_fp16_s": round(median_of_slowest(stock, "seconds"), 3),
                "sent_bytes": int(sent),
                "sent_over_predicted": round(sent / predicted, 4),
                "fp16_bytes_over_sent": round(
                    2 * (clusters - 1) / clusters * 2 * (4 * options.side**2 + options.side) / sent, 2
                ),
            }
        )
        if not options.json:
            print(rows[-1])
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
