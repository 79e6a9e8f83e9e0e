"""Who is answered (rule V6): peers that show a pass of a cluster that may take part."""

from collections.abc import Iterable

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Pass, open_sealed, seal

__all__ = ["Gate", "allowed_with"]

_REMEMBERED = 4096


def allowed_with(members: tuple[str, ...], organiser: str) -> tuple[str, ...]:
    """Who is answered in a run of these members: they, and the organiser's archive. None named: everyone."""
    return (*members, organiser) if members else ()


class Gate:
    """own: the pass of this rank, shown with every question. A pass names the libp2p peer that may show it,
    and libp2p proves who that is, so that a pass is of no use to anyone who overheard it.
    """

    def __init__(self, key: SigningKey, run_id: str, peer: str, allowed: Iterable[str] = ()) -> None:
        """allowed: cluster ids; none: every cluster that has the run's link."""
        self.own = seal(key, run_id, Pass(cluster_id=key.cluster_id, peer=peer))
        self._run_id, self._allowed = run_id, frozenset(allowed)
        self._seen: dict[tuple[str, bytes], str] = {}

    def admit(self, sealed: bytes, peer: str) -> str:
        """The cluster that `peer` belongs to. Raises NotTrustedError if the pass is not its own or not
        allowed.
        """
        cluster = self._seen.get((peer, sealed))
        if cluster is None:
            shown = open_sealed(sealed, self._run_id, Pass)
            if shown.peer != peer:
                raise NotTrustedError(f"{peer} shows the pass of another peer")
            self.require(shown.cluster_id)
            cluster = shown.cluster_id
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen[peer, sealed] = cluster
        return cluster

    def require(self, cluster: str) -> None:
        """Raises NotTrustedError unless the cluster may take part in the run."""
        if self._allowed and cluster not in self._allowed:
            raise NotTrustedError(
                f"cluster {cluster} is not among the {len(self._allowed)} members of this run"
            )
