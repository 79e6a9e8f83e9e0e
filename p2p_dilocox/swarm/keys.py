"""Every key of the run's DHT. A record under any other key is refused (records.py)."""

__all__ = ["clusters_key", "run_key"]


def run_key(run_id: str) -> str:
    """One plain value: the signed run spec."""
    return f"{run_id}/run"


def clusters_key(run_id: str) -> str:
    """A dictionary: cluster id -> sealed `Presence`."""
    return f"{run_id}/clusters"
