"""What a context can do, as the probe found it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from skippy.layout import PLAIN, Layout

__all__ = ["Capability"]


@dataclass(frozen=True)
class Capability:
    """What a context can do, and what its state takes.

    `unable` says why state cannot be reused, or is None; `flash_attn` is what llama.cpp decided, where it shows.
    `bytes_per_token` is what a token's attention takes, `window_bytes_per_token` how much of that is in layers with a
    sliding window, `point_state_bytes` the partial state, which is valid at one
    length and cannot be cut (0 where all of it can).  `window` is how many tokens the layers with a sliding window
    see, 0 where there are none.  `saved` and `restored` are bytes and the seconds they took when it was tried.
    """

    unable: str | None
    flash_attn: bool | None = None
    bytes_per_token: int = 0
    point_state_bytes: int = 0
    window: int = 0
    layout: Layout = PLAIN
    window_bytes_per_token: int = 0
    saved: tuple[int, float] = field(default=(0, 0.0), compare=False)
    restored: tuple[int, float] = field(default=(0, 0.0), compare=False)

    def full_copy_bytes(self, tokens: int) -> int:
        """What a saved state of all of a path of `tokens` takes, as llama.cpp saves it.  O(1)."""
        seen = min(tokens, self.window) if self.window else 0
        base = self.bytes_per_token - self.window_bytes_per_token
        return tokens * base + seen * self.window_bytes_per_token + self.point_state_bytes

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a path can be gone on from only where its point state was kept (recurrent, hybrid)."""
        return self.layout.opaque

    @property
    def has_attention(self) -> bool:
        """Whether tokens have cells of their own at all."""
        return self.layout.sections > 0

    @property
    def residents(self) -> bool:
        """Whether a path can stay in the pool and serve any of its heads: plain attention alone."""
        return not self.layout.opaque and self.window == 0
