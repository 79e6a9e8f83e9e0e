"""What a cluster says about how it came in."""

import importlib

from p2p_dilocox.events import Event, Phase, RoundCommitted

timeline = importlib.import_module("p2p_dilocox.peers.timeline")


def committed(t: int, *, included: bool) -> RoundCommitted:
    return RoundCommitted(
        t=t, members=[], included=included, seconds=1.0, waited_s=0.0, sent_bytes=0, received_bytes=0,
        lowrank=1, H=1, parameter_digests={},
    )  # fmt: skip


def test_the_first_round_that_counts_ends_the_timeline() -> None:
    """Field report D9."""
    told: list[Event] = []
    now = [0.0]
    line = timeline.Timeline(told.append, 6.0, lambda: now[0])
    for at, event in {
        1.0: Phase(name="connecting"),
        3.0: Phase(name="downloading", detail="41%"),
        4.0: Phase(name="downloading", detail="80%"),
        7.0: Phase(name="verifying"),
        7.5: Phase(name="warming up"),
        9.0: committed(6, included=False),
        9.5: committed(7, included=True),
        11.0: committed(8, included=True),
    }.items():
        now[0] = at
        line(event)
    counts = [e for e in told if isinstance(e, Phase) and e.name == "training"]
    assert [e.detail for e in counts] == [
        "counts since outer step 7 (starting 7.0 s, connecting 2.0 s, downloading 4.0 s, verifying 0.5 s, "
        "warming up 2.0 s)"
    ]
    assert told.index(counts[0]) == 7  # after the round itself
    now[0] = 20.0
    line(Phase(name="paused"))
    now[0] = 30.0
    line(Phase(name="warming up"))
    now[0] = 31.0
    line(committed(9, included=True))
    assert told[-1].detail.startswith("counts since outer step 9 (")  # type: ignore[attr-defined]
