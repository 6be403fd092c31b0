"""What evaluating, saving, restoring and residing cost on this machine, measured while running."""

from __future__ import annotations

import math

import numpy as np

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


class _Price:
    """What one more cell of others adds to the time of one decoded token: least squares over fading samples.

    The model is seconds = a + b * others + c * own, because a sequence's own cells cost more than masked ones.
    """

    keep = 0.998  # a memory of about 500 tokens
    enough = 64

    def __init__(self) -> None:
        self._moments = np.zeros((4, 4))  # of (1, others, own, seconds)
        self._asked_at = 0
        self._n = 0
        self._found: tuple[float, float] | None = None

    def add(self, others: int, own: int, seconds: float) -> None:
        row = np.array((1.0, others, own, seconds))
        self._moments *= self.keep
        self._moments += np.outer(row, row)
        self._n += 1

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where b lies, with two standard errors on either side; None while too little was seen.  O(1)."""
        if self._n < self.enough:
            return None
        if self._n - self._asked_at >= self.enough:
            self._asked_at, self._found = self._n, self._solve()
        return self._found

    def _solve(self) -> tuple[float, float] | None:
        moments = self._moments
        weight = moments[0, 0]
        scale = np.sqrt(np.maximum(np.diag(moments[:3, :3]), 1e-30))  # the columns differ by orders of magnitude
        normal = moments[:3, :3] / np.outer(scale, scale) + 1e-9 * np.eye(3)
        inverse = np.linalg.inv(normal)
        slopes = inverse @ (moments[:3, 3] / scale) / scale
        left = moments[3, 3] - 2 * slopes @ moments[:3, 3] + slopes @ moments[:3, :3] @ slopes
        error = math.sqrt(max(left, 0.0) / max(weight - 3, 1.0) * inverse[1, 1]) / scale[1]
        return (slopes[1] - 2 * error, slopes[1] + 2 * error) if math.isfinite(error) else None


class Speeds:
    """Prefill in tokens per second, save and restore in bytes per second; each None until it was measured."""

    # What a cell of somebody else adds to a token, as a share of the time that restoring the cell takes: what was
    # seen on a CPU with flash attention, and what the bandwidths of a GPU and its bus say.  Believed until measured.
    prior_share = 1 / 16

    # What stays is in the way of the requests after the next one too; so many of them are counted.
    requests_ahead = 4

    def __init__(self) -> None:
        self._prefill = _Rate()
        self._restore = _Rate()
        self._disk = _Rate()
        self._save = _Rate()
        self._price = _Price()
        self._doubt = {"ram": 1.0, "disk": 1.0}  # of what was measured of restoring, where it was declined since

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` prompt tokens were evaluated in `seconds`."""
        self._prefill.add(tokens, seconds)

    def restored(self, nbytes: int, seconds: float, tier: str = "ram") -> None:
        """Note that `nbytes` of saved state were restored from a tier in `seconds`."""
        (self._disk if tier == "disk" else self._restore).add(nbytes, seconds)
        self._doubt[tier] = 1.0

    def saved(self, nbytes: int, seconds: float) -> None:
        """Note that `nbytes` of state were saved in `seconds`."""
        self._save.add(nbytes, seconds)

    def decoded(self, others: int, own: int, seconds: float) -> None:
        """Note that one token took `seconds` with `own` cells of its sequence and `others` cells of others in use."""
        self._price.add(others, own, seconds)

    @property
    def prefill(self) -> float | None:
        """Prompt tokens per second."""
        return self._prefill.value

    @property
    def restore(self) -> float | None:
        """Bytes of saved state per second."""
        return self._restore.value

    @property
    def restore_from_disk(self) -> float | None:
        """Bytes per second of saved state on disk, reading and checking them included."""
        return self._disk.value

    @property
    def save(self) -> float | None:
        """Bytes of state that are saved per second."""
        return self._save.value

    def resident_price(self, bytes_per_cell: int) -> float | None:
        """Seconds that a cell of somebody else adds to each evaluated token; None while nothing is known.  O(1).

        A guess from the speed of restoring, moved as far as the measurements ask for.
        """
        if self.restore is None or bytes_per_cell == 0:
            return None
        guess = self.prior_share * bytes_per_cell / self.restore
        measured = self._price.interval
        return guess if measured is None else min(max(guess, measured[0], 0.0), max(measured[1], 0.0))

    def staying_costs_more(self, cells: int, unsaved: int, nbytes: int, tokens: int, bytes_per_cell: int) -> bool:
        """Whether `cells` cost more in a few requests of `tokens` each than to leave for RAM and come back once.

        `nbytes` is their saved state, `unsaved` how much of it is still to be saved.  False while nothing is known.
        """
        price = self.resident_price(bytes_per_cell)
        if price is None or self.restore is None or self.save is None:
            return False
        return self.requests_ahead * cells * tokens * price > unsaved / self.save + nbytes / self.restore

    def declined(self) -> None:
        """A restore was not made because it looked too dear: believe that a little less, so that it is tried again."""
        for tier in self._doubt:
            self._doubt[tier] *= 0.8

    def worth_restoring(self, nbytes: int, tokens: int, tier: str = "ram") -> bool:
        """Whether bringing back `nbytes` is cheaper than evaluating `tokens`; True until both were measured."""
        speed = self.restore_from_disk if tier == "disk" else self.restore
        if self.prefill is None or speed is None:
            return True
        return self._doubt[tier] * nbytes / speed < tokens / self.prefill
