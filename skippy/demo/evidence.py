"""The checks of the demonstration: restored rows against evaluated rows, and answers against plain cold runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from skippy.cache import Lease
from skippy.capability import Capability
from skippy.errors import NativeError
from skippy.layout import read_sections
from skippy.model import Model, ModelContext
from skippy.pool import NativeContext

__all__ = ["ColdAnswer", "ColdRuns", "Parting", "Witness", "prefix_digests"]

Tokens = npt.NDArray[np.int32]


def prefix_digests(tokens: Tokens) -> list[bytes]:
    """A digest of each prefix of `tokens`, from length 1 to n.  O(n)."""
    state = xxhash.xxh3_128()
    digests = []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        digests.append(state.digest())
    return digests


class Witness:
    """Watches a cache: remembers the memory of every token when it is evaluated, and compares what is restored.

    The memory of a token is its K and V rows in all layers, read from llama.cpp's saved state; that of a length is what
    belongs to it as a whole, the recurrent state.  A restored token passes if, for the very path that leads to it,
    exactly those rows were evaluated before, and so does a restored length.  `shape` is what the context can do.
    """

    def __init__(self, context: NativeContext, shape: Capability | None = None) -> None:
        self.known: set[bytes] = set()
        self.checked = 0
        self.wrong = 0
        self.should_be_restored = 0
        self.behind_checkpoint = 0
        self.seconds = 0.0
        self._context = context
        self._shape = Capability(None) if shape is None else shape
        # Where a path can be cut at every token there is nothing else to remember.
        self._anywhere = self._shape.residents or self._shape.window >= context.n_batch
        self._rows: dict[bytes, set[bytes]] = {}
        self._points: dict[bytes, set[bytes]] = {}

    def _read(self, lease: Lease, paths: list[bytes]) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """(path and section, digest of the row) of each token in each section, and a digest of what is left."""
        if lease.length == 0:
            return [], b""
        state = np.empty(self._context.state_size(lease.lane), np.uint8)
        self._context.save(lease.lane, state)
        sections = read_sections(state, self._shape.layout)
        rows = [
            (path_digest + bytes([i]), xxhash.xxh3_128_digest(row.data))
            for i, section in enumerate(sections)
            for path_digest, row in zip(
                (paths[position] for position in np.sort(section.positions)), section.rows(state), strict=True
            )
        ]
        return rows, xxhash.xxh3_128_digest(state[sections[-1].end if sections else 8 :].data)

    def restored(self, lease: Lease, tokens: Tokens) -> None:
        """Called by the cache when a prompt has been looked up and its lane holds what was restored."""
        began = time.perf_counter()
        paths = prefix_digests(tokens)
        known = next((i for i, path in enumerate(paths) if path not in self.known), len(paths))
        known = min(known, len(tokens) - 1)
        points = (n for n in range(known, 0, -1) if paths[n - 1] in self._points)
        self.should_be_restored = known if self._anywhere else next(points, 0)
        self.behind_checkpoint = max(0, known - lease.length)
        rows, rest = self._read(lease, paths)
        wrong = {path[:-1] for path, row in rows if row not in self._rows.get(path, ())}
        if lease.length and rest not in self._points.get(paths[lease.length - 1], {rest}):
            wrong.add(paths[lease.length - 1])
        if lease.length and self._shape.needs_checkpoints and paths[lease.length - 1] not in self._points:
            wrong.add(paths[lease.length - 1])  # it was never there, so nothing can have been kept of it
        self.checked, self.wrong = lease.length, len(wrong)
        self.seconds = time.perf_counter() - began

    def evaluated(self, lease: Lease, tokens: Tokens) -> None:
        """Called by the cache when state has been kept, and when a request has ended and is recorded next."""
        paths = prefix_digests(tokens)
        rows, rest = self._read(lease, paths)
        for path, row in rows:
            self._rows.setdefault(path, set()).add(row)
        self.known.update(paths)
        self._points.setdefault(paths[-1], set()).add(rest)


@dataclass(frozen=True)
class ColdAnswer:
    """A plain cold run in a context of its own."""

    tokens: list[int]
    ttft_ms: float


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the cold one: at `index` the cold run prefers its token by `gap`, with `noise` beside it.

    Both in logits; `noise` is the largest difference that cutting the same tokens in other places, or placing them
    elsewhere in the pool, makes between cold runs.
    """

    index: int
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether the two tokens are closer than rounding moves them."""
        return self.gap <= self.noise


class ColdRuns:
    """Evaluates prompts from zero, each in a fresh context that nothing else has used."""

    def __init__(self, model: Model, *, n_ctx: int, n_batch: int, n_threads: int, flash_attn: str) -> None:
        self._model = model
        self._settings = {
            "n_ctx": n_ctx,
            "n_batch": n_batch,
            "n_ubatch": n_batch,
            "n_threads": n_threads,
            "n_seq_max": 2,
            "swa_full": False,
        }
        self._flash_attn = flash_attn
        self._n_ctx = n_ctx
        self._n_batch = n_batch

    def answer(self, prompt: Tokens, max_tokens: int) -> ColdAnswer:
        """The greedy answer.  The first batch of a context pays for its buffers: a short one goes before the clock."""
        context = self._model.new_context(flash_attn=self._flash_attn, **self._settings)  # type: ignore[arg-type]
        try:
            sequences = context.sequences
            sequences.decode(0, 0, prompt[:1])
            sequences.seq_rm(0)
            began = time.perf_counter()
            for start in range(0, len(prompt), self._n_batch):
                part = prompt[start : start + self._n_batch]
                self._decode(context, start, part)
            tokens = [int(context.logits().argmax())]
            ttft = 1e3 * (time.perf_counter() - began)
            max_tokens = min(max_tokens, self._n_ctx - len(prompt) + 1)
            while not self._model.is_end(tokens[-1]) and len(tokens) < max_tokens:
                self._decode(context, len(prompt) + len(tokens) - 1, np.array(tokens[-1:], np.int32))
                tokens.append(int(context.logits().argmax()))
        finally:
            context.close()
        if self._model.is_end(tokens[-1]):
            tokens.pop()
        return ColdAnswer(tokens, ttft)

    @staticmethod
    def _decode(context: ModelContext, start: int, tokens: Tokens) -> None:
        code = context.sequences.decode(0, start, tokens)
        if code != 0:
            raise NativeError(f"a cold run failed at {start} with {code}", code)

    def logits(self, tokens: Tokens, cuts: list[int], *, gap: int = 0) -> npt.NDArray[np.float32]:
        """Logits after the last of `tokens`, evaluated cold in pieces that end at `cuts` and at the end.

        With `gap` so many cells lie free before the first piece, and what comes after it goes there first.
        """
        context = self._model.new_context(flash_attn=self._flash_attn, **self._settings)  # type: ignore[arg-type]
        try:
            if gap:
                context.sequences.decode(1, 0, np.full(gap, tokens[0], np.int32))
            for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
                for at in range(start, end, self._n_batch):
                    self._decode(context, at, tokens[at : min(at + self._n_batch, end)])
                context.sequences.seq_rm(1)
            return context.logits()
        finally:
            context.close()

    def parting(self, prompt: Tokens, cold: list[int], warm: list[int]) -> Parting | None:
        """None where the answers are equal, else where they part and by how much cold prefers its own token.

        The end token of the shorter answer is not known here, so where one answer is the head of the other, the
        model's end-of-sequence or end-of-turn token with the highest logit stands for it.
        """
        if cold == warm:
            return None
        index = next((i for i, (a, b) in enumerate(zip(cold, warm, strict=False)) if a != b), min(len(cold), len(warm)))
        path = np.concatenate([prompt, np.array(cold[:index], np.int32)]).astype(np.int32)
        single = list(range(len(prompt), len(path)))
        runs = [self.logits(path, single)]
        for cuts in ([len(prompt) // 2, len(prompt) - 1], [len(prompt) * 2 // 3]):
            runs.append(self.logits(path, cuts))
        tail = min(7, len(prompt) - 1)
        if tail > 0 and len(path) + tail <= self._n_ctx:
            runs.append(self.logits(path, [len(prompt) - tail], gap=tail))
        noise = max(float(np.abs(runs[0] - other).max()) for other in runs[1:])
        top = self._choice(cold, index, runs[0])
        other = self._choice(warm, index, runs[0])
        return Parting(index, float(runs[0][top] - runs[0][other]), noise)

    def _choice(self, answer: list[int], index: int, logits: npt.NDArray[np.float32]) -> int:
        if index < len(answer):
            return answer[index]
        ends = [token for token in range(self._model.n_vocab) if self._model.is_end(token)]
        return max(ends, key=lambda token: float(logits[token]))
