"""Who has the state of the run when this cluster goes; it is said plainly if nobody has."""

from p2p_dilocox.averaging.company import Company
from p2p_dilocox.averaging.deadlines import Deadline

__all__ = ["who_keeps"]

_ARCHIVE_S = 10.0  # an archive looks around every two seconds
_AGAIN_S = 0.5


async def who_keeps(company: Company) -> str:
    """ "" if another cluster that stays has our last outer step; else a sentence. Waits for an archive."""
    t, deadline = company.progress.committed_t, Deadline(_ARCHIVE_S)
    present = await company.node.clusters()
    staying = [c for c, p in present.items() if c != company.me and p.state in ("training", "paused")]
    for cluster in staying:
        standing = await company.standing_of(cluster)
        if standing is not None and standing.committed_t >= t:
            return ""
    archives = await company.archives()
    while t and archives and not deadline.passed:
        if any(standing.committed_t >= t for standing in archives.values()):
            return f"this was the last cluster; the archive has outer step {t}, and the run can go on from it"
        await deadline.sleep(_AGAIN_S)
        archives = await company.archives()
    return (
        f"this was the last cluster, and nobody else has outer step {t}: keep its state directory, "
        "the run goes on when it comes back"
    )
