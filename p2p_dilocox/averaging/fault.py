"""How an averaging fails: through a member, who is named, or for all."""

__all__ = ["Aborted", "MemberFault", "forget_frames"]


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


def forget_frames(error: BaseException) -> None:
    """Let go of the tensors in the frames that `error` came through.

    A task, its exception and the frame that waits for the task refer to each other in a circle, so that each
    failed averaging would keep its vectors until Python collects its oldest objects (measured: 80 MB a
    round).
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
