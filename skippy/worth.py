"""What is kept of a path is worth what it would cost to bring back, and how soon it will be asked for.  Pure.

    worth = seconds to bring back / size that leaving frees * weight / age

Cost over size times frequency is the rule of GreedyDual-Size-Frequency (Cherkasova 1998).  The age is divided by as in
Hyperbolic Caching (Blankstein et al. 2017), so that nothing must be recomputed as time goes on and no inflation value
is kept.  In place of a count of uses, which would keep for long what was popular once, there are two classes, as in
segmented LRU (Karedla 1994) and 2Q (Johnson and Shasha 1994): a second use promotes, also one that comes after the
first was evicted (2Q's ghost queue).  What was promoted falls back when it is overdue, twice its mean interval, as
LIRS judges by the distance between uses and not by age alone.  On the traces of benchmarks/policy.py this was the best
of LRU, LFU, LRU-2, GDSF, hyperbolic caching with counts and segmented LRU.

Time is counted in requests, so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from skippy.speeds import Speeds

__all__ = [
    "Part",
    "Prices",
    "Profile",
    "Use",
    "again",
    "clip",
    "fresh",
    "join",
    "last_part",
    "worth",
]

PROMOTED = 32  # how much more a prefix counts that is used again and again: more than what differs within a class
OVERDUE = 2  # mean intervals after which it is not expected any more
_PARTS = 8  # of a profile


@dataclass(frozen=True, slots=True)
class Use:
    """`uses` of some tokens, by the requests number `first` to `last`."""

    first: int
    last: int
    uses: int = 1

    def again(self, now: int) -> Use:
        """With a use by request `now`; a request counts once."""
        return self if now <= self.last else Use(self.first, now, self.uses + 1)

    def expected(self, now: int) -> bool:
        """Whether it was used more than once and is not overdue.

        >>> Use(10, 30, 3).expected(50), Use(10, 30, 3).expected(51), Use(10, 10).expected(11)
        (True, False, False)
        """
        return self.uses > 1 and now - self.last <= OVERDUE * max(1.0, (self.last - self.first) / (self.uses - 1))

    def with_(self, other: Use) -> Use:
        """What two records of the same tokens say together."""
        return Use(min(self.first, other.first), max(self.last, other.last), max(self.uses, other.uses))


class Part(NamedTuple):
    """The tokens up to `end` of a path, from the end of the part before."""

    end: int
    use: Use


Profile: TypeAlias = tuple[Part, ...]
"""How the parts of a path are used, in order: the first ones are shared by the most requests.  At most eight."""


def fresh(length: int, now: int) -> Profile:
    """The profile of `length` tokens that request `now` is the first to use."""
    return (Part(length, Use(now, now)),) if length > 0 else ()


def again(profile: Profile, length: int, now: int) -> Profile:
    """`profile` after request `now` has used its first `length` tokens."""
    parts: list[Part] = []
    start = 0
    for part in profile:
        if length <= start:
            parts.append(part)
        elif length >= part.end:
            parts.append(Part(part.end, part.use.again(now)))
        else:
            parts += [Part(length, part.use.again(now)), part]
        start = part.end
    return _compact(parts)


def clip(profile: Profile, end: int, start: int = 0) -> Profile:
    """What `profile` says of the tokens [start, end)."""
    parts: list[Part] = []
    before = 0
    for part in profile:
        if before >= end:
            break
        if part.end > start:
            parts.append(part if part.end <= end else Part(end, part.use))
        before = part.end
    return tuple(parts)


def join(one: Profile, other: Profile) -> Profile:
    """What two records of one path say together; as long as the longer one.

    Who has used the end of a part has used its beginning as well, so that a record may begin anywhere on the path.

    >>> join(fresh(10, 1), fresh(20, 3))
    (Part(end=10, use=Use(first=1, last=3, uses=1)), Part(end=20, use=Use(first=3, last=3, uses=1)))
    """
    if not one or not other:
        return one or other
    parts: list[Part] = []
    i = j = 0
    while i < len(one) or j < len(other):
        a = one[i] if i < len(one) else None
        b = other[j] if j < len(other) else None
        if a is None or b is None:
            parts.append(a or b or one[-1])
            i, j = i + 1, j + 1
            continue
        end = min(a.end, b.end)
        parts.append(Part(end, a.use.with_(b.use)))
        i += a.end == end
        j += b.end == end
    return _compact(parts)


def _compact(parts: Sequence[Part]) -> Profile:
    """Neighbours that are used alike made one; of too many parts the shortest go into what follows them."""
    kept: list[Part] = []
    for part in parts:
        if kept and kept[-1].use == part.use:
            kept[-1] = part
        else:
            kept.append(part)
    while len(kept) > _PARTS:
        starts = [0, *(part.end for part in kept)]
        # Into the next one, which has fewer uses: too little is believed rather than too much.
        del kept[min(range(len(kept) - 1), key=lambda i: kept[i].end - starts[i])]
    return tuple(kept)


def last_part(profile: Profile, start: int, end: int) -> tuple[int, Use]:
    """Where the last part of [start, end) begins, and how it is used; what is not recorded was used never."""
    if len(profile) == 1 and profile[0].end >= end:  # what most are
        return start, profile[0].use
    clipped = clip(profile, end, start)
    if not clipped:
        return start, Use(0, 0)
    if clipped[-1].end < end:
        return max(start, clipped[-1].end), Use(0, 0)
    return (max(start, clipped[-2].end) if len(clipped) > 1 else start), clipped[-1].use


def worth(seconds: float, size: int, use: Use, now: int) -> float:
    """Of something that frees `size` and costs `seconds` to bring back: the least leaves first.  0 if that is free.

    >>> worth(1.0, 10, Use(1, 5), now=5) > worth(1.0, 10, Use(1, 4), now=5)
    True
    """
    return seconds / max(size, 1) * (PROMOTED if use.expected(now) else 1) / (max(0, now - use.last) + 1)


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds for each token that is evaluated, and for each byte that is restored or saved, at some moment.

    Until prefill was measured a token takes a second: then all tokens cost alike.  Nothing is restored cheaper, and
    saving is free, until that was measured too.
    """

    token: float = 1.0
    restored: float | None = None
    saved: float = 0.0

    @classmethod
    def of(cls, speeds: Speeds) -> Prices:
        """What was measured.  O(1)."""
        prefill, restore, save = speeds.prefill, speeds.restore, speeds.save
        if not prefill:
            return cls()
        return cls(1 / prefill, 1 / restore if restore else None, 1 / save if save else 0.0)

    def restoring(self, nbytes: int, tokens: int) -> float:
        """At most as long as evaluating takes: what is dearer is not restored."""
        evaluating = tokens * self.token
        return evaluating if self.restored is None or not nbytes else min(nbytes * self.restored, evaluating)
