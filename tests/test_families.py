"""The matrix: what every memory family evaluates in every situation, that its state is exact, and its answers right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import skippy
from tests.ledger import Answers, Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

ANSWER = 6  # tokens of an answer; the last one is never evaluated, so a prompt of n leaves a path of n + 5


def text(n: int, seed: int) -> list[int]:
    """`n` ordinary tokens of the tiny vocabulary, the same for the same seed."""
    return [int(token) for token in np.random.default_rng([seed, 4]).integers(N_CONTROL, N_VOCAB, n)]


# What is asked again and again; three places where prompts part are the ends of these.
SYSTEM, LONG = text(100, 1), text(300, 2)


@dataclass
class Bench:
    """A runtime under observation: asks, and proves after each answer what must hold."""

    rt: skippy.Runtime
    answers: Answers
    kind: str
    ledger: Ledger
    evaluated: list[int] = field(default_factory=list)
    tiers: list[dict[str, int]] = field(default_factory=list)

    def ask(self, prompt: Sequence[int], **options: object) -> list[int]:
        """Ask with `prompt`; the tokens that are in the lane afterwards, and the last of the answer."""
        done = self.rt.generate(list(prompt), max_tokens=ANSWER, **options)
        self.evaluated.append(done.reuse.evaluated_tokens)
        self.tiers.append(done.reuse.by_tier)
        assert self.ledger.wrong == []
        self.rt.check()
        assert self.rt.stats()["failures"] == {}
        self.answers.check(prompt, done.tokens, ANSWER)
        return [*prompt, *done.tokens]

    def evict_residents(self) -> None:
        while self.rt.cache.space.evict_resident("test"):
            pass

    def lose(self, *lengths: int) -> None:
        """Drop the checkpoints of these lengths, or all."""
        for node in self.rt.cache.tree.entries("checkpoint"):
            if not lengths or node.length in lengths:
                self.rt.cache.shelf.drop(node, "checkpoint", "test")


# --- situations -------------------------------------------------------------------------------------------------------


def exact_repeat(bench: Bench) -> None:
    for _ in range(3):
        bench.ask(LONG[:200])


def extended_by_an_answer_and_a_question(bench: Bench) -> None:
    conversation = bench.ask(LONG[:200])
    bench.ask(conversation + text(34, 3))


def extended_elsewhere_than_the_answer(bench: Bench) -> None:
    bench.ask(LONG[:200])
    bench.ask(LONG[:200] + text(40, 3))


def edited_middle(bench: Bench) -> None:
    bench.ask(LONG)
    for seed in (3, 4):
        bench.ask(LONG[:160] + text(20, seed) + LONG[180:])


def branch_in_the_middle(bench: Bench) -> None:
    bench.ask(LONG)
    bench.ask(LONG[:160] + text(60, 3))
    bench.ask(LONG[:160] + text(90, 4))
    bench.ask(LONG + text(20, 5))  # the long one is still there


def shorter_prompt(bench: Bench) -> None:
    bench.ask(LONG)
    bench.ask(LONG[:180])
    bench.ask(LONG[:180])


def two_conversations_in_turns(bench: Bench) -> None:
    one = bench.ask(SYSTEM + text(60, 3))
    two = bench.ask(SYSTEM + text(60, 4))
    for seed in (5, 6):
        one = bench.ask(one + text(34, seed))
        two = bench.ask(two + text(34, seed))
    bench.ask(SYSTEM + text(60, 7))  # a third one over the same system prompt


def residents_evicted_in_between(bench: Bench) -> None:
    one = bench.ask(SYSTEM + text(60, 3))
    bench.evict_residents()
    two = bench.ask(SYSTEM + text(60, 4))
    one = bench.ask(one + text(34, 5))
    bench.evict_residents()
    bench.ask(two + text(34, 6))
    bench.ask(one[:140] + text(34, 7))


def segments_only(bench: Bench) -> None:
    bench.ask(LONG)
    bench.evict_residents()
    for prompt in (LONG + text(40, 3), LONG, LONG[:160] + text(20, 4) + LONG[180:], LONG[:90]):
        bench.ask(prompt)
        bench.evict_residents()
    assert not any(tiers["resident"] for tiers in bench.tiers)


def all_checkpoints_lost(bench: Bench) -> None:
    bench.ask(LONG)
    bench.lose()
    bench.ask(LONG + text(40, 3))
    bench.ask(LONG + text(40, 4))


def the_last_checkpoints_lost(bench: Bench) -> None:
    bench.ask(LONG)
    bench.lose(299, 300, 305)
    bench.ask(LONG + text(40, 3))


def three_deltas(bench: Bench) -> None:
    prompt = SYSTEM
    bench.ask(prompt)
    for seed in (3, 4, 5):
        prompt = prompt + text(50, seed)
        bench.ask(prompt)
        bench.evict_residents()
    bench.ask(prompt)


# What each request evaluates.  Dense, and a window no shorter than a batch: all but what is stored, to the token.
# Others go on from the last pause before the place of parting, which is, for prompts without messages, the first of:
# the end of the stored prompt (or answer), the token before it, the place where an earlier prompt parted, and one
# stride of 128 below its last multiple: 128 for a prompt of 256 to 383 tokens, and none below, where it would be at 16.
POINTS, SHORT, EXACT = "points", "short window", "exact"
EXPECTED: dict[Callable[[Bench], None], dict[str, list[int]]] = {
    exact_repeat: {
        EXACT: [200, 1, 1],
        SHORT: [200, 1, 1],
        POINTS: [200, 1, 1],
    },
    extended_by_an_answer_and_a_question: {
        EXACT: [200, 35],
        SHORT: [200, 35],
        POINTS: [200, 35],
    },
    extended_elsewhere_than_the_answer: {
        EXACT: [200, 40],
        SHORT: [200, 40],
        POINTS: [200, 40],
    },
    edited_middle: {  # from 128, and then from 160, where the second one paused
        EXACT: [300, 140, 140],
        SHORT: [300, 172, 140],
        POINTS: [300, 172, 140],
    },
    branch_in_the_middle: {
        EXACT: [300, 60, 90, 20],
        SHORT: [300, 92, 90, 20],
        POINTS: [300, 92, 90, 20],
    },
    shorter_prompt: {
        EXACT: [300, 1, 1],
        SHORT: [300, 52, 1],
        POINTS: [300, 52, 1],
    },
    two_conversations_in_turns: {  # a prompt of 160 pauses nowhere, so the second one evaluates all, and pauses at 100
        EXACT: [160, 60, 35, 35, 35, 35, 60],
        SHORT: [160, 160, 35, 35, 35, 35, 60],
        POINTS: [160, 160, 35, 35, 35, 35, 60],
    },
    residents_evicted_in_between: {
        EXACT: [160, 60, 35, 35, 34],
        SHORT: [160, 160, 35, 35, 34],  # the batch of 128 ended near enough to 140
        POINTS: [160, 160, 35, 35, 74],
    },
    segments_only: {
        EXACT: [300, 40, 1, 140, 1],
        SHORT: [300, 40, 1, 172, 90],
        POINTS: [300, 40, 1, 172, 90],
    },
    all_checkpoints_lost: {
        EXACT: [300, 40, 40],
        SHORT: [300, 40, 40],
        "hybrid": [300, 340, 40],  # its attention stays, and says where the second one parted
        "recurrent": [300, 340, 212],  # nothing stays: from 128
    },
    the_last_checkpoints_lost: {
        EXACT: [300, 40],
        SHORT: [300, 40],
        POINTS: [300, 212],
    },
    three_deltas: {
        EXACT: [100, 50, 50, 50, 1],
        SHORT: [100, 50, 50, 50, 1],
        POINTS: [100, 50, 50, 50, 1],
    },
}


# --- the matrix -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and how its context is made.  The window of the models with one is 32 tokens."""

    model: str
    kind: str
    n_batch: int
    flash_attn: str
    types: str

    def __str__(self) -> str:
        return f"{self.model}-{'flash' if self.flash_attn == 'on' else 'noflash'}-{self.types}-{self.n_batch}"


