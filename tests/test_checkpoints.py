"""Models whose state cannot be cut, in conversations: what is stored beside a longer path, edits, turns and forks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from tests.ledger import Answers, Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

Open = Callable[..., skippy.Runtime]

POINTS = [name for name, model in FAMILIES.items() if model.family in ("recurrent", "hybrid")]
EXACT, SHORT = ("gemma3", 32), ("gemma3", 128)  # a window of 32 with batches that are no longer, and with longer ones
CASES: list[Any] = [
    *(pytest.param(name, 128, id=name) for name in POINTS),
    pytest.param(*EXACT, id="gemma3"),
    pytest.param(*SHORT, id="gemma3-short"),
]


@pytest.fixture
def open_tiny(tiny: Callable[[str], Path]) -> Iterator[Open]:
    """Opens tiny models under a ledger, which is looked at in the end."""
    opened: list[tuple[skippy.Runtime, Ledger]] = []

    def open_(name: str, n_batch: int, **settings: Any) -> skippy.Runtime:
        config = skippy.CacheConfig(
            **{"min_tokens": 16, "ram": "64MiB", "residency": "keep", "logits_bytes": 0, **settings.pop("cache", {})}
        )
        settings = {"n_ctx": 2048, "n_batch": n_batch, "n_ubatch": n_batch, "lanes": 2, "n_threads": 1, **settings}
        rt = skippy.Runtime(tiny(name), cache=config, **settings)
        rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        opened.append((rt, Ledger.watch(rt)))
        return rt

    yield open_
    for rt, ledger in opened:
        rt.check()
        assert ledger.wrong == []
        rt.close()


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, 8]).integers(N_CONTROL, N_VOCAB, n).tolist()


@pytest.mark.parametrize(("name", "n_batch"), CASES)
def test_t2_a_longer_sibling_does_not_hide_a_stored_path(
    open_tiny: Open, tiny: Callable[[str], Path], name: str, n_batch: int
) -> None:
    rt = open_tiny(name, n_batch)
    answers = Answers(tiny(name), n_batch=128, flash_attn="on")
    s, a, b = tokens(200, 1), tokens(60, 2), tokens(50, 3)
    # The second one goes on from 128, where prompts of 256 to 383 tokens pause; a window that is kept goes on anywhere.
    expected = [0, 199 if (name, n_batch) == EXACT else 128, 200]
    for prompt, cached in zip((s + a, s, s + b), expected, strict=True):
        done = rt.generate(prompt, max_tokens=6)
        assert (done.reuse.cached_tokens, done.reuse.evaluated_tokens) == (cached, len(prompt) - cached)
        answers.check(prompt, done.tokens, 6)
    assert rt.stats()["failures"] == {}
    answers.close()


SYSTEM = "You are a gardener, and answer in one sentence."
FIRST, REPLY = "When do I sow the carrots?", "In April, when the soil is warm and dry."


def chat(*contents: str) -> list[dict[str, str]]:
    """A conversation after the system message: user, assistant, user, ..."""
    roles = ["user", "assistant"] * len(contents)
    turns = zip(roles, contents, strict=False)
    return [{"role": "system", "content": SYSTEM}, *({"role": r, "content": c} for r, c in turns)]


@pytest.mark.parametrize(("name", "n_batch"), CASES)
def test_t10_an_edited_message_goes_on_from_where_it_begins(
    open_tiny: Open, tiny: Callable[[str], Path], name: str, n_batch: int
) -> None:
    rt = open_tiny(name, n_batch)
    answers = Answers(tiny(name), n_batch=128, flash_attn="on")
    text = rt.template.render(chat(FIRST, REPLY, "@@"))
    start = len(rt.tokenize(text[: text.index("@@")]))
    rt.chat(chat(FIRST, REPLY, "Must I water them every day?"), max_tokens=4)
    for edited in ("How deep do they go?", "And the beans?"):
        messages = chat(FIRST, REPLY, edited)
        done = rt.chat(messages, max_tokens=4)
        assert done.reuse.cached_tokens == start
        answers.check(rt.render(messages), done.tokens, 4)
    assert rt.stats()["failures"] == {}
    answers.close()


# --- ten turns --------------------------------------------------------------------------------------------------------

ASKED = [
    "When do I sow the carrots?",
    "Must I water them every day?",
    "What eats the leaves?",
    "How do I keep the snails away?",
    "Is it too late for beans?",
    "Which ones grow in the shade?",
    "Do they need a pole?",
    "How far apart?",
    "When are they ripe?",
    "What comes after them?",
]
TOLD = [
    "In April, when the soil is warm and dry.",
    "No, twice a week will do.",
    "Most likely the carrot fly.",
    "With copper, or with your hands in the evening.",
    "Not before the end of June.",
    "Broad beans stand a little of it.",
    "Only the climbing ones.",
    "A hand and a half.",
    "Ten weeks after sowing.",
    "Winter salad.",
]


def ten_turns_by_messages(rt: skippy.Runtime) -> list[int]:
    """Ten turns, in which the newest message is edited twice, and one from the middle once; what each evaluated."""
    evaluated = []

    def ask(*contents: str) -> None:
        evaluated.append(rt.chat(chat(*contents), max_tokens=4).reuse.evaluated_tokens)

    history: list[str] = []
    for turn, (asked, told) in enumerate(zip(ASKED, TOLD, strict=True)):
        ask(*history, asked)
        if turn == 3:
            ask(*history, "Sorry, I meant: " + asked.lower())
        if turn == 6:
            ask(*history, asked[:-1] + " to climb on?")  # from the start of the message, not from where it differs
        if turn == 8:
            ask(*history[:10], "Let me ask that in another way.")
        history += [asked, told]
    return evaluated


def ten_turns_in_sessions(rt: skippy.Runtime) -> list[int]:
    """Ten turns of which the fourth and the seventh are asked in another way in a fork, too."""
    session = rt.session(SYSTEM)
    evaluated = []
    for turn, asked in enumerate(ASKED):
        fork = session.fork() if turn in (3, 6) else None
        evaluated.append(session.send(asked, max_tokens=20).reuse.evaluated_tokens)
        if fork is not None:
            evaluated.append(fork.send("Let me put it so: " + asked, max_tokens=20).reuse.evaluated_tokens)
    return evaluated


@pytest.mark.parametrize("conversation", [ten_turns_by_messages, ten_turns_in_sessions])
def test_ten_turns_with_edits_evaluate_hardly_more_than_on_a_dense_model(
    open_tiny: Open, conversation: Callable[[skippy.Runtime], list[int]]
) -> None:
    dense = conversation(open_tiny("llama", 128))
    for name, n_batch in (*((name, 128) for name in POINTS), EXACT, SHORT):
        found = conversation(open_tiny(name, n_batch))
        assert sum(dense) <= sum(found) <= 1.1 * sum(dense), f"{name}: {found} against {dense}"
    assert len(dense) == (13 if conversation is ten_turns_by_messages else 12)
    # A conversation of ten turns has about as many tokens as its last prompt: each is evaluated once.
    assert sum(dense) < 1000


@pytest.mark.parametrize(
    ("name", "ram", "behind"), [("mamba2", 300_000, 1), ("rwkv7", 400_000, 9), ("falconh1", 1_200_000, 1)]
)
def test_a_conversation_that_fills_all_the_room_goes_on(open_tiny: Open, name: str, ram: int, behind: int) -> None:
    """Its own older checkpoints make room for its newest one, though they lie on the very path that is saved."""
    rt = open_tiny(name, 128, cache={"ram": ram})
    conversation: list[int] = []
    for turn in range(20):
        start = len(conversation)
        conversation += tokens(60, 100 + turn)
        done = rt.generate(conversation, max_tokens=8, message_starts=[start] if start else [])
        assert done.reuse.evaluated_tokens == 60 + (turn > 0), f"turn {turn}"  # the last token of the answer before
        conversation += done.tokens
        rt.check()
        assert rt.cache.store.arena.peak <= ram
    evictions = rt.stats()["evictions"]
    assert evictions["checkpoint:bytes"] >= 20
    assert evictions.get("checkpoint:refused", 0) == 0
    # An edit of the newest message goes on from the end of the answer before, or, with room for three checkpoints
    # alone, from the end of its prompt; one far back from not too far before.
    edited = rt.generate(conversation[:start] + tokens(60, 200), max_tokens=1)
    assert edited.reuse.cached_tokens == start - behind
    early = rt.generate(conversation[: 10 * 68] + tokens(30, 201), max_tokens=1)
    assert early.reuse.cached_tokens <= 10 * 68
    assert (early.reuse.cached_tokens > 0) is (behind == 1)
