"""What a context can do, as the probe found it out."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Capability"]


@dataclass(frozen=True)
class Capability:
    """What a context can do, and what its state takes.

    `unable` says why state cannot be reused, or is None; `flash_attn` is what llama.cpp decided, where it shows.
    `point_state_bytes` is the size of the partial state, which cannot be cut at a token; 0 where all of it can be.
    `saved` and `restored` are bytes and the seconds they took, once, when the context was tried.
    """

    unable: str | None
    flash_attn: bool | None = None
    bytes_per_token: int = 0
    point_state_bytes: int = 0
    saved: tuple[int, float] = field(default=(0, 0.0), compare=False)
    restored: tuple[int, float] = field(default=(0, 0.0), compare=False)