def cases() -> Iterator[Case]:
    quantised = {"gemma3", "mamba", "mamba2", "rwkv7", "qwen3next", "qwen35"}  # their rows are blocks of 32 values
    for name, model in FAMILIES.items():
        kinds = [(model.family, 128)]
        if model.family == "window":
            kinds = [("window", 32), (SHORT, 128)]
        for kind, n_batch in kinds:
            for flash_attn, types in (("on", "f16"), ("off", "f16"), ("on", "q8_0")):
                if types == "f16" or name in quantised:
                    yield Case(name, kind, n_batch, flash_attn, types)


@pytest.fixture(scope="module", params=cases(), ids=str)
def shared(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Bench]:
    """One runtime for all situations of a case."""
    case: Case = request.param
    path = tiny(case.model)
    config = skippy.CacheConfig(min_tokens=16, ram="64MiB", residency="keep", logits_bytes=0)
    settings = {"n_batch": case.n_batch, "n_ubatch": case.n_batch, "flash_attn": case.flash_attn}
    with skippy.Runtime(
        path, n_ctx=1024, lanes=2, n_threads=1, type_k=case.types, type_v=case.types, cache=config, **settings
    ) as rt:
        assert rt.capability.unable is None
        # How fast this machine is must not decide what a test restores.
        rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        answers = Answers(path, n_batch=128, flash_attn=case.flash_attn, types=case.types)
        yield Bench(rt, answers, case.kind, Ledger.watch(rt))
        answers.close()


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    """The runtime with an empty cache; what a situation leaves is gone afterwards, to the last byte and cell."""
    shared.rt.clear()
    ledger = Ledger.watch(shared.rt)
    yield Bench(shared.rt, shared.answers, shared.kind, ledger)
    shared.rt.clear()
    assert shared.rt.cache.store.arena.used == 0
    assert len(shared.rt.cache.tree) == 0
    sequences = shared.rt.context.sequences
    assert {sequences.seq_pos_max(seq) for seq in range(sequences.n_seq_max)} == {-1}


@pytest.mark.parametrize("situation", EXPECTED, ids=lambda situation: situation.__name__)
def test_the_matrix(bench: Bench, situation: Callable[[Bench], None]) -> None:
    situation(bench)
    expected = EXPECTED[situation]
    general = {"dense": EXACT, "window": EXACT, "recurrent": POINTS, "hybrid": POINTS}
    assert bench.evaluated == expected.get(bench.kind, expected.get(general.get(bench.kind, ""), []))
    # Every request but a cold one brought something back, and all of it was compared.
    restored = [sum(tiers.values()) for tiers in bench.tiers]
    assert bench.ledger.checked == [n for n in restored if n]
