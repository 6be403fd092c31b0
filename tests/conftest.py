"""What the tests share: the small real model, contexts on it, and the means to compare states and answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import skippy
from skippy.cli import packaged_model
from skippy.demo.evidence import ColdRuns, Witness
from skippy.model import Model, ModelContext
from skippy.pool import Pool
from tests.tiny_models import write_model

THREADS = int(
    os.environ.get("TEST_THREADS", "2")
)  # 1 where something else keeps a core busy: two that spin are ten times slower
N_CTX = 2048


@pytest.fixture(scope="session")
def smol_path() -> Path:
    return packaged_model()


@pytest.fixture(scope="session")
def smol(smol_path: Path) -> Iterator[Model]:
    model = Model(smol_path)
    yield model
    model.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a tiny model of tests.tiny_models by its name; each is written once."""
    folder = tmp_path_factory.mktemp("tiny")
    written: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in written:
            written[name] = write_model(name, folder / f"{name}.gguf")
        return written[name]

    return path


@pytest.fixture
def fresh(smol: Model) -> Iterator[Callable[..., ModelContext]]:
    """Makes contexts on SmolLM2 with a pool of 1,024 cells, one thread and eight sequences; closes them afterwards."""
    made: list[ModelContext] = []

    def make(**settings: Any) -> ModelContext:
        made.append(smol.new_context(**{"n_ctx": 1024, "n_seq_max": 8, "n_threads": 1, **settings}))
        return made[-1]

    yield make
    for context in made:
        context.close()


@pytest.fixture(scope="session")
def cold(smol: Model) -> ColdRuns:
    """Plain cold runs, each in a context of its own, with the threads and batches of `open_runtime`."""
    return ColdRuns(smol, n_ctx=N_CTX, n_batch=512, n_threads=THREADS, flash_attn="on")


@pytest.fixture
def open_runtime(smol_path: Path) -> Iterator[Callable[..., skippy.Runtime]]:
    """Opens runtimes on SmolLM2 with 2,048 cells; `cache` takes the fields of CacheConfig.

    Cells stay in the pool unless a test asks otherwise: which tier serves a prompt must not depend on this machine.
    """
    opened: list[skippy.Runtime] = []

    def open_(cache: dict[str, Any] | None = None, **settings: Any) -> skippy.Runtime:
        config = skippy.CacheConfig(
            **{"min_tokens": 16, "ram": "256MiB", "residency": "keep", "logits_bytes": 0, **(cache or {})}
        )
        settings = {"n_ctx": N_CTX, "n_threads": THREADS, "lanes": 2, **settings}
        opened.append(skippy.Runtime(smol_path, cache=config, **settings))
        return opened[-1]

    yield open_
    for runtime in opened:
        if not runtime.closed:
            runtime.check()
        runtime.close()


def watch(runtime: skippy.Runtime) -> Witness:
    """Compare, from now on, every restored token's memory with what was evaluated."""
    witness = Witness(runtime.context.sequences)
    runtime.cache.observer = witness
    return witness


def assert_same_answer(cold: ColdRuns, prompt: list[int], answer: list[int], max_tokens: int) -> None:
    """The greedy answer is a plain cold run's, or parts from it at a proven near tie."""
    tokens = np.array(prompt, np.int32)
    expected = cold.answer(tokens, max_tokens).tokens
    parting = cold.parting(tokens, expected, answer)
    assert parting is None or parting.near_tie, f"the answer leaves the cold one: {parting}"


def words(n: int, seed: int = 0, *, low: int = 1000, high: int = 20000) -> list[int]:
    """`n` ordinary token ids of SmolLM2, the same for the same seed."""
    return [int(token) for token in np.random.default_rng(seed).integers(low, high, n)]


def state_of(context: ModelContext, seq: int) -> bytearray:
    out = bytearray(context.sequences.state_size(seq))
    context.sequences.save(seq, out)
    return out


def evaluate(
    context: ModelContext, seq: int, start: int, tokens: list[int] | npt.NDArray[np.int32], *ends: int
) -> None:
    """Decode `tokens` of `seq` from `start`, in pieces of at most n_batch that end at `ends` and at the end."""
    array = np.asarray(tokens, np.int32)
    begin = 0
    for end in (*(end - start for end in ends), len(array)):
        for at in range(begin, end, context.sequences.n_batch):
            part = array[at : min(at + context.sequences.n_batch, end)]
            assert context.sequences.decode(seq, start + at, part) == 0
        begin = end


@contextmanager
def failing(pool: Pool, **calls: Any) -> Iterator[None]:
    """Let calls of the pool's context fail: each name maps to a function that is called instead of the real one.

    The function gets the real bound method first, then the arguments.
    """
    real = pool.context

    class Failing:
        def __getattr__(self, name: str) -> Any:
            found = getattr(real, name)
            if name in calls:
                return lambda *args, **kwargs: calls[name](found, *args, **kwargs)
            return found

    pool.context = Failing()  # type: ignore[assignment]
    try:
        yield
    finally:
        pool.context = real
