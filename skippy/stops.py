"""Where the evaluation of a prompt pauses so that its state can be kept: where a later prompt may leave it."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["GAP", "NEAR", "prefill_stops"]

GAP = 32
"""Places that are closer than this many tokens are one: each pause costs a batch of its own."""

NEAR = 8
"""The same for the places where prompts do part: fewer tokens are not worth a pause anywhere."""


def prefill_stops(
    begin: int,
    prompt_tokens: int,
    *,
    branch: int,
    message_starts: Iterable[int] = (),
    shared: int | None = None,
    least: int = 1,
    before_last: bool,
) -> list[int]:
    """Lengths, rising, strictly between `begin` and `prompt_tokens`, at which to pause.

    `branch` is where the prompt leaves what is stored (0: nowhere), `message_starts` where its messages begin; where
    it has none, `shared` is the place that prompts with another tail may share.  The branch and the newest message
    come first, because there prompts do part; of the others within `GAP` tokens the first one counts, because whoever
    parts at a later one parts after it.  `before_last`: also before the last token, so that the same prompt again
    evaluates one.  Nothing below `least`.  O(places).

    >>> prefill_stops(0, 1000, branch=0, message_starts=[300, 310, 800, 815], before_last=False)
    [300, 815]
    >>> prefill_stops(240, 1000, branch=250, shared=768, before_last=True)
    [250, 768, 999]
    """
    starts = sorted(message_starts)
    stops: set[int] = set()

    def take(place: int, apart: int) -> None:
        if max(begin, least - 1) < place < prompt_tokens and all(
            abs(place - other) >= apart for other in (begin, *stops)
        ):
            stops.add(place)

    take(branch, NEAR)
    for place in starts[-1:]:
        take(place, NEAR)
    for place in starts[:-1] if starts else [shared or 0]:
        take(place, GAP)
    last = prompt_tokens - 1
    if before_last and last > begin and last >= least:
        stops.add(last)
    return sorted(stops)
