"""What a request tells about itself: how much was reused, from where, and why not more."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["REASONS", "TIERS", "Explanation", "ReuseReport"]

TIERS = ("resident", "ram", "disk")

REASONS = {
    "hit": "all that is stored of this prompt was reused, and the prompt does not leave a stored path",
    "partial": "part was reused: the prompt leaves a stored path, or not all of that path could be brought back",
    "never_seen": "no stored path begins as this prompt does",
    "evicted_recently": "the path is known, but its state has been evicted",
    "identity_mismatch": "what is stored belongs to another model, build or setting",
    "below_min_tokens": "less than min_tokens agree with a stored path",
    "not_worth_it": "restoring would have taken longer than evaluating",
    "no_checkpoint": "this model's state cannot be cut at the length that agrees",
    "corrupt": "stored state failed its check and was dropped",
    "disabled": "the cache, or reuse for this request, is switched off",
    "context_full": "the answer ended because the context was full",
}


@dataclass
class ReuseReport:
    """How one request was served.  cached_tokens + evaluated_tokens == prompt_tokens.

    `by_tier` says where the cached tokens came from; times are in milliseconds; `diverged_at` is the index of
    the first prompt token that differs from a stored path, or None.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    reason: str = "never_seen"
    diverged_at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Explanation:
    """Where a prompt would leave what is stored.

    `matched_tokens` agree with a stored path and `cached_tokens` of them could be restored now; the rest,
    `evaluated_tokens`, would take about `seconds` to evaluate (None until that was measured).  From token
    `diverged_at` on the stored path reads `stored_text` and the prompt `prompt_text` (eight tokens before and
    after that index; None where nothing parts).  `hint` is "volatile_prefix" once three prompts have parted at
    one index and then went on alike: something at that place changes with every request.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    reason: str
    seconds: float | None = None
    diverged_at: int | None = None
    stored_text: str | None = None
    prompt_text: str | None = None
    hint: str | None = None
