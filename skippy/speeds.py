"""What restoring and evaluating cost on this machine, measured while running."""

from __future__ import annotations

__all__ = ["Speeds"]


class _Rate:
    """Units per second, as the ratio of two sums in which the past fades by `keep` per measurement."""

    __slots__ = ("seconds", "units")
    keep = 0.9

    def __init__(self) -> None:
        self.units = 0.0
        self.seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        self.units = self.keep * self.units + units
        self.seconds = self.keep * self.seconds + seconds

    @property
    def value(self) -> float | None:
        return self.units / self.seconds if self.seconds > 0 and self.units > 0 else None


class Speeds:
    """Prefill in tokens per second and restore in bytes per second; each None until it was measured."""

    def __init__(self) -> None:
        self._prefill = _Rate()
        self._restore = _Rate()

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` prompt tokens were evaluated in `seconds`."""
        self._prefill.add(tokens, seconds)

    def restored(self, nbytes: int, seconds: float) -> None:
        """Note that `nbytes` of saved state were restored in `seconds`."""
        self._restore.add(nbytes, seconds)

    @property
    def prefill(self) -> float | None:
        """Prompt tokens per second."""
        return self._prefill.value

    @property
    def restore(self) -> float | None:
        """Bytes of saved state per second."""
        return self._restore.value

    def declined(self) -> None:
        """A restore was not made because it looked too dear: believe that a little less, so that it is tried again."""
        self._restore.seconds *= 0.8

    def worth_restoring(self, nbytes: int, tokens: int) -> bool:
        """Whether bringing back `nbytes` is cheaper than evaluating `tokens`; True until both were measured."""
        if self.prefill is None or self.restore is None:
            return True
        return nbytes / self.restore < tokens / self.prefill
