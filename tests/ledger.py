"""What was evaluated, by path, and whether what is restored is that, byte for byte: for every memory family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import skippy
from skippy.demo.evidence import ColdRuns, prefix_digests
from skippy.layout import Layout, read_sections, without_ids
from skippy.lease import Lease
from skippy.model import Model

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Memory:
    """A sequence's state: digests of each attention section's rows by position, and of the opaque rest."""

    rows: tuple[dict[int, bytes], ...]
    rest: bytes

    @classmethod
    def read(cls, state: Any, layout: Layout) -> Memory:
        data = without_ids(state, layout)
        sections = read_sections(data, layout)
        rows = []
        for section in sections:
            by_position = (xxhash.xxh3_128_digest(row) for row in section.rows(data))
            rows.append(dict(zip(sorted(int(p) for p in section.positions), by_position, strict=True)))
        rest = data[sections[-1].end if sections else 8 :]
        return cls(tuple(rows), xxhash.xxh3_128_digest(rest.tobytes()))

    def wrong_positions(self, length: int, window: int) -> str | None:
        """What its cells hold that a sequence of `length` tokens does not, or lack; None if nothing."""
        for i, section in enumerate(self.rows):
            if i == 0:
                if list(section) != list(range(length)):
                    return f"its attention holds {len(section)} cells, not those of {length} tokens"
            else:
                first = min(section, default=length)
                if list(section) != list(range(first, length)) or first > max(0, length - window + 1):
                    return f"its window holds {list(section)}, the next token is {length} and sees {window}"
        return None

    def seen_by_the_next(self, window: int) -> tuple[Any, ...]:
        """Of a window what the next token sees: what has left it stays in a lane until its cells are used."""
        length = 1 + max((max(section, default=-1) for section in self.rows), default=-1)
        least = max(0, length - window + 1)
        rows = [
            tuple(row for position, row in section.items() if i == 0 or position >= least)
            for i, section in enumerate(self.rows)
        ]
        return (*rows, self.rest)


def state_of(sequences: Any, seq: int) -> bytearray:
    state = bytearray(sequences.state_size(seq))
    sequences.save(seq, state)
    return state


@dataclass
class Ledger:
    """An observer that notes the memory of each path that was evaluated, and checks what is restored against it.

    Each row of a restored state must have been evaluated of that token on that path, and point state of just this path.
    Where no two evaluations of the path differed, it must be a state that a lane had as a whole: with flash attention
    on, two evaluations with other cuts differ by rounding, and what is restored may come from both.  Equal means equal
    bytes; cells may lie in another order.
    """

    rt: skippy.Runtime
    window: int
    seen: dict[bytes, set[tuple[Any, ...]]] = field(default_factory=dict)  # whole states, by digest of the path
    rows: dict[tuple[int, bytes], set[bytes]] = field(default_factory=dict)  # (section, digest of the path)
    wrong: list[str] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)  # lengths of the restored states that were compared
    exactly: int = 0  # of them: states that were seen whole

    @classmethod
    def watch(cls, rt: skippy.Runtime) -> Ledger:
        # A hybrid's window does not show in its capability, because it belongs to the checkpoint.
        ledger = cls(rt, rt.model.window)
        rt.cache.observer = ledger
        return ledger

    def memory(self, seq: int) -> Memory:
        return Memory.read(state_of(self.rt.context.sequences, seq), self.rt.capability.layout)

    def _expect_empty(self, lease: Lease) -> None:
        if self.rt.context.sequences.seq_pos_max(lease.lane) != -1:
            self.wrong.append("a lane without tokens is not empty")

    def evaluated(self, lease: Lease, tokens: Tokens) -> None:
        if len(tokens) == 0:
            self._expect_empty(lease)
            return
        memory = self.memory(lease.lane)
        digests = prefix_digests(tokens)
        found = memory.wrong_positions(len(tokens), self.window)
        if found is not None:
            self.wrong.append(f"evaluated {len(tokens)} tokens: {found}")
        self.seen.setdefault(digests[-1], set()).add(memory.seen_by_the_next(self.window))
        self._note_rows(memory, digests)
        if self.rt.capability.window:
            # Cells that the window has left are in the lane until they are used again, and can be saved until then.
            for end in range(len(tokens) % self.window or self.window, len(tokens), self.window):
                with self.rt.cache.pool.capture(lease.lane, max(0, end - self.window), end) as temp:
                    self._note_rows(self.memory(temp), digests)

    def _note_rows(self, memory: Memory, digests: list[bytes]) -> None:
        for i, section in enumerate(memory.rows):
            for position, row in section.items():
                self.rows.setdefault((i, digests[position]), set()).add(row)

    def restored(self, lease: Lease, tokens: Tokens) -> None:
        n = lease.length
        if n == 0:
            self._expect_empty(lease)
            return
        found = self.compare(self.memory(lease.lane), tokens[:n])
        if found is not None:
            self.wrong.append(f"restored {n} of {len(tokens)} tokens: {found}")

    def compare(self, memory: Memory, path: Tokens) -> str | None:
        """Why `memory` is not what was evaluated of `path`, or None."""
        digests = prefix_digests(path)
        self.checked.append(len(path))
        found = memory.wrong_positions(len(path), self.window)
        if found is not None:
            return found
        for i, section in enumerate(memory.rows):
            for position, row in section.items():
                if row not in self.rows.get((i, digests[position]), ()):
                    return f"section {i}: the memory of token {position} was never evaluated so on this path"
        whole = self.seen.get(digests[-1])
        if whole is None and self.rt.capability.layout.opaque:
            return "no lane was seen with just these tokens, so this point state was never evaluated"
        if memory.rest not in {state[-1] for state in whole or [(memory.rest,)]}:
            return f"its point state is none of the {len(whole or ())} that lanes had with just these tokens"
        if whole is not None and memory.seen_by_the_next(self.window) in whole:
            self.exactly += 1
        elif whole is not None and not self._evaluated_differently(memory, digests):
            return "its parts were never one state"
        return None

    def _evaluated_differently(self, memory: Memory, digests: list[bytes]) -> bool:
        return any(len(self.rows[i, digests[position]]) > 1 for i, rows in enumerate(memory.rows) for position in rows)


class Answers:
    """Plain cold runs, remembered, with the K and V types of a runtime."""

    def __init__(self, path: Path, *, n_batch: int, flash_attn: str, types: str = "f16", n_ctx: int = 1024) -> None:
        self._model = Model(path)
        self._runs = ColdRuns(self._model, n_ctx=n_ctx, n_batch=n_batch, n_threads=1, flash_attn=flash_attn)
        self._runs._settings |= {"type_k": types, "type_v": types}  # type: ignore[dict-item]
        self._known: dict[tuple[bytes, int], list[int]] = {}
        self.near_ties = 0

    def cold(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        tokens = np.array(prompt, np.int32)
        key = (tokens.tobytes(), max_tokens)
        if key not in self._known:
            self._known[key] = self._runs.answer(tokens, max_tokens).tokens
        return self._known[key]

    def check(self, prompt: Sequence[int], answer: list[int], max_tokens: int) -> None:
        """The greedy answer is the cold one, or leaves it at a proven near tie."""
        cold = self.cold(prompt, max_tokens)
        if answer != cold:
            parting = self._runs.parting(np.array(prompt, np.int32), cold, answer)
            assert parting is not None
            assert parting.near_tie, f"the answer leaves the cold one: {parting}"
            self.near_ties += 1

    def close(self) -> None:
        self._model.close()
