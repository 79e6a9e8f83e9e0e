"""What the world may ask of a training loop, from another thread."""

__all__ = ["Stop", "Wish"]


class Wish:
    """Ordered by strength. PAUSE and LEAVE: once this outer step is delivered. PAUSE_NOW: after this inner
    step and the round on the wire. LEAVE_NOW: after this inner step."""

    STAY, PAUSE, PAUSE_NOW, LEAVE, LEAVE_NOW = range(5)

    def __init__(self) -> None:
        self.value = Wish.STAY
        self.reason = ""  # for a pause

    def leave(self, *, now: bool) -> None:
        self.value = Wish.LEAVE_NOW if now else max(self.value, Wish.LEAVE)

    def pause(self, reason: str, *, now: bool) -> None:
        if self.value < Wish.LEAVE:
            self.reason = reason
            self.value = Wish.PAUSE_NOW if now else max(self.value, Wish.PAUSE)

    def resume(self) -> None:
        if self.value < Wish.LEAVE:
            self.value = Wish.STAY


class Stop(Exception):  # noqa: N818 (no error: how a wish ends the loops)
    """wish: why."""

    def __init__(self, wish: int) -> None:
        super().__init__()
        self.wish = wish
