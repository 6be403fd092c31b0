"""Who has used what: the profiles of what the tree holds, and of what has left it lately."""

from __future__ import annotations

from typing import Any

from skippy._radix import Match, Node, RadixTree
from skippy.history import Tokens
from skippy.worth import Profile, again, clip, fresh, join

__all__ = ["Usage"]


class Ghosts:
    """Paths whose state was evicted, and how they were used: the least recent go beyond `capacity` tokens.

    A tree, because the next prompt shares the head of such a path, and seldom all of it.  It holds tokens alone, no
    more than half a million, of at least 32 a path: ghosts as in 2Q are worth having while they are about as many as
    what is held, and a profile takes a kilobyte.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = min(capacity, 1 << 19)
        self.entries = max(1024, self.capacity // 32)
        self.tree = RadixTree()

    def add(self, namespace: str, tokens: Tokens, profile: Profile) -> None:
        """The state of this path is gone.  O(tokens)."""
        if not 0 < len(tokens) <= self.capacity:
            return
        node = self.tree.insert(namespace, tokens)
        before: Any = self.tree.get(node, "resident")
        if before is not None:
            self.tree.take(node, "resident")
            node = self.tree.insert(namespace, tokens)
        self.tree.put(node, "resident", join(before or (), profile))
        while self._over() and (oldest := self.tree.victim("resident")) is not None:
            self.tree.take(oldest, "resident")

    def _over(self) -> bool:
        return self.tree.count("resident") > self.entries or self.tree.stats()["tokens"] > self.capacity

    def find(self, namespace: str, tokens: Tokens) -> Profile:
        """How the head that this prompt has in common with one of them was used.  O(tokens in common)."""
        match = self.tree.match(namespace, tokens)
        if match.resident is None:
            return ()
        profile: Any = self.tree.get(match.resident, "resident")
        return clip(profile, match.resident_length)


class Usage:
    """Profiles of residents by sequence id, of saved state on the payload itself: they go when those go.

    `now` counts requests.  `ghosts` are what was evicted, so that the request that asks for it again is its second use;
    `remembered` tokens of them are kept.
    """

    def __init__(self, tree: RadixTree, remembered: int) -> None:
        self.tree = tree
        self.ghosts = Ghosts(remembered)
        self.now = 0
        self._residents: dict[int, Profile] = {}

    def request(self, namespace: str, tokens: Tokens, restored: int) -> None:
        """A new request has asked for `tokens`, of which `restored` were brought back.  O(its path)."""
        self.now += 1
        match = self.tree.match(namespace, tokens)
        if match.resident is not None:
            seq = self._sequence(match.resident)
            self._residents[seq] = again(self._residents.get(seq, ()), match.resident_length, self.now)
        for span in match.segments:
            span.payload.profile = again(span.payload.profile, span.reach, self.now)
        for node in match.checkpoints:
            # Only where it went on from: that one path leads through others is no use of them.
            if 0 < restored <= node.length <= restored + 1:
                saved: Any = self.tree.get(node, "checkpoint")
                saved.profile = again(saved.profile, node.length, self.now)

    def _sequence(self, node: Node) -> int:
        seq: Any = self.tree.get(node, "resident")
        return int(seq)

    def of_resident(self, seq: int) -> Profile:
        """How the path of the resident with this sequence id is used."""
        return self._residents.get(seq, ())

    def of_path(self, namespace: str, tokens: Tokens) -> Profile:
        """How a path is used that is about to be kept: what is known of it, the rest used for the first time.

        A part that was evicted and is kept again has been used again.  O(tokens).
        """
        known = self._known(self.tree.match(namespace, tokens))
        if known and known[-1].end >= len(tokens):
            return known
        before = again(self.ghosts.find(namespace, tokens), len(tokens), self.now)
        return join(join(known, before), fresh(len(tokens), self.now))

    def _known(self, match: Match) -> Profile:
        known: Profile = ()
        if match.resident is not None:
            seq = self._sequence(match.resident)
            known = clip(self._residents.get(seq, ()), match.resident_length)
        position = 0
        for span in match.segments:
            if span.start > position:
                break
            known = join(known, clip(span.payload.profile, span.reach))
            position = span.reach
        return known

    def set_resident(self, seq: int, profile: Profile) -> None:
        """The resident with this sequence id is used like that."""
        self._residents[seq] = profile

    def resident_left(self, seq: int) -> Profile:
        """Forget a resident; how it was used."""
        return self._residents.pop(seq, ())

    def hand_over(self, namespace: str, path: Tokens, profile: Profile) -> None:
        """What held `path` has left: whoever holds parts of it is told how they were used.  O(path)."""
        match = self.tree.match(namespace, path)
        if match.resident is not None:
            seq = self._sequence(match.resident)
            self._residents[seq] = join(self._residents.get(seq, ()), clip(profile, match.resident_length))
        for span in match.segments:
            span.payload.profile = join(span.payload.profile, clip(profile, span.reach, span.start))

    def check(self, residents: set[int]) -> None:
        """Prove that nothing is remembered of sequence ids that hold no resident; AssertionError else."""
        stale = set(self._residents) - residents
        assert not stale, f"profiles of sequences {sorted(stale)}, which hold no resident"
