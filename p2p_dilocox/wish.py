"""What the world may ask of a training loop, from another thread."""

__all__ = ["Leave", "Wish"]


class Wish:
    STAY, LEAVE, LEAVE_NOW = 0, 1, 2

    def __init__(self) -> None:
        self.value = Wish.STAY


class Leave(Exception):  # noqa: N818 (no error: how a wish to leave ends the loops)
    """now: without waiting for the round on the wire."""

    def __init__(self, *, now: bool) -> None:
        super().__init__()
        self.now = now
