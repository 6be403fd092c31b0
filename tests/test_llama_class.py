"""`skippy.Llama` beside llama_cpp.Llama: the same answers and structures, with reuse."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import skippy
from skippy.capability import Capability
from skippy.demo.evidence import ColdRuns
from skippy.llama_context import stage_of
from tests.conftest import THREADS, assert_same_answer
from tests.test_lora import write_adapter

Open = Callable[..., Any]

SETTINGS: dict[str, Any] = {
    "n_ctx": 1024, "n_threads": THREADS, "n_threads_batch": THREADS, "verbose": False, "flash_attn": True, "seed": 7,
}  # fmt: skip
LONG = (
    "The harbour master keeps a list of every ship that has come in since the spring, with its name and its cargo. " * 2
)
SYSTEM = {"role": "system", "content": "You are the harbour master and answer in one short sentence. " * 4}


@pytest.fixture(scope="module")
def parent(smol_path: Path) -> Iterator[llama_cpp.Llama]:
    llama = llama_cpp.Llama(str(smol_path), **SETTINGS)
    yield llama
    llama.close()


@pytest.fixture
def open_llama(smol_path: Path) -> Iterator[Open]:
    opened: list[skippy.Llama] = []

    def open_(cache: dict[str, Any] | None = None, **settings: Any) -> skippy.Llama:
        config = skippy.CacheConfig(**{"min_tokens": 16, "ram": "256MiB", "residency": "keep", **(cache or {})})
        opened.append(skippy.Llama(str(smol_path), cache=config, **{**SETTINGS, **settings}))
        return opened[-1]

    yield open_
    for llama in opened:
        if llama.prefix_cache is not None:
            llama.prefix_cache.check()
        llama.close()


@pytest.fixture(scope="module")
def one(smol_path: Path) -> Iterator[skippy.Llama]:
    """One for tests that leave nothing behind."""
    config = skippy.CacheConfig(min_tokens=16, ram="64MiB", residency="keep")
    llama = skippy.Llama(str(smol_path), cache=config, **SETTINGS)
    yield llama
    llama.close()


def plain(response: Any) -> Any:
    """A response without what differs from call to call, or is skippy's own."""
    drop = {"id", "created", "prompt_tokens_details"}
    if isinstance(response, dict):
        return {key: plain(value) for key, value in response.items() if key not in drop}
    return [plain(value) for value in response] if isinstance(response, list) else response


def chunks_of(stream: Iterator[Any]) -> list[Any]:
    """The chunks of a stream, without the usage that skippy adds to the last one."""
    return [{key: value for key, value in plain(chunk).items() if key != "usage"} for chunk in stream]


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": LONG, "max_tokens": 8, "temperature": 0.0},
    "tokens": {"prompt": [1, 504, 3575, 282, 4649, 314] * 6, "max_tokens": 4, "temperature": 0.0},
    "seed": {"prompt": LONG, "max_tokens": 8, "temperature": 1.2, "seed": 5},
    "mirostat": {"prompt": LONG, "max_tokens": 4, "mirostat_mode": 2, "seed": 5},
    "penalties": {"prompt": LONG, "max_tokens": 8, "temperature": 0.0, "repeat_penalty": 1.3, "presence_penalty": 0.5},
    "stop": {"prompt": LONG, "max_tokens": 24, "temperature": 0.0, "stop": [" the", "."]},
    "echo": {"prompt": LONG, "max_tokens": 4, "temperature": 0.0, "echo": True},
    "suffix": {"prompt": LONG, "suffix": " and so it ends.", "max_tokens": 4, "temperature": 0.0},
    "bias": {"prompt": LONG, "max_tokens": 4, "temperature": 0.0, "logit_bias": {260: 50.0}},
    "short": {"prompt": "Hello", "max_tokens": 4, "temperature": 0.0},
}


