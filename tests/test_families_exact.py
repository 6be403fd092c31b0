"""Logits to the bit, on every memory family: an uninterrupted run against one that was saved, and restored elsewhere.

As in test_exactness: the same cuts and placement on both sides, fresh contexts, one thread.  Where a window slides,
what is behind it is not restored, so that with flash attention equal placement needs a prefix of a multiple of 64
tokens and the window of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from skippy.capability import Capability
from skippy.model import Model, ModelContext
from skippy.pool import Pool
from skippy.probe import probe
from skippy.segments import RamStore
from tests.conftest import evaluate
from tests.ledger import Memory, state_of
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB, WINDOW

Logits = list[npt.NDArray[np.float32]]

SUFFIX, SINGLES = 64, 4
TOKENS = np.random.default_rng(3).integers(N_CONTROL, N_VOCAB, 400).astype(np.int32)
QUANTISED = ("gemma3", "mamba", "mamba2", "rwkv7", "qwen3next", "qwen35")
SETTINGS = [
    *(pytest.param(name, {"flash_attn": flash}, id=f"{name}-{flash}") for name in FAMILIES for flash in ("on", "off")),
    *(pytest.param(n, {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"}, id=f"{n}-q8_0") for n in QUANTISED),
]


class Lab:
    """Fresh contexts on one model, and what the probe found in the first of them."""

    def __init__(self, model: Model, settings: dict[str, str]) -> None:
        self.model, self.settings = model, settings
        self.prefix = 256 + WINDOW if model.window else 256
        self._open: list[ModelContext] = []
        self.shape: Capability = probe(
            self.context().sequences, bos=model.bos, unified=True, family=model.family, window=model.window
        )
        assert self.shape.unable is None
        self.store = RamStore(16 << 20, self.shape)
        self.store.prepare(self.pool(self.context()))

    def context(self) -> ModelContext:
        self._open.append(self.model.new_context(n_ctx=1024, n_seq_max=4, n_threads=1, **self.settings))
        return self._open[-1]

    def pool(self, context: ModelContext) -> Pool:
        return Pool(context.sequences, lanes=1, residents=2, shape=self.shape)

    def memory(self, context: ModelContext) -> Memory:
        return Memory.read(state_of(context.sequences, 0), self.shape.layout)

    def go_on(self, context: ModelContext) -> Logits:
        """Logits after a suffix of 64 tokens, and after each of four single ones."""
        ends = [self.prefix + SUFFIX + i for i in range(SINGLES + 1)]
        found = []
        for start, end in zip([self.prefix, *ends], ends, strict=False):
            evaluate(context, 0, start, TOKENS[start:end])
            found.append(context.logits())
        return found

    def close(self) -> None:
        for context in self._open:
            context.close()


@pytest.fixture
def lab(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Lab]:
    name, settings = request.param
    model = Model(tiny(name))
    found = Lab(model, settings)
    yield found
    found.close()
    model.close()


def through_saved_state(lab: Lab, source: ModelContext, *cuts: int, by_window: bool = False, beyond: int = 0) -> Pool:
    """Save what `source` has of the prefix, in pieces that end at `cuts`, and restore it in a fresh context.

    `by_window`: a window comes out of the segments, else out of a checkpoint; `beyond`: tokens more than are restored.
    """
    pool, n = lab.pool(source), lab.prefix + beyond
    segments = []
    if lab.shape.has_attention:
        for start, end in zip((0, *cuts), (*cuts, n), strict=True):
            segments.append(lab.store.save(pool, 0, start, end))
    point = None if lab.shape.residents or by_window else lab.store.save_point(pool, 0, n)
    fresh = lab.context()
    pool = lab.pool(fresh)
    window = None
    if lab.shape.window:
        window = lab.prefix - lab.shape.window if by_window else lab.prefix
    for segment in segments:
        assert segment is not None
        lab.store.restore(pool, segment, 0, segment.start, min(segment.end, lab.prefix), window)
    if point is not None:
        lab.store.restore_point(pool, point, 0, lab.prefix)
    assert pool.length(0) == lab.prefix
    assert pool.is_whole(0, lab.prefix)
    return pool


@pytest.mark.parametrize("lab", [pytest.param(p.values, id=p.id) for p in SETTINGS], indirect=True)
def test_logits_after_a_restore_equal_an_uninterrupted_run_to_the_bit(lab: Lab) -> None:
    reference = lab.context()
    evaluate(reference, 0, 0, TOKENS[: lab.prefix])
    evaluated = lab.memory(reference)
    sources = {}
    for beyond in (0, 1):
        sources[beyond] = lab.context()
        evaluate(sources[beyond], 0, 0, TOKENS[: lab.prefix + beyond], lab.prefix)
    ways = {
        "one piece": through_saved_state(lab, sources[0]),
        "three pieces": through_saved_state(lab, sources[0], 70, 201),
    }
    if lab.shape.window:
        ways["window of one segment"] = through_saved_state(lab, sources[0], by_window=True)
        ways["window of two"] = through_saved_state(lab, sources[0], 70, lab.prefix - WINDOW, by_window=True)
    if not lab.shape.needs_checkpoints:
        ways["cut"] = through_saved_state(lab, sources[1], 70, by_window=True, beyond=1)
    if lab.shape.window:
        ways["window of a checkpoint, cut"] = through_saved_state(lab, sources[1], 70, beyond=1)
    expected = lab.go_on(reference)
    for way, pool in ways.items():
        context = next(each for each in lab._open if each.sequences is pool.context)
        restored, window = lab.memory(context), lab.model.window
        assert restored.seen_by_the_next(window) == evaluated.seen_by_the_next(window), (
            f"{way}: the restored state is not the evaluated one"
        )
        if lab.shape.window and "cut" in way:
            continue  # it has 31 cells of the window, and so no placement of a multiple of anything
        for step, (logits, wanted) in enumerate(zip(lab.go_on(context), expected, strict=True)):
            assert np.array_equal(logits, wanted), (
                f"{way}: logits differ at step {step} by {np.abs(logits - wanted).max()}"
            )


HYBRIDS = [name for name, model in FAMILIES.items() if model.family == "hybrid"]


@pytest.mark.parametrize(
    "lab", [pytest.param((name, {"flash_attn": "off"}), id=name) for name in HYBRIDS], indirect=True
)
def test_a_segment_of_a_hybrid_carries_no_point_state(lab: Lab) -> None:
    """Real ones have tens of megabytes of it, which no segment can carry along."""
    source = lab.context()
    evaluate(source, 0, 0, TOKENS[: lab.prefix])
    whole, partial = len(state_of(source.sequences, 0)), source.sequences.state_size(0, 1)
    empty = source.sequences.state_size(1, 1)
    segment = lab.store.save(lab.pool(source), 0, 0, lab.prefix)
    assert segment is not None
    assert segment.block.size == whole - (partial - empty)
    assert partial - empty > 1000
