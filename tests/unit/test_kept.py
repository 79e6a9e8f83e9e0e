"""Rounds and states on disk: what is proven, what is whole, and what is not believed."""

import os
from pathlib import Path

import msgspec
import pytest

from p2p_dilocox.averaging.catchup import Proven, read_result
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.states import StateShelf, best_state, check_offer, make_offer
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.pieces import FileDigest, PieceHasher, digest_file, piece_bytes, read_piece
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Result, StateClaim, StateOffer, seal

from .proofs import CAP, RUN, averages, committed, gate_of, keep_rounds

KEYS = [SigningKey.generate() for _ in range(3)]
START = "a" * 64


def read(result: Result) -> Proven:
    return read_result(result, RUN, gate_of(KEYS[0]), CAP)


@pytest.mark.parametrize("size", [1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 * (1 << 20) + 7])
def test_a_file_in_pieces_has_the_digest_it_had_when_it_was_written(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    hasher = PieceHasher(size)
    for start in range(0, size, 100_003):
        hasher.update(content[start : start + 100_003])
    digest = digest_file(tmp_path / "file")
    assert digest == hasher.digest() and digest.whole
    pieces = [read_piece(tmp_path / "file", n) for n in range(len(digest.pieces))]
    assert b"".join(pieces) == content
    assert all(digest.fits(n, piece) and digest.length(n) == len(piece) for n, piece in enumerate(pieces))
    assert not digest.fits(0, pieces[0][:-1])
    for nothing in (-1, len(pieces)):
        with pytest.raises(ValueError, match="has no piece"):
            read_piece(tmp_path / "file", nothing)


def test_a_large_file_has_no_more_than_512_pieces() -> None:
    for size in (1, 1 << 29, (1 << 29) + 1, 1 << 40):
        assert -(-size // piece_bytes(size)) <= 512


def test_rounds_are_there_after_a_restart_and_give_back_what_was_voted_on(tmp_path: Path) -> None:
    lineage = keep_rounds(KeptRounds(tmp_path), KEYS, START, 1, 5)
    kept = KeptRounds(tmp_path)  # another process
    chain = kept.chain(0, START, read, 64)
    assert [r.call.t for r in chain] == [1, 2, 3, 4, 5]
    assert read(chain[-1]).lineage == lineage
    assert [r.call.t for r in kept.chain(2, read(chain[1]).lineage, read, 2)] == [3, 4]
    assert kept.chain(0, "b" * 64, read, 64) == []  # another history
    for t in range(1, 6):
        assert {s: kept.average_of(t, s) for s in range(2)} == averages(t)
    assert kept.result_after(3).call.t == 4
    for call in (lambda: kept.result_after(5), lambda: kept.average_of(6, 0), lambda: kept.average_of(5, 2)):
        with pytest.raises(NotTrustedError, match="kept here"):
            call()


@pytest.mark.parametrize("damage", ["flip", "cut", "no stage", "no proof", "another's proof"])
def test_a_chain_ends_before_the_first_round_that_is_not_whole(tmp_path: Path, damage: str) -> None:
    keep_rounds(KeptRounds(tmp_path), KEYS, START, 1, 5)
    stage, proof = tmp_path / "4" / "stage1", tmp_path / "4" / "proof"
    content = bytearray(stage.read_bytes())
    match damage:
        case "flip":
            content[9] ^= 1
            stage.write_bytes(content)
        case "cut":
            stage.write_bytes(content[:-1])
        case "no stage":
            stage.unlink()
        case "no proof":
            proof.unlink()
        case _:
            proof.write_bytes(committed([SigningKey.generate()], 4, START, averages(4)).pack())
    kept = KeptRounds(tmp_path)
    assert [r.call.t for r in kept.chain(0, START, read, 64)] == [1, 2, 3]
    kept.forget_after(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]


def test_ranks_of_one_cluster_do_not_take_each_others_files_away(tmp_path: Path) -> None:
    lead, other = KeptRounds(tmp_path), KeptRounds(tmp_path, lead=False)
    result = committed(KEYS, 4, START, averages(4))
    lead.remember(4, result, {0: averages(4)[0]})
    other.remember(4, result, {1: averages(4)[1]})
    other.forget_after(0)
    assert sorted(p.name for p in (tmp_path / "4").iterdir()) == ["proof", "stage0", "stage1"]
    other.remember(5, result, {})
    assert not (tmp_path / "5").exists()
    lead.forget_after(0)
    assert list(tmp_path.iterdir()) == []


def test_what_a_joiner_may_need_is_not_pruned(tmp_path: Path) -> None:
    """All rounds since the oldest state, and 64 before it."""
    kept = KeptRounds(tmp_path)
    keep_rounds(kept, KEYS[:1], START, 1, 100)
    kept.prune(20)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == list(range(21, 101))
    kept.prune(90)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == list(range(37, 101))


def test_a_round_that_the_disk_did_not_take_is_still_proven(tmp_path: Path) -> None:
    (tmp_path / "rounds").write_text("no directory")
    kept = KeptRounds(tmp_path / "rounds")
    result = committed(KEYS, 1, START, averages(1))
    with pytest.raises(OSError, match="rounds"):
        kept.remember(1, result, averages(1))
    assert kept.result_after(0) == result
    assert kept.average_of(1, 1) == averages(1)[1]


def offered(key: SigningKey, result: Result, seed: int = 0, t: int | None = None) -> StateOffer:
    files = {s: FileDigest(size=10, pieces=[bytes([seed + s]) * 32]) for s in range(2)}
    offer = make_offer(key, RUN, read(result).lineage, result, files)
    return offer if t is None else msgspec.structs.replace(offer, t=t)


def test_a_state_counts_for_the_members_that_sign_it() -> None:
    """S4: neither a newer state of one liar nor other files for the same outer step win against most."""
    first, second = committed(KEYS, 1, START, averages(1)), committed(KEYS, 2, START, averages(2))
    offers = [
        (who, offer, check_offer(offer, RUN, gate_of(KEYS[0]), CAP))
        for who, offer in {
            "a": offered(KEYS[0], first),
            "b": offered(KEYS[1], first),
            "liar": offered(KEYS[2], first, seed=7),
            "newer": offered(KEYS[2], second, seed=9),
        }.items()
    ]
    best = best_state(offers)
    assert best is not None
    assert (best.offer.t, best.donors, best.others) == (1, ["a", "b"], 1)
    assert best.signers == {KEYS[0].cluster_id, KEYS[1].cluster_id}
    # Its claims travel with it: an archive can show them when their members are gone.
    alone = check_offer(best.offer, RUN, gate_of(KEYS[2]), CAP)
    assert alone == best.signers
    assert best_state([]) is None


def test_an_offer_that_proves_nothing_is_refused() -> None:
    result = committed(KEYS, 1, START, averages(1))
    good, stranger = offered(KEYS[0], result), SigningKey.generate()
    claim = StateClaim(cluster_id=stranger.cluster_id, t=1, lineage=good.lineage, roots={"0": "0" * 64})
    change = msgspec.structs.replace
    bad = [
        (change(good, t=2), "another round"),
        (change(good, lineage="b" * 64), "another round"),
        (change(good, result=change(result, votes=result.votes[:2])), "2 votes"),
        (change(good, files={"0": good.files["0"]}), "other stages"),
        (change(good, files={**good.files, "1": good.files["0"]}), "no member"),
        (change(good, files={**good.files, "1": FileDigest(size=1 << 30, pieces=[bytes(32)])}), "missing"),
        (change(good, claims=[seal(stranger, RUN, claim)]), "no member"),
        (offered(stranger, result), "no member"),
    ]
    for offer, why in bad:
        with pytest.raises(NotTrustedError, match=why):
            check_offer(offer, RUN, gate_of(KEYS[0]), CAP)


def test_a_shelf_serves_the_newest_state_and_nothing_else(tmp_path: Path) -> None:
    shelf = StateShelf(tmp_path)
    with pytest.raises(NotTrustedError, match="no state"):
        shelf.offer()
    lineage = START
    for t, name in ((4, "step-4"), (6, "step-6+3")):
        result = committed(KEYS, t, lineage, averages(t))
        (tmp_path / name).mkdir()
        (tmp_path / name / "offer").write_bytes(offered(KEYS[0], result).pack())
        (tmp_path / name / "stage0.safetensors").write_bytes(bytes([t]))
    (tmp_path / ".partial-step-8").mkdir()
    assert shelf.offer().t == 6
    assert (shelf.piece(4, 0, 0), shelf.piece(6, 0, 0)) == (b"\4", b"\6")
    for t, stage, piece in ((8, 0, 0), (6, 1, 0), (6, 0, 1), (6, 0, -1)):
        with pytest.raises(NotTrustedError, match="not kept here"):
            shelf.piece(t, stage, piece)