@pytest.mark.parametrize("name", CALLS)
def test_completions_are_the_parents_cold_and_warm(open_llama: Open, parent: llama_cpp.Llama, name: str) -> None:
    parent.reset()
    # The second time the parent evaluates the last prompt token alone, and so does a hit: the same cut.
    expected = [plain(parent.create_completion(**CALLS[name])) for _ in range(2)]
    llama = open_llama()
    for again in range(2):
        response = llama.create_completion(**CALLS[name])
        assert plain(response) == expected[again]
        cached = response["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == llama.last_reuse.cached_tokens
        n = response["usage"]["prompt_tokens"]
        if again and n > 1:
            assert cached >= n - 1
        assert cached + llama.last_reuse.evaluated_tokens == n
    assert llama.prefix_cache.stats()["failures"] == {}


def test_an_empty_prompt_fails_as_the_parents_and_harms_nothing(open_llama: Open, parent: llama_cpp.Llama) -> None:
    llama = open_llama()
    for each in (parent, llama):
        each.reset()
        with pytest.raises(AssertionError):  # a model that adds no BOS has nothing to evaluate
            each.create_completion("", max_tokens=2)
    assert llama.prefix_cache.stats()["tree"]["nodes"] == 0
    assert llama(LONG, max_tokens=1)["usage"]["prompt_tokens"] > 40


@pytest.mark.parametrize("name", ["greedy", "stop"])
def test_streams_are_the_parents(open_llama: Open, parent: llama_cpp.Llama, name: str) -> None:
    parent.reset()
    expected = [chunks_of(parent.create_completion(**CALLS[name], stream=True)) for _ in range(2)]
    llama = open_llama()
    for again in range(2):
        chunks = list(llama.create_completion(**CALLS[name], stream=True))
        assert chunks_of(chunks) == expected[again]
        usage = chunks[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1 if again else 0)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert not any("usage" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("kind", ["plain", "json", "tools"])
def test_chats_are_the_parents(open_llama: Open, parent: llama_cpp.Llama, cold: ColdRuns, kind: str) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Which ship came in last? Answer as JSON."}]
    schema = {"type": "object", "properties": {"ship": {"type": "string", "maxLength": 8}}, "required": ["ship"]}
    tools = [{"type": "function", "function": {"name": "ships", "description": "lists ships", "parameters": schema}}]
    options: dict[str, Any] = {
        "plain": {"max_tokens": 8},
        "json": {"max_tokens": 24, "response_format": {"type": "json_object", "schema": schema}},
        "tools": {"max_tokens": 8, "tools": tools},
    }[kind]
    parent.reset()
    expected = plain(parent.create_chat_completion(messages, temperature=0.0, **options))
    llama = open_llama()
    assert plain(llama.create_chat_completion(messages, temperature=0.0, **options)) == expected
    again = plain(llama.create_chat_completion(messages, temperature=0.0, **options))
    assert llama.last_reuse.evaluated_tokens <= 1
    text = again["choices"][0]["message"]["content"]
    if kind == "json":
        assert set(json.loads(text)) == {"ship"}
    else:  # one token was evaluated alone: the same answer, or a near tie
        prompt = llama.input_ids[: llama.last_reuse.prompt_tokens].tolist()
        assert_same_answer(cold, prompt, llama.tokenize(text.encode(), add_bos=False), 8)
    stream = list(llama.create_chat_completion(messages, temperature=0.0, stream=True, **options))
    assert stream[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == llama.last_reuse.cached_tokens > 60


def test_logprobs_and_echo(smol_path: Path, open_llama: Open) -> None:
    settings = {**SETTINGS, "n_ctx": 256, "logits_all": True}
    parent = llama_cpp.Llama(str(smol_path), **settings)
    llama = open_llama(n_ctx=256, logits_all=True)
    for options in ({"logprobs": 2}, {"logprobs": 2, "echo": True}):
        parent.reset()
        parent.n_tokens = 0
        expected = plain(parent.create_completion(LONG[:200], max_tokens=3, temperature=0.0, **options))
        for _ in range(2):
            found = plain(llama.create_completion(LONG[:200], max_tokens=3, temperature=0.0, **options))
            assert found["choices"][0]["text"] == expected["choices"][0]["text"]
            ours, theirs = (each["choices"][0]["logprobs"] for each in (found, expected))
            assert ours["tokens"] == theirs["tokens"]
            ours, theirs = ([p for p in each["token_logprobs"] if p is not None] for each in (ours, theirs))
            assert np.allclose(ours, theirs, atol=1.0)  # another cut of the prompt moves logits by up to that
    parent.close()


def test_logits_processors_and_stopping_criteria(open_llama: Open, parent: llama_cpp.Llama) -> None:
    def never_the(ids: Any, scores: Any) -> Any:
        scores[260] = -np.inf
        return scores

    def stop_at_five(ids: Any, logits: Any) -> bool:
        return len(ids) >= n + 5

    n = len(parent.tokenize(LONG.encode(), add_bos=False))
    options: dict[str, Any] = {
        "logits_processor": llama_cpp.LogitsProcessorList([never_the]),
        "stopping_criteria": llama_cpp.StoppingCriteriaList([stop_at_five]),
        "max_tokens": 12,
        "temperature": 0.0,
    }
    parent.reset()
    expected = [plain(parent.create_completion(LONG, **options)) for _ in range(2)]
    llama = open_llama()
    for again in range(2):
        assert plain(llama.create_completion(LONG, **options)) == expected[again]


def test_a_chat_of_turns_between_three_chats_evaluates_only_new_tokens(open_llama: Open, cold: ColdRuns) -> None:
    llama = open_llama({"max_entries": 2})
    chats: list[list[dict[str, str]]] = [[SYSTEM], [SYSTEM], [SYSTEM]]
    known: list[list[int]] = []
    for turn in range(8):
        messages = chats[turn % 3]
        messages.append({"role": "user", "content": f"Question {turn}: what is in hold {turn * 7 % 5}?"})
        response = llama.create_chat_completion(messages, max_tokens=6, temperature=0.0)
        prompt = llama.input_ids[: llama.last_reuse.prompt_tokens].tolist()
        common = max((llama_cpp.Llama.longest_token_prefix(path, prompt) for path in known), default=0)
        assert llama.last_reuse.cached_tokens == min(common, len(prompt) - 1)
        path = llama.input_ids[: llama.n_tokens].tolist()
        answer = llama.tokenize(response["choices"][0]["message"]["content"].encode(), add_bos=False)
        assert path[len(prompt) :] == answer[: len(path) - len(prompt)]
        assert_same_answer(cold, prompt, answer, 6)
        known.append(path)
        messages.append({"role": "assistant", "content": response["choices"][0]["message"]["content"]})
        llama.prefix_cache.check()


def test_the_same_chats_through_a_runtime_evaluate_as_many_tokens(open_llama: Open, smol_path: Path) -> None:
    cache = {"min_tokens": 16, "ram": "256MiB", "residency": "keep"}
    llama = open_llama(cache)
    chats: list[list[dict[str, str]]] = [[SYSTEM], [SYSTEM], [SYSTEM]]
    asked: list[list[dict[str, str]]] = []
    answers: list[str] = []
    through_llama: list[tuple[int, int]] = []
    for turn in range(8):
        messages = chats[turn % 3]
        messages.append({"role": "user", "content": f"Question {turn}: what is in hold {turn * 7 % 5}?"})
        asked.append(list(messages))
        response = llama.create_chat_completion(messages, max_tokens=6, temperature=0.0)
        answers.append(response["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
        through_llama.append((llama.last_reuse.prompt_tokens, llama.last_reuse.evaluated_tokens))
    llama.close()
    threads = SETTINGS["n_threads"]
    config = skippy.CacheConfig(**cache)
    with skippy.Runtime(smol_path, n_ctx=SETTINGS["n_ctx"], n_threads=threads, lanes=1, cache=config) as rt:
        found = [rt.chat(messages, max_tokens=6) for messages in asked]
    assert [answer.text for answer in found] == answers
    assert [(answer.reuse.prompt_tokens, answer.reuse.evaluated_tokens) for answer in found] == through_llama
    assert sum(evaluated for _, evaluated in through_llama[1:]) < sum(n for n, _ in through_llama[1:]) / 4


def test_cache_prompt_and_prompt_cache_key(open_llama: Open) -> None:
    llama = open_llama()

    def cached(**options: Any) -> int:
        return int(
            llama(LONG, max_tokens=2, temperature=0.0, **options)["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    n = len(llama.tokenize(LONG.encode(), add_bos=False))
    assert cached(cache_prompt=False) == 0
    assert llama.prefix_cache.stats()["tree"]["nodes"] == 0
    assert cached() == 0
    assert cached() == n - 1
    assert cached(cache_prompt=False) == 0
    assert [cached(prompt_cache_key=key) for key in ("a", "b", "a", "", "b")] == [0, 0, n - 1, n - 1, n - 1]
    messages = [{"role": "user", "content": LONG}]
    for expected in (True, False):
        response = llama.create_chat_completion(messages, max_tokens=1, prompt_cache_key="chat")
        assert (response["usage"]["prompt_tokens_details"]["cached_tokens"] == 0) is expected
    chunks = list(llama(LONG, max_tokens=1, stream=True, prompt_cache_key="new"))
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_e6_a_stream_that_is_closed_early_is_recorded(open_llama: Open) -> None:
    llama = open_llama()
    stream = llama(LONG, max_tokens=40, temperature=0.0, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    cache = llama.prefix_cache.cache
    (node,) = cache.tree.entries("resident")
    seq = cache.space.sequence_of(node)
    assert node.length == llama.n_tokens == llama._sequences.seq_pos_max(seq) + 1
    assert cache.tree.tokens(node).tolist() == llama.input_ids[: llama.n_tokens].tolist()
    assert node.length >= len(llama.tokenize(LONG.encode(), add_bos=False)) + 2
    assert llama(LONG + " Then", max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 40


def test_an_exception_that_passes_through_is_recorded_too(open_llama: Open) -> None:
    llama = open_llama()

    def fail(ids: Any, scores: Any) -> bool:
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        llama(LONG, max_tokens=4, stopping_criteria=llama_cpp.StoppingCriteriaList([fail]))
    assert llama.prefix_cache.stats()["residents"] == 1
    assert llama(LONG, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 40


def test_e9_memory_that_is_cleared_in_between(open_llama: Open, cold: ColdRuns) -> None:
    llama = open_llama()
    prompt = llama.tokenize(LONG.encode(), add_bos=False)
    llama(LONG, max_tokens=4, temperature=0.0)
    llama._ctx.kv_cache_clear()  # what embed() and the multimodal handlers do
    assert llama.prefix_cache.stats()["residents"] == 0
    answer = llama(LONG, max_tokens=6, temperature=0.0)
    assert llama.last_reuse.by_tier["ram"] == len(prompt) - 1
    assert_same_answer(cold, prompt, llama.tokenize(answer["choices"][0]["text"].encode(), add_bos=False), 6)
    llama_cpp.llama_memory_clear(llama._ctx.memory, True)  # behind our back: noticed when it is used
    llama.reset()
    answer = llama(LONG + " Now", max_tokens=4, temperature=0.0)
    assert_same_answer(
        cold,
        llama.tokenize((LONG + " Now").encode(), add_bos=False),
        llama.tokenize(answer["choices"][0]["text"].encode(), add_bos=False),
        4,
    )
    llama.prefix_cache.check()


def test_embeddings_beside_completions(open_llama: Open, smol_path: Path) -> None:
    settings = {**SETTINGS, "embedding": True, "n_ctx": 512, "n_batch": 256}
    parent = llama_cpp.Llama(str(smol_path), **settings)
    llama = open_llama(embedding=True, n_ctx=512, n_batch=256)
    llama(LONG, max_tokens=2, temperature=0.0)
    ours, theirs = (each.create_embedding(["a ship", "a cargo of salt"])["data"] for each in (llama, parent))
    for one, two in zip(ours, theirs, strict=True):
        assert np.allclose(one["embedding"], two["embedding"], atol=1e-4)
    parent.close()
    response = llama(LONG, max_tokens=2, temperature=0.0)
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
    assert llama.last_reuse.by_tier["ram"] > 40


def test_save_and_load_state(open_llama: Open, smol_path: Path) -> None:
    llama = open_llama()
    llama(LONG, max_tokens=4, temperature=0.0)
    other = "A different text about mountains and the people who live in them, far away from every sea. " * 2
    llama(other, max_tokens=2, temperature=0.0)
    assert llama.prefix_cache.stats()["residents"] == 2
    state = llama.save_state()
    path = llama.input_ids[: llama.n_tokens].tolist()
    llama(LONG, max_tokens=2, temperature=0.0)
    llama.load_state(state)
    assert llama.input_ids[: llama.n_tokens].tolist() == path
    assert llama.prefix_cache.stats()["residents"] == 2
    llama.eval(path[:1] if not path else llama.tokenize(b" and", add_bos=False))
    assert llama.n_tokens == len(path) + 1
    llama.reset()
    assert llama(LONG, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
    parent = llama_cpp.Llama(str(smol_path), **SETTINGS)
    parent(LONG, max_tokens=2, temperature=0.0)
    foreign = parent.save_state()
    parent.close()
    assert foreign.llama_state[:4] != state.llama_state[:4]


def test_the_low_level_way(open_llama: Open, parent: llama_cpp.Llama) -> None:
    """tokenize, eval, sample: as people who build their own loop do."""
    llama = open_llama()
    tokens = llama.tokenize(LONG.encode(), add_bos=False)

    def loop(each: llama_cpp.Llama) -> list[int]:
        each.reset()
        each.eval(tokens)
        found = []
        for _ in range(4):
            found.append(each.sample(temp=0.0))
            each.eval(found[-1:])
        return found

    assert loop(llama) == loop(parent)
    llama.prefix_cache.check()
    assert llama(LONG, max_tokens=1, temperature=0.0)["usage"]["prompt_tokens"] == len(tokens)
    generated = []
    for token in llama.generate(tokens, temp=0.0):
        generated.append(token)
        if len(generated) == 4:
            break
    assert generated == loop(parent)


def test_pickle_and_constructor(open_llama: Open) -> None:
    llama = open_llama({"min_tokens": 32})
    llama(LONG, max_tokens=1)
    again = pickle.loads(pickle.dumps(llama))  # noqa: S301 - our own
    try:
        assert again._config == llama._config
        assert again.prefix_cache.stats()["tree"]["nodes"] == 0
        assert again(LONG, max_tokens=2, temperature=0.0)["usage"]["prompt_tokens"] == llama.last_reuse.prompt_tokens
    finally:
        again.close()
    ours = inspect.signature(skippy.Llama.__init__).parameters
    theirs = inspect.signature(llama_cpp.Llama.__init__).parameters
    assert set(ours) - set(theirs) == {"cache", "on_event"}
    assert set(theirs) <= set(ours)


def test_events_of_a_llama(open_llama: Open) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    llama = open_llama(on_event=lambda name, details: seen.append((name, details)))
    llama(LONG, max_tokens=1)
    llama._ctx.kv_cache_clear()
    llama(LONG, max_tokens=1)
    n = llama.last_reuse.prompt_tokens
    assert [name for name, _ in seen if name != "miss"] == ["lookup", "save", "evict", "restore", "lookup"]
    assert seen[-1] == ("lookup", {"prompt_tokens": n, "cached_tokens": n - 1, "reason": "hit"})
    assert all(isinstance(value, (int, str)) for _, details in seen for value in details.values())
    assert LONG[:12] not in str(seen)
    again = pickle.loads(pickle.dumps(llama))  # noqa: S301 - our own; the callback cannot be pickled, and is left out
    seen.clear()
    again(LONG, max_tokens=1)
    again.close()
    assert seen == []


def test_a_callback_may_not_use_the_llama_that_called_it(open_llama: Open, caplog: pytest.LogCaptureFixture) -> None:
    uses: list[Callable[[], Any]] = []
    llama = open_llama(on_event=lambda name, details: uses[-1]())
    prompts = iter([LONG + "One", LONG + "Two", LONG + "Three"])
    for use in (lambda: llama.prefix_cache.stats(), lambda: llama(LONG, max_tokens=1), lambda: llama.eval([5])):
        caplog.clear()
        uses.append(use)
        assert llama(next(prompts), max_tokens=2, temperature=0.0)["usage"]["completion_tokens"] == 2
        assert "being used from within one of its own calls" in caplog.text
        uses.append(lambda: None)
        llama.prefix_cache.check()


def test_a_stream_that_the_garbage_collector_closes_in_the_middle_of_a_step(open_llama: Open) -> None:
    seen: list[str] = []

    def collect(name: str, details: dict[str, Any]) -> None:
        seen.append(name)
        gc.collect()

    llama = open_llama(on_event=collect)

    class Cycle:
        def __init__(self, stream: Iterator[Any]) -> None:
            self.stream, self.me = stream, self

    gc.disable()
    try:
        cycle = Cycle(llama(LONG, max_tokens=40, temperature=0.0, stream=True))
        next(cycle.stream)
        del cycle
        llama.prefix_cache.cache.space.evict_resident("test")
        with llama._steps:
            llama.prefix_cache.cache.count(0, {}, "hit")
            assert llama._turns.mine  # it is closed, but nothing of it is touched before the step is over
            assert llama.prefix_cache.cache.tree.count("resident") == 0
        assert not llama._turns.mine
        assert llama.prefix_cache.cache.tree.count("resident") == 1
    finally:
        gc.enable()
    assert seen
    llama.prefix_cache.check()
    assert llama(LONG, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 40


def test_defaults_are_better_and_the_callers_are_kept(smol_path: Path) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "flash_attn"}
    for given, flash in (({}, True), ({"flash_attn": False}, False), ({"flash_attn": True}, True)):
        llama = skippy.Llama(str(smol_path), **{**settings, **given})
        assert llama.prefix_cache is not None
        assert llama._sequences is not None
        assert llama.prefix_cache.cache.pool.context.n_seq_max == 66
        stage = stage_of(llama, llama._config, Capability(None, flash))
        assert stage.flash_attn_type == ("on" if flash else "off")
        assert (llama.context_params.flash_attn_type == 0) is (given.get("flash_attn") is False)
        llama.close()
        llama.close()


def test_disabled_is_the_parent(smol_path: Path, parent: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MODE", "disabled")
    llama = skippy.Llama(str(smol_path), **SETTINGS)
    assert llama.prefix_cache is None
    assert llama.context_params.n_seq_max == 1
    parent.reset()
    response = llama.create_completion(**CALLS["greedy"])
    assert plain(response) == plain(parent.create_completion(**CALLS["greedy"]))
    assert "prompt_tokens_details" not in response["usage"]
    llama.close()
    vocabulary = skippy.Llama(str(smol_path), vocab_only=True, verbose=False)
    assert vocabulary.tokenize(b"Hello") == parent.tokenize(b"Hello")
    vocabulary.close()


def test_e14_an_adapter_reloaded_under_the_same_name(open_llama: Open, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", 1)
    hashes = []
    for seed in (1, 2):
        write_adapter(path, seed)
        llama = open_llama(lora_path=str(path))
        hashes.append(llama.prefix_cache.namespace_hash())
        assert llama(LONG, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        llama.close()
    assert len({*hashes, open_llama().prefix_cache.namespace_hash()}) == 3


def test_t12_explaining(open_llama: Open) -> None:
    llama = open_llama()
    rest = " o'clock. The harbour opens at six and closes when the last boat is in. Who is on duty at the gate now?"
    prompts = [f"It is {hour}{rest}" for hour in ("one", "two", "three", "four")]
    for prompt in prompts[:3]:
        llama(LONG + prompt, max_tokens=1)
    tokens = llama.tokenize((LONG + prompts[3]).encode(), add_bos=False)
    explained = llama.prefix_cache.explain(tokens)
    n = llama_cpp.Llama.longest_token_prefix(tokens, llama.tokenize((LONG + prompts[2]).encode(), add_bos=False))
    assert explained.diverged_at == explained.matched_tokens == explained.cached_tokens == n
    assert explained.hint == "volatile_prefix"
    assert " four o'clock" in explained.prompt_text
    assert " three o'clock" in explained.stored_text
    assert llama.prefix_cache.explain(LONG + prompts[3]) == llama.prefix_cache.explain(np.array(tokens)) == explained


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "the prompt has no tokens"),
        ("", ValueError, "the prompt has no tokens"),
        ([5, 49152], ValueError, r"token 49152 at index 1 is not in the vocabulary \(0 to 49151\)"),
        ([-1], ValueError, "token -1 at index 0 is not in the vocabulary"),
        (b"ships", TypeError, "prompt is b'ships', expected text or a sequence of token ids"),
        (None, TypeError, "prompt is None, expected text or a sequence of token ids"),
        ({5: 6}, TypeError, "prompt is {5: 6}, expected text"),
        ([5, "6"], TypeError, r"prompt\[1\] is '6', expected a token id"),
        ([True], TypeError, r"prompt\[0\] is True, expected a token id"),
        ([[5]], TypeError, r"prompt\[0\] is \[5\], expected a token id"),
    ],
)
def test_what_cannot_be_explained_is_named(
    one: skippy.Llama, prompt: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        one.prefix_cache.explain(prompt)
    with pytest.raises(TypeError, match="prompt_cache_key is 5, expected text"):
        one.prefix_cache.explain("Ships", prompt_cache_key=5)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_text_is_explained_as_a_completion_would_tokenise_it(
    one: skippy.Llama, monkeypatch: pytest.MonkeyPatch, begins: bool, ends: bool
) -> None:
    monkeypatch.setattr(one._model, "add_bos_token", lambda: begins)
    monkeypatch.setattr(one._model, "add_eos_token", lambda: ends)
    one(LONG + "<|im_end|>", max_tokens=1, temperature=0.0)
    explained = one.prefix_cache.explain(LONG + "<|im_end|>")
    assert one.input_ids[: one.n_tokens].tolist() == one._prompt_tokens(LONG + "<|im_end|>")
    assert explained.prompt_tokens == explained.matched_tokens == one.last_reuse.prompt_tokens
    assert explained.evaluated_tokens == 1
    one.prefix_cache.clear()
    one.reset()


def test_looking_while_another_thread_generates_waits_for_a_token_only(open_llama: Open) -> None:
    llama = open_llama()
    llama(LONG + " First,", max_tokens=1)
    first, done = threading.Event(), threading.Event()

    def work() -> None:
        for _ in llama(LONG + " Then", max_tokens=60, temperature=0.0, stream=True, logit_bias={2: -100.0}):
            first.set()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert first.wait(60)
    looked = 0
    while not done.is_set():
        llama.prefix_cache.check()
        assert "skippy_entries" in llama.prefix_cache.metrics()
        if looked < 4:
            assert llama.prefix_cache.explain(LONG).cached_tokens > 40
        elif looked == 4:
            llama.prefix_cache.clear()  # all but what the request is using
        looked += 1
    thread.join()
    assert looked > 5  # it did not wait for the answer
    assert llama.last_reuse.cached_tokens > 40


def test_looking_does_not_end_a_stream_of_the_same_thread(open_llama: Open) -> None:
    llama = open_llama()
    stream = llama(LONG, max_tokens=6, temperature=0.0, stream=True)
    next(stream)
    llama.prefix_cache.check()
    assert llama.prefix_cache.stats()["tokens"]["prompt"] > 40
    assert llama.prefix_cache.explain(LONG).prompt_tokens > 40
    assert len(list(stream)) > 1
    cache = llama.prefix_cache
    llama.close()
    for look in (cache.stats, cache.check, cache.metrics, lambda: cache.explain(LONG), cache.clear):
        with pytest.raises(ValueError, match="this Llama is closed"):
            look()


def test_threads_wait_for_their_turn(open_llama: Open, cold: ColdRuns) -> None:
    llama = open_llama()
    prompts = [LONG + f"Ship number {i} carries" for i in range(4)]
    answers: dict[int, str] = {}

    def work(i: int) -> None:
        if i % 2:
            answers[i] = llama(prompts[i], max_tokens=5, temperature=0.0)["choices"][0]["text"]
        else:
            stream = llama(prompts[i], max_tokens=5, temperature=0.0, stream=True)
            answers[i] = "".join(chunk["choices"][0]["text"] for chunk in stream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    llama.prefix_cache.check()
    for i, prompt in enumerate(prompts):
        tokens = llama.tokenize(prompt.encode(), add_bos=False)
        assert_same_answer(cold, tokens, llama.tokenize(answers[i].encode(), add_bos=False), 5)


def test_a_stream_is_at_its_end_when_another_request_begins(open_llama: Open) -> None:
    llama = open_llama()
    first = llama(LONG, max_tokens=20, temperature=0.0, stream=True)
    next(first)
    second = llama(LONG + "Also,", max_tokens=2, temperature=0.0)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 40  # what the first had evaluated
    with pytest.raises(RuntimeError, match="this stream is at its end"):
        next(first)
    first.close()
    assert llama(LONG, max_tokens=1)["usage"]["prompt_tokens"] > 40
    llama.prefix_cache.check()


def test_set_cache_with_a_prefix_cache(open_llama: Open, smol_path: Path) -> None:
    cache = skippy.LlamaPrefixCache()
    assert bool(cache)
    assert cache.cache_size == 0
    tokens = [1, 2, 3]
    assert tokens not in cache
    with pytest.raises(KeyError):
        cache[tokens]
    llama = open_llama()
    llama.set_cache(cache)
    assert llama.cache is cache
    saves: list[int] = []
    real = llama.save_state
    llama.save_state = lambda: saves.append(1) or real()
    prompt = llama.tokenize(LONG.encode(), add_bos=False)
    first = llama(LONG, max_tokens=4, temperature=0.0)
    assert not saves  # the parent did not copy the context
    assert prompt in cache
    assert cache.cache_size == llama.prefix_cache.stats()["cells"]["resident"] * (23040 + 12)
    state = cache[[*prompt, 5]]
    assert (state.n_tokens, state.input_ids[: len(prompt)].tolist()) == (len(prompt), prompt)
    cache[prompt] = state  # nothing to do: it is kept already
    again = llama(LONG, max_tokens=4, temperature=0.0)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    llama.set_cache(llama_cpp.LlamaRAMCache())  # the parent's own still works
    llama(LONG + " And", max_tokens=1)
    assert len(llama.cache.cache_state) == 1


def test_a_prefix_cache_on_another_llama_keeps_nothing(smol_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama = llama_cpp.Llama(str(smol_path), **{**SETTINGS, "n_ctx": 128})
    llama.set_cache(skippy.LlamaPrefixCache())
    llama("Hello there", max_tokens=1)
    llama("Hello there", max_tokens=1)
    assert caplog.text.count("LlamaPrefixCache keeps nothing") == 1
    llama.close()


def test_metrics_of_a_llama(open_llama: Open) -> None:
    llama = open_llama()
    llama(LONG, max_tokens=1)
    n = llama.last_reuse.prompt_tokens
    text = llama.prefix_cache.metrics()
    assert f"skippy_prompt_tokens_total {n}\n" in text
    assert LONG[:20] not in text
