"""How an averaging fails: through a member, who is named, or for all."""

__all__ = ["Aborted", "MemberFault"]


class MemberFault(Exception):
    """A member did what must not be averaged, or nothing for too long. `member`: its index."""

    def __init__(self, member: int, reason: str, *, gone: bool = False) -> None:
        """gone: its connection ended, because it died, or because it had ended the round already."""
        super().__init__(reason)
        self.member, self.gone = member, gone


class Aborted(Exception):
    """The averaging ended and it is not ours to say whose fault it was. `suspect`: whom another member
    blames.
    """

    def __init__(self, reason: str, *, suspect: int | None = None) -> None:
        super().__init__(reason)
        self.suspect = suspect
