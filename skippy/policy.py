"""Which lengths of a prompt are worth keeping: plain arithmetic on token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skippy.errors import ConfigError

if TYPE_CHECKING:
    from skippy.config import CacheConfig

__all__ = ["PrefixCandidatePolicy", "derive_max_resident_tokens"]

_RESIDENT_FROM = 8192


def derive_max_resident_tokens(ctx_size: int) -> int:
    """Cells that residents may keep in a pool of `ctx_size` cells: half, or 0 (no cap) below 8,192.  O(1).

    Raises ConfigError for a negative size.

    >>> [derive_max_resident_tokens(size) for size in (768, 8191, 8192, 131072)]
    [0, 0, 4096, 65536]
    """
    _require("ctx_size", ctx_size)
    return ctx_size // 2 if ctx_size >= _RESIDENT_FROM else 0


@dataclass(frozen=True)
class PrefixCandidatePolicy:
    """The grid of lengths, in tokens, at which a path is recorded and looked up by stores that have no tree.

    Raises ConfigError for a negative value.
    """

    min_tokens: int
    stride_tokens: int
    record_limit: int
    page_size_tokens: int

    def __post_init__(self) -> None:
        for name in ("min_tokens", "stride_tokens", "record_limit", "page_size_tokens"):
            _require(name, getattr(self, name))

    @classmethod
    def from_cache(cls, cache: CacheConfig) -> PrefixCandidatePolicy:
        """The policy of these settings; its page is `min_tokens`, at least 1.  O(1)."""
        return cls(
            min_tokens=cache.min_tokens,
            stride_tokens=cache.shared_prefix_stride_tokens,
            record_limit=cache.shared_prefix_record_limit,
            page_size_tokens=max(1, cache.min_tokens),
        )

    def candidate_token_counts(self, token_count: int) -> list[int]:
        """Lengths to look up for a prompt of `token_count` tokens, longest first.  O(number of lengths).

        The whole prompt, then each multiple of the grid below it, then `min_tokens`.  A prompt that is not longer
        than `min_tokens` has one candidate, an empty one none.  Raises ConfigError for a negative count.

        >>> PrefixCandidatePolicy(64, 32, 2, 64).candidate_token_counts(160)
        [160, 128, 96, 64]
        """
        _require("token_count", token_count)
        if token_count == 0:
            return []
        if self.min_tokens == 0 or token_count <= self.min_tokens:
            return [token_count]
        step = min(max(1, self.stride_tokens), max(1, self.page_size_tokens))
        highest = (token_count - 1) // step * step
        return [token_count, *range(highest, self.min_tokens, -step), self.min_tokens]

    def record_candidate_token_counts(self, token_count: int) -> list[int]:
        """Lengths to record: the first `record_limit` of the candidates, all of them where it is 0.  O(candidates).

        >>> PrefixCandidatePolicy(256, 128, 2, 256).record_candidate_token_counts(2214)
        [2214, 2176]
        """
        return self.candidate_token_counts(token_count)[: self.record_limit or None]

    def shared_checkpoint(self, token_count: int) -> int | None:
        """Where to put the checkpoint that prompts with another tail can share, or None: no place for it.  O(1).

        One stride below the last multiple of the stride, at least `min_tokens`.

        >>> PrefixCandidatePolicy(256, 128, 2, 256).shared_checkpoint(2214)
        2048
        """
        if token_count <= self.min_tokens:
            return None
        near_tail = token_count - token_count % max(1, self.stride_tokens)
        shared = max(near_tail - self.stride_tokens, self.min_tokens)
        return shared if 0 < shared < token_count else None


def _require(name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{name}={value!r}: expected a whole number from 0")
