"""The hash chain over committed rounds. Equal lineage means equal history, hence the same anchor (rule V8).

It covers the bytes that clusters received, not their parameters:
floating point differs between machines, bytes do not.
"""

import hashlib
from collections.abc import Iterable, Mapping

__all__ = ["combined_digest", "genesis", "next_lineage", "part_digest", "round_digest"]


def genesis(spec_digest: str, weights: str = "") -> str:
    """Lineage before the first outer step: theta_0 follows from the run spec, or from weights that were read.

    weights: digest of theta_0 over all stages, if it was read from a checkpoint.
    """
    start = b"genesis\0" + bytes.fromhex(spec_digest) + bytes.fromhex(weights)
    return hashlib.sha256(start).hexdigest()


def round_digest(chunks: Iterable[bytes]) -> str:
    """sha256 over the encoded average of one stage, chunk by chunk in the order of the stage's vectors."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(4, "little"))
        digest.update(chunk)
    return digest.hexdigest()


def combined_digest(stage_digests: Mapping[int, str]) -> str:
    """One digest for all stages of a round; "" if a stage is missing its average."""
    if not all(stage_digests.values()):
        return ""
    joined = "".join(f"{stage}:{digest};" for stage, digest in sorted(stage_digests.items()))
    return hashlib.sha256(joined.encode()).hexdigest()


def part_digest(pieces: Iterable[bytes]) -> str:
    """16 hexadecimal digits of what came from one member of a round."""
    return round_digest(pieces)[:16]


def next_lineage(parent: str, t: int, members: Iterable[str], combined: str) -> str:
    text = f"{parent} {t} {','.join(sorted(members))} {combined}"
    return hashlib.sha256(text.encode()).hexdigest()
