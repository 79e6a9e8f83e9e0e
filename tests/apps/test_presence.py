"""Who is in a run: what `status LINK` makes of the heartbeats."""

import asyncio
import importlib
from typing import Any

from rich.console import Console

from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Presence, RankAddress
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.records import PRESENCE_LIFE_S

status = importlib.import_module("p2p_dilocox.peers.status")
IDS = ["b" * 16, "c" * 16, "d" * 16]


def presence(cluster: str, name: str, **changes: Any) -> Presence:
    rank = RankAddress(peer="Qm" + "a" * 44, maddrs=[], stages=[0, 1, 3])
    more = RankAddress(peer="Qm" + "b" * 44, maddrs=[], stages=[2, 5])
    values = {
        "t": 4, "h": 2, "state": "training", "loss": 2.5, "tokens_per_s": 10.0, "tokens": 300, "since": 9.0,
    }  # fmt: skip
    return Presence(cluster_id=cluster, name=name, ranks=[rank, more], **(values | changes))  # type: ignore[arg-type]


def test_a_second_cluster_with_a_name_is_told_from_the_first() -> None:
    """S9."""
    late, first, other = IDS
    clusters = {
        late: presence(late, "ridge", since=9.0),
        first: presence(first, "ridge", since=3.0),
        other: presence(other, "peak"),
    }
    assert status.distinct_names(clusters) == {late: "ridge~bbbbbb", first: "ridge", other: "peak"}


def test_the_swarm_is_shown_with_stages_share_of_tokens_and_last_heartbeat() -> None:
    clusters = {IDS[0]: (presence(IDS[0], "a"), 3.0), IDS[1]: (presence(IDS[1], "z", tokens=100), 21.4)}
    records = status.swarm_records(clusters)
    assert [(r["share"], r["stages"], r["seen_s"]) for r in records] == [
        (0.75, [0, 1, 2, 3, 5], 3.0),
        (0.25, [0, 1, 2, 3, 5], 21.4),
    ]
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(status.swarm_table(records))
    shown = capture.get()
    for part in ("2 clusters", "0-3,5", "75%", "21 s ago", "4+2"):
        assert part in shown, part
    assert status.swarm_records({}) == []


def test_a_ghost_is_forgotten_with_its_last_heartbeat_and_a_visitor_never_counted() -> None:
    """B8. The heartbeat is published as if two seconds of its life were left."""
    assert PRESENCE_LIFE_S <= 30.0
    key, organiser = SigningKey.generate(), SigningKey.generate()

    async def run() -> list[int]:
        node = await Node.start(
            run_id="test", organiser=organiser.public, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
        )
        visitor = await Node.start(
            run_id="test", organiser=organiser.public, initial_peers=await node.maddrs(), client_mode=True
        )
        seen = []
        try:
            assert await node.publish_presence(key, presence(key.cluster_id, "ghost"), life_s=2.0)
            seen.append(len(await visitor.sightings()))
            while await visitor.sightings():  # the test's own limit ends this if nobody forgets
                await asyncio.sleep(0.2)
            seen.append(len(await node.clusters()))
        finally:
            await visitor.close()
            await node.close()
        return seen

    assert asyncio.run(run()) == [1, 0]
