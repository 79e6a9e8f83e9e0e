"""How an averaging fails: through a member, who is named, or for all."""

__all__ = ["Aborted", "MemberFault"]


class MemberFault(Exception):
    """A member did what must not be averaged, or nothing for too long. `member`: its index."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(reason)
        self.member = member


class Aborted(Exception):
    """The averaging ended and it is not ours to say whose fault it was."""
