"""Prompts, chats and sessions on SmolLM2, against plain cold runs."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy.demo.evidence import ColdRuns
from skippy.sampling import Sampler
from tests.conftest import assert_same_answer, failing, watch, words

Open = Callable[..., skippy.Runtime]

STORY = (
    "Once upon a time, in a village at the foot of a high mountain, there lived an old clockmaker who had never "
    "missed a morning. Every day he opened his shop at seven, wound the great clock above the door"
)


def ask(
    rt: skippy.Runtime, cold: ColdRuns, prompt: list[int], max_tokens: int = 8, **options: Any
) -> skippy.Completion:
    """A greedy answer that is a cold run's, with a report that adds up."""
    answer = rt.generate(prompt, max_tokens=max_tokens, **options)
    assert_same_answer(cold, prompt, answer.tokens, max_tokens)
    reuse = answer.reuse
    assert reuse.prompt_tokens == len(prompt) == reuse.cached_tokens + reuse.evaluated_tokens
    assert sum(reuse.by_tier.values()) == reuse.cached_tokens
    return answer


def test_t3_the_same_64_tokens_twice_answers_as_cold_with_the_same_split(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime({"min_tokens": 64})
    prompt = rt.tokenize(STORY * 2)[:64]
    first = ask(rt, cold, prompt)
    second = ask(rt, cold, prompt)
    assert (first.reuse.cached_tokens, second.reuse.cached_tokens, second.reuse.evaluated_tokens) == (0, 63, 1)
    assert second.reuse.reason == "hit"
    split = cold.logits(np.array(prompt, np.int32), [63])
    rt.generate(prompt, max_tokens=0)
    assert int(split.argmax()) == second.tokens[0]


def test_t5_an_answer_sent_back_as_text_is_reused_to_the_first_token_that_differs(
    open_runtime: Open, cold: ColdRuns
) -> None:
    rt = open_runtime()
    head = rt.tokenize(STORY)
    # The model ended with "." and two single ends of line; as text the ends of line are one token.
    split = [*rt.tokenize("."), *rt.tokenize("\n"), *rt.tokenize("\n")]
    joined = rt.tokenize(".\n\n")
    assert rt.detokenize(split) == rt.detokenize(joined)
    assert (len(split), len(joined)) == (3, 2)
    common = next((i for i, (a, b) in enumerate(zip(split, joined, strict=False)) if a != b), len(joined))
    ask(rt, cold, [*head, *split, *words(5)])
    answer = ask(rt, cold, [*head, *joined, *words(5)])
    assert answer.reuse.cached_tokens == len(head) + common
    assert answer.reuse.diverged_at == len(head) + common


def test_t5_a_session_does_not_have_the_problem(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime()
    witness = watch(rt)
    session = rt.session("You are a poet. Answer in short lines, each followed by an empty line.")
    path: list[int] = []
    finish = ""
    for text in ("Write about rain.", "Now about snow.", "And about the sea."):
        prompt = session.prompt_for(text)
        assert prompt[: len(path)] == path  # what was said stays as it was generated
        answer = session.send(text, max_tokens=20)
        assert session.tokens == [*prompt, *answer.tokens]
        assert_same_answer(cold, prompt, answer.tokens, 20)
        # All that was evaluated before is reused; the last token of a cut answer was chosen, but never evaluated.
        if path:
            evaluated = len(path) - (finish == "length")
            assert answer.reuse.cached_tokens == evaluated
        assert witness.wrong == 0
        assert witness.checked == answer.reuse.cached_tokens == witness.should_be_restored
        path, finish = session.tokens, answer.finish_reason
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 3]


def test_t6_three_conversations_over_two_sequence_ids_for_60_turns(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime({"max_entries": 2, "min_tokens": 1}, n_ctx=1024)
    witness = watch(rt)
    names = {"red": "apples", "green": "pears", "blue": "plums"}
    paths = {
        name: rt.tokenize(f"The {name} shop sells {fruit}, and nothing but {fruit}. ") * 2
        for name, fruit in names.items()
    }
    for turn in range(60):
        name = list(names)[turn % 3]
        prompt = [*paths[name], *rt.tokenize(f" {turn}:")]
        if len(prompt) > 200:
            prompt = prompt[:60]
        answer = rt.generate(prompt, max_tokens=3)
        assert witness.wrong == 0
        assert answer.reuse.cached_tokens == witness.should_be_restored
        assert_same_answer(cold, prompt, answer.tokens, 3)
        paths[name] = [*prompt, *answer.tokens]
        assert rt.stats()["residents"] <= 2
    rt.check()
    assert rt.stats()["evictions"]["resident:entries"] > 20


def test_t12_a_time_of_day_and_a_lost_think_part(open_runtime: Open) -> None:
    rt = open_runtime()
    head, tail = words(37, 1), words(60, 2)
    for turn in range(3):
        explained = rt.explain([*head, 500 + turn, *tail])
        assert explained.hint is None
        answer = rt.generate([*head, 500 + turn, *tail], max_tokens=2)
        if turn:
            assert answer.reuse.cached_tokens == answer.reuse.diverged_at == explained.diverged_at == 37
    explained = rt.explain([*head, 600, *tail])
    assert (explained.matched_tokens, explained.cached_tokens, explained.diverged_at) == (37, 37, 37)
    assert explained.hint == "volatile_prefix"
    assert explained.prompt_text == rt.model.detokenize([*head[-8:], 600, *tail[:7]], special=True)
    assert explained.stored_text == rt.model.detokenize([*head[-8:], 502, *tail[:7]], special=True)

    chat = words(50, 3)
    think = rt.tokenize("<think>")
    for turn in range(3):
        rt.generate([*chat, *think, *words(30, 10 + turn), *tail], max_tokens=2)
        answer = rt.generate([*chat, *tail, turn], max_tokens=2)
        if turn == 0:
            assert answer.reuse.cached_tokens == answer.reuse.diverged_at == 50
    explained = rt.explain([*chat, *rt.tokenize("<think> again"), *tail])
    assert explained.hint == "volatile_prefix"


def test_three_conversations_over_one_system_prompt_are_no_volatile_prefix(open_runtime: Open) -> None:
    rt = open_runtime()
    for i in range(5):
        rt.generate([*words(50), *words(40, 10 + i)], max_tokens=1)
    explained = rt.explain([*words(50), *words(40, 99)])
    assert explained.diverged_at == 50
    assert explained.hint is None


def test_e1_empty_one_token_and_nothing_evaluated(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime({"min_tokens": 1})
    for empty in ("", [], np.zeros(0, np.int32)):
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            rt.generate(empty)
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            rt.explain(empty)
    assert rt.explain([5]).matched_tokens == 0
    answer = ask(rt, cold, [5], max_tokens=1)
    assert (answer.reuse.cached_tokens, answer.reuse.evaluated_tokens) == (0, 1)
    again = ask(rt, cold, [5], max_tokens=1)
    assert (again.reuse.cached_tokens, again.reuse.evaluated_tokens) == (0, 1)
    assert rt.stats()["tree"]["nodes"] == 1


def test_e2_two_bos_are_another_path_and_a_warning(open_runtime: Open, caplog: pytest.LogCaptureFixture) -> None:
    rt = open_runtime()
    bos = rt.model.bos
    rt.generate([bos, *words(40)], max_tokens=1)
    assert "two BOS" not in caplog.text
    with caplog.at_level(logging.WARNING, "skippy"):
        answer = rt.generate([bos, bos, *words(40)], max_tokens=1)
    assert "the prompt begins with two BOS tokens" in caplog.text
    assert answer.reuse.cached_tokens == 0


def test_e6_a_stream_closed_after_three_tokens_is_recorded(open_runtime: Open) -> None:
    rt = open_runtime()
    prompt = rt.tokenize(STORY)
    stream = rt.generate(prompt, max_tokens=50, stream=True)
    got: list[int] = []
    while len(got) < 3:
        got += next(stream).tokens
    stream.close()
    (node,) = rt.cache.tree.entries("resident")
    seq = rt.cache.tree.get(node, "resident")
    assert node.length == rt.context.sequences.seq_pos_max(seq) + 1
    stored = rt.cache.tree.tokens(node).tolist()
    # The last token that came was chosen, and not evaluated yet.
    assert stored == [*prompt, *got][:-1]
    assert rt.context.sequences.seq_pos_max(0) == -1  # the lane is empty again
    assert rt.generate([*prompt, *got, 5], max_tokens=1).reuse.cached_tokens == len(prompt) + len(got) - 1
    rt.check()


@pytest.mark.parametrize("outcome", [-1, -3, 2, RuntimeError("torn")])
def test_e10_decoding_fails_in_the_middle_of_a_prefill(open_runtime: Open, cold: ColdRuns, outcome: Any) -> None:
    rt = open_runtime(n_batch=32)
    prompt = words(100)
    sequences = rt.context.sequences
    calls = []

    class Torn:
        def __getattr__(self, name: str) -> Any:
            return getattr(sequences, name)

        def decode(self, seq: int, start: int, tokens: Any, outputs: Any) -> int:
            calls.append(len(tokens))
            if len(calls) < 3:
                return sequences.decode(seq, start, tokens, outputs)
            sequences.decode(seq, start, tokens[:7], outputs)  # part of the batch went in before it failed
            if isinstance(outcome, Exception):
                raise outcome
            return int(outcome)

    rt.context.sequences = Torn()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=f"torn|evaluating 32 tokens at 64 failed with {outcome}"):
        rt.generate(prompt, max_tokens=2)
    rt.context.sequences = sequences
    assert calls == [32, 32, 32]
    assert sequences.seq_pos_max(0) == -1
    rt.check()
    (node,) = rt.cache.tree.entries("resident")
    assert rt.cache.tree.tokens(node).tolist() == prompt[:64]
    assert ask(rt, cold, prompt, max_tokens=2).reuse.cached_tokens == 64


def test_no_slot_although_the_ledger_has_room_evicts_and_tries_again(open_runtime: Open) -> None:
    rt = open_runtime()
    rt.generate(words(50, 1), max_tokens=0)
    sequences = rt.context.sequences
    calls = []

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(sequences, name)

        def decode(self, *args: Any) -> int:
            calls.append(args)
            return 1 if len(calls) == 1 else sequences.decode(*args)

    rt.context.sequences = Full()  # type: ignore[assignment]
    rt.generate(words(50, 2), max_tokens=0)
    assert rt.stats()["evictions"] == {"resident:decode": 1}
    calls.clear()
    Full.decode = lambda self, *args: 1  # type: ignore[method-assign]
    with pytest.raises(skippy.ContextFull, match="no room for 50 tokens, and nothing can leave"):
        rt.generate(words(50, 3), max_tokens=0)
    rt.context.sequences = sequences
    rt.check()


def test_prompts_that_cannot_be(open_runtime: Open) -> None:
    rt = open_runtime(n_ctx=256)
    with pytest.raises(skippy.PromptTooLong, match="257 tokens, but the context holds 256"):
        rt.generate(words(257))
    with pytest.raises(ValueError, match="token 49152 at index 1 is not in the vocabulary"):
        rt.generate([1, 49152])
    with pytest.raises(ValueError, match="token -3 at index 0"):
        rt.generate([-3])
    with pytest.raises(TypeError, match="prompt is list, expected text or a sequence of token ids"):
        rt.generate([1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="max_tokens is -1"):
        rt.generate([1], max_tokens=-1)
    with pytest.raises(ValueError, match=r"temperature is -0\.1"):
        rt.generate([1], temperature=-0.1)
    with pytest.raises(ValueError, match=r"top_p is 1\.5"):
        rt.generate([1], top_p=1.5)
    with pytest.raises(ValueError, match="seed is -1"):
        rt.generate([1], seed=-1)
    with pytest.raises(ValueError, match="stop holds ''"):
        rt.generate([1], stop="")
    with pytest.raises(ValueError, match="grammar is not GBNF"):
        rt.generate([1], grammar="root ::= (((")
    with pytest.raises(TypeError, match="grammar is int"):
        rt.generate([1], grammar=5)
    with pytest.raises(ValueError, match="messages is empty"):
        rt.chat([])
    assert rt.stats()["tokens"]["prompt"] == 0


def test_an_answer_that_reaches_the_end_of_the_context(open_runtime: Open) -> None:
    rt = open_runtime(n_ctx=256)
    for limit in (None, 10_000):
        answer = rt.generate(words(240), max_tokens=limit, temperature=1.0, seed=3, grammar="root ::= [a-z ]{900,}")
        assert (answer.finish_reason, answer.reuse.reason) == ("length", "context_full")
        assert len(answer.tokens) == 17  # 16 cells, and one token more that was chosen and needs none
        rt.check()
    full = rt.generate(words(256, 1), max_tokens=1)
    assert (len(full.tokens), full.finish_reason) == (1, "length")


def test_max_tokens_and_nothing_to_say(open_runtime: Open) -> None:
    rt = open_runtime()
    none = rt.generate(STORY, max_tokens=0)
    assert (none.text, none.tokens, none.finish_reason) == ("", [], "length")
    three = rt.generate(STORY, max_tokens=3)
    assert (len(three.tokens), three.finish_reason) == (3, "length")
    assert three.reuse.cached_tokens == len(rt.tokenize(STORY)) - 1
    assert three.text == rt.detokenize(three.tokens)


def test_stop_texts_end_an_answer_across_token_borders(open_runtime: Open) -> None:
    rt = open_runtime()
    whole = rt.generate(STORY, max_tokens=24)
    assert len(whole.text) > 30
    for start in (5, 11, 17):
        stop = whole.text[start : start + 6]  # cuts through tokens
        answer = rt.generate(STORY, max_tokens=24, stop=[stop, "never said"])
        assert answer.finish_reason == "stop"
        assert answer.text == whole.text[: whole.text.index(stop)]
        chunks = list(rt.generate(STORY, max_tokens=24, stop=stop, stream=True))
        assert "".join(chunk.text for chunk in chunks) == answer.text
        assert [token for chunk in chunks for token in chunk.tokens] == answer.tokens
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_a_stream_gives_what_a_completion_gives(open_runtime: Open) -> None:
    rt = open_runtime()
    whole = rt.generate(STORY, max_tokens=12)
    chunks = list(rt.generate(STORY, max_tokens=12, stream=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert len(chunks) > 5
    last = chunks[-1]
    assert last.reuse is not None
    assert (last.finish_reason, last.reuse.cached_tokens) == ("length", len(rt.tokenize(STORY)) - 1)


def test_characters_that_come_in_pieces(open_runtime: Open) -> None:
    rt = open_runtime()
    grammar = 'root ::= "☃🙂é☃🙂é"'
    answer = rt.generate("Symbols:", max_tokens=40, grammar=grammar)
    assert answer.text == "☃🙂é☃🙂é"
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) > 6  # so characters did come in pieces
    chunks = [chunk.text for chunk in rt.generate("Symbols:", max_tokens=40, grammar=grammar, stream=True)]
    assert "".join(chunks) == answer.text
    assert not any("\ufffd" in chunk for chunk in chunks)
    cut = rt.generate("Symbols:", max_tokens=1, grammar=grammar)
    assert cut.text == "\ufffd"


def test_grammar_and_sampling(open_runtime: Open) -> None:
    from llama_cpp import LlamaGrammar

    rt = open_runtime()
    grammar = 'root ::= ("yes" | "no") "!"'
    for given in (grammar, LlamaGrammar.from_string(grammar)):
        answer = rt.generate("Is water wet? Answer:", max_tokens=10, grammar=given, temperature=1.5, seed=1)
        assert re.fullmatch("(yes|no)!", answer.text)
        assert answer.finish_reason == "stop"
    draws = [
        rt.generate(STORY, max_tokens=12, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=s).text
        for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    unseeded = {
        rt.generate(STORY, max_tokens=12, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0).text for _ in range(4)
    }
    assert len(unseeded) > 1


def test_chat_uses_the_models_template(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime()
    messages = [{"role": "system", "content": "You are brief. " * 6}, {"role": "user", "content": "Name a colour."}]
    text = rt.template.render(messages)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3
    prompt = rt.render(messages)
    assert rt.model.detokenize(prompt, special=True) == text
    answer = rt.chat(messages, max_tokens=8)
    assert_same_answer(cold, prompt, answer.tokens, 8)
    assert rt.chat(messages, max_tokens=8).reuse.cached_tokens == len(prompt) - 1
    with pytest.raises(ValueError, match=r"messages\[1\] is 'hello'"):
        rt.chat([messages[0], "hello"])  # type: ignore[list-item]


def test_forks_share_their_cells(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime()
    trunk = rt.session("You help in a garden. " * 20)
    trunk.send("When do I plant beans?", max_tokens=6)
    before = rt.stats()["cells"]["resident"]
    forks = [trunk.fork() for _ in range(3)]
    new = 0
    for i, fork in enumerate(forks):
        prompt = fork.prompt_for(f"And plant number {i}?")
        answer = fork.send(f"And plant number {i}?", max_tokens=4)
        assert answer.reuse.cached_tokens >= len(trunk.tokens) - 1
        assert_same_answer(cold, prompt, answer.tokens, 4)
        new += answer.reuse.evaluated_tokens + len(answer.tokens)
    assert rt.stats()["cells"]["resident"] <= before + new
    assert trunk.tokens != forks[0].tokens
    assert len(trunk.messages) == 3
    forks[0].close()
    with pytest.raises(ValueError, match="this session is closed"):
        forks[0].send("Hello?")


def test_a_session_in_a_stream_and_one_that_is_closed_early(open_runtime: Open) -> None:
    rt = open_runtime()
    session = rt.session("You are brief. " * 8)
    chunks = list(session.send("Count to five.", max_tokens=10, stream=True))
    assert session.messages[-1]["content"] == "".join(chunk.text for chunk in chunks)
    stream = session.send("Count on.", max_tokens=30, stream=True)
    next(stream)
    stream.close()
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[-1]["content"] != ""
    tokens = session.tokens
    assert session.prompt_for("Go on.")[: len(tokens)] == tokens
    before = list(session.messages)
    with pytest.raises(ValueError, match="temperature"):
        session.send("Bad.", temperature=-1)
    assert session.messages == before


def test_the_two_halves_of_a_conversation_held_in_a_system_prompt_once(open_runtime: Open) -> None:
    """Three conversations over one system prompt hold it once: in cells, and after eviction in saved bytes."""
    rt = open_runtime()
    system = words(300)
    for i in range(3):
        rt.generate([*system, *words(50, i + 1)], max_tokens=0)
    per_token = rt.capability.bytes_per_token
    assert per_token == 30 * 2 * 192 * 2 + 12
    assert rt.stats()["cells"]["resident"] == 300 + 3 * 50
    while rt.cache.space.evict_resident("test"):
        pass
    used = rt.stats()["ram"]["in_use"]
    assert 450 * per_token <= used <= 450 * per_token + 3 * 1000


def test_disabled_is_as_if_it_were_not_there(
    open_runtime: Open, cold: ColdRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPPY_MODE", "disabled")
    rt = open_runtime({"mode": "lookup-record"})
    assert rt.context.sequences.n_seq_max == 3  # no residents
    prompt = rt.tokenize(STORY)
    for _ in range(2):
        answer = ask(rt, cold, prompt)
        assert (answer.reuse.cached_tokens, answer.reuse.reason) == (0, "disabled")
        assert rt.explain(prompt).reason == "disabled"
    stats = rt.stats()
    assert (stats["tree"]["nodes"], stats["cells"]["in_use"], stats["ram"]["capacity"]) == (0, 0, 0)
    tiny = open_runtime({"min_tokens": 64}, n_ctx=32)
    assert tiny.generate([1, 2, 3], max_tokens=1).reuse.reason == "disabled"


def test_cache_prompt_false_neither_looks_up_nor_records(open_runtime: Open) -> None:
    rt = open_runtime()
    prompt = words(40)
    assert rt.generate(prompt, max_tokens=1, cache_prompt=False).reuse.reason == "disabled"
    assert rt.stats()["tree"]["nodes"] == 0
    rt.generate(prompt, max_tokens=1)
    assert rt.generate(prompt, max_tokens=1, cache_prompt=False).reuse.cached_tokens == 0
    assert rt.generate(prompt, max_tokens=1).reuse.cached_tokens == 39


def test_tenants_share_nothing(open_runtime: Open) -> None:
    rt = open_runtime()
    prompt = words(40)
    for namespace in ("", "a", "b"):
        assert rt.generate(prompt, max_tokens=1, namespace=namespace).reuse.reason == "never_seen"
    for namespace in ("", "a", "b"):
        assert rt.generate(prompt, max_tokens=1, namespace=namespace).reuse.cached_tokens == 39
    rt.clear(namespace="a")
    assert [rt.generate(prompt, max_tokens=1, namespace=n).reuse.cached_tokens for n in ("", "a", "b")] == [39, 0, 39]


def test_several_threads_get_their_own_answers(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime(lanes=2)
    prompts = [rt.tokenize(f"{STORY}. Number {i} of the clocks was called") for i in range(5)]
    answers: dict[int, list[int]] = {}

    def work(i: int) -> None:
        answers[i] = rt.generate(prompts[i], max_tokens=5).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rt.check()
    for i, prompt in enumerate(prompts):
        assert_same_answer(cold, prompt, answers[i], 5)


def test_streams_side_by_side_and_one_too_many(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime(lanes=2)
    prompts = [words(40, 1), words(40, 2), words(40, 3)]
    streams = [rt.generate(prompt, max_tokens=12, stream=True) for prompt in prompts]
    heads = [next(streams[0]), next(streams[1])]
    with pytest.raises(skippy.LanesBusy, match="all 2 lanes are held by streams that nobody else can end"):
        next(streams[2])
    for i in range(2):
        tokens = heads[i].tokens + [token for chunk in streams[i] for token in chunk.tokens]
        assert_same_answer(cold, prompts[i], tokens, 12)
    rt.check()
    assert len(list(rt.generate(prompts[2], max_tokens=2, stream=True))) > 0


def test_a_closed_runtime_says_so(open_runtime: Open) -> None:
    rt = open_runtime()
    stream = rt.generate(words(40), max_tokens=9, stream=True)
    next(stream)
    rt.close()
    rt.close()
    for call in (lambda: rt.generate([1]), lambda: rt.stats(), lambda: next(stream)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_models_that_cannot_be_loaded(tmp_path: Path, smol_path: Path) -> None:
    with pytest.raises(skippy.ModelError, match=r"there is no file '.*nothing[.]gguf', expected a GGUF model"):
        skippy.Runtime(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_text("this is no model")
    with pytest.raises(skippy.ModelError, match=r"could not load '.*text[.]gguf'"):
        skippy.Runtime(tmp_path / "text.gguf")
    for settings, message in (
        ({"type_k": "q9"}, "cache_type_k"),
        ({"flash_attn": "maybe"}, "flash_attn"),
        ({"n_ctx": 0}, "ctx_size"),
        ({"lanes": 0}, "lanes is 0"),
        ({"lanes": 300}, "lane_count"),
        ({"n_batch": 0}, "n_batch"),
        ({"n_batch": 4}, "5 sequence ids need n_batch and n_ctx of at least that, not 4"),
        ({"type_v": "q8_0", "flash_attn": "off"}, "quantised V needs flash attention"),
    ):
        with pytest.raises(ValueError, match=message):
            skippy.Runtime(smol_path, **settings)


@pytest.mark.parametrize(
    ("settings", "flash"),
    [
        ({}, True),
        ({"flash_attn": "on"}, True),
        ({"flash_attn": "off"}, False),
        ({"type_k": "q8_0", "type_v": "q8_0"}, True),
    ],
)
def test_what_was_decided_is_read_back_and_part_of_the_namespace(
    open_runtime: Open, settings: dict[str, str], flash: bool
) -> None:
    rt = open_runtime(**settings)
    assert rt.stats()["model"]["flash_attn"] is flash
    assert rt.stage.flash_attn_type == ("on" if flash else "off")
    assert rt.capability.unable is None
    prompt = words(64)
    rt.generate(prompt, max_tokens=1)
    rt.cache.space.evict_resident("test")
    assert rt.generate([*prompt, 5], max_tokens=1).reuse.by_tier["ram"] == 64


EVENTS = {
    "lookup": {"prompt_tokens", "cached_tokens", "reason"},
    "miss": {"prompt_tokens", "reason"},
    "restore": {"tier", "tokens", "bytes"},
    "save": {"tier", "tokens", "bytes"},
    "evict": {"tier", "reason", "tokens"},
}


def test_the_page_of_events_is_of_these() -> None:
    page = (Path(__file__).parent.parent / "docs" / "stats.md").read_text().partition("## Events")[2]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row[3]))) for row in rows} == EVENTS


@pytest.mark.parametrize(("mode", "options"), [("disabled", {}), ("record", {}), ("lookup", {"cache_prompt": False})])
def test_nothing_is_missed_where_nothing_was_to_be_reused(open_runtime: Open, mode: str, options: Any) -> None:
    seen: list[str] = []
    rt = open_runtime({"mode": mode}, on_event=lambda name, details: seen.append(name))
    rt.generate(words(20), max_tokens=1, **options)
    assert seen == ["lookup"]


def test_events_and_counters(open_runtime: Open) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    rt = open_runtime(on_event=lambda name, details: seen.append((name, details)))
    prompt = words(64)
    rt.generate(prompt, max_tokens=1)
    rt.cache.space.evict_resident("test")
    rt.generate([*prompt, 5], max_tokens=1)
    assert [name for name, _ in seen] == ["lookup", "miss", "save", "evict", "restore", "lookup"]
    assert seen[1][1] == {"prompt_tokens": 64, "reason": "never_seen"}
    nbytes = 64 * (23040 + 12)
    assert seen[2][1]["tokens"] == seen[4][1]["tokens"] == seen[3][1]["tokens"] == 64
    assert nbytes <= seen[2][1]["bytes"] == seen[4][1]["bytes"]
    assert {details.get("tier") for _, details in seen[2:5]} == {"ram", "resident"}
    assert seen[-1][1] == {"prompt_tokens": 65, "cached_tokens": 64, "reason": "hit"}
    stats = rt.stats()
    assert stats["tokens"] == {
        "prompt": 129, "cached": 64, "evaluated": 65, "lost": 0,
        "cached_resident": 0, "cached_ram": 64, "cached_disk": 0,
    }  # fmt: skip
    assert stats["requests"] == {"never_seen": 1, "hit": 1}
    assert {name: set(details) for name, details in seen} == EVENTS
    assert stats["prefill_tokens_per_second"] > 0
    assert stats["restore_bytes_per_second"] > 0


def test_the_log_of_llama_cpp_is_quiet_unless_asked_for(
    smol_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from skippy.model import Model

    Model(smol_path, vocab_only=True).close()
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name == "skippy.llama"]
    with caplog.at_level(logging.DEBUG, "skippy.llama"):
        Model(smol_path, vocab_only=True).close()
    assert any("llama_model_loader" in record.message for record in caplog.records if record.name == "skippy.llama")
    assert capfd.readouterr() == ("", "")


def test_saving_that_fails_when_a_resident_leaves_does_not_fail_the_request(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime({"max_entries": 1})
    ask(rt, cold, words(40, 1))

    def broken(*_: Any, **__: Any) -> int:
        raise skippy.StateError("made to fail")

    with failing(rt.cache.pool, save=broken):
        ask(rt, cold, words(40, 2))
    assert rt.stats()["failures"] == {"save": 1}
    assert rt.generate(words(40, 1), max_tokens=1).reuse.cached_tokens == 0
    rt.check()


def test_the_callers_buffer_may_be_used_again_while_a_stream_is_open(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime()
    witness = watch(rt)
    first, second = words(48, 1), words(48, 2)
    buffer = np.array(first, np.int32)
    stream = rt.generate(buffer, max_tokens=9, stream=True)
    next(stream)
    buffer[:] = second
    stream.close()
    assert ask(rt, cold, second, max_tokens=2).reuse.cached_tokens == 0
    assert ask(rt, cold, first, max_tokens=2).reuse.cached_tokens == 47
    assert witness.wrong == 0


def test_a_request_runs_once(open_runtime: Open) -> None:
    rt = open_runtime()
    request = rt.request(words(20), max_tokens=2)
    assert len(request.complete().tokens) == 2
    for again in (request.run, request.complete):
        with pytest.raises(RuntimeError, match="this request has been run"):
            again()
    sampler = Sampler(rt.model)
    sampler.close()
    sampler.close()
    with pytest.raises(ValueError, match="this sampler is closed"):
        sampler.sample(rt.context)


def test_a_grammar_that_comes_to_a_dead_end_ends_the_answer(
    open_runtime: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is allowed any more, not even an end token, llama.cpp would end the process."""
    rt = open_runtime()
    answer = rt.generate("Say yes:", max_tokens=10, grammar='root ::= "yes"')
    assert (answer.text, answer.finish_reason) == ("yes", "stop")
    monkeypatch.setattr(rt.context, "logits", lambda index=-1: np.full(rt.model.n_vocab, -np.inf, np.float32))
    answer = rt.generate("Say yes:", max_tokens=10, grammar='root ::= "yes"')
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", [], "stop")
    rt.check()


def test_closing_wakes_those_who_wait_for_a_lane(open_runtime: Open) -> None:
    rt = open_runtime(lanes=1)
    stream = rt.generate(words(20, 1), max_tokens=50, stream=True)
    next(stream)
    errors: list[str] = []

    def wait() -> None:
        try:
            rt.generate(words(20, 2), max_tokens=1)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not rt.engine.waiting:
        thread.join(0.01)
    rt.close()
    thread.join(30)
    assert errors == ["this Runtime is closed"]
    stream.close()


def test_two_threads_that_wait_for_each_others_lanes_get_an_error(open_runtime: Open) -> None:
    rt = open_runtime(lanes=2)
    errors: list[str] = []
    ready = threading.Barrier(2)

    def hold_one_and_want_another(seed: int) -> None:
        stream = rt.generate(words(20, seed), max_tokens=50, stream=True)
        next(stream)
        ready.wait(30)
        try:
            rt.generate(words(20, seed + 10), max_tokens=1)
        except skippy.LanesBusy as error:
            errors.append(str(error))
        stream.close()

    threads = [threading.Thread(target=hold_one_and_want_another, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == 1  # one gave up, and the other got its lane
    assert rt.generate(words(20, 5), max_tokens=1).finish_reason == "length"


def test_a_stream_that_the_garbage_collector_closes_in_the_middle_of_a_step(open_runtime: Open) -> None:
    """An abandoned stream in a reference cycle is closed by whoever collects, here within another request's restore."""
    import gc

    seen: list[str] = []

    def collect(name: str, details: dict[str, Any]) -> None:
        seen.append(name)
        gc.collect()

    rt = open_runtime(on_event=collect, lanes=2)
    prompt = words(40, 1)
    rt.generate(prompt, max_tokens=0)
    rt.cache.space.evict_resident("test")
    gc.disable()
    try:
        cycle: list[Any] = [rt.generate([*words(30, 2)], max_tokens=50, stream=True)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        assert rt.generate([*prompt, 5], max_tokens=2).reuse.cached_tokens == 40
    finally:
        gc.enable()
    assert "restore" in seen
    rt.check()
    assert not rt.engine.running
    assert rt.generate([*words(30, 2), 7], max_tokens=1).reuse.cached_tokens == 30  # what the stream had evaluated


def test_a_callback_may_not_use_the_runtime_that_called_it(
    open_runtime: Open, caplog: pytest.LogCaptureFixture
) -> None:
    def use(name: str, details: dict[str, Any]) -> None:
        rt.stats()

    rt = open_runtime(on_event=use)
    assert rt.generate(words(20), max_tokens=1).finish_reason == "length"
    assert "being used from within one of its own calls" in caplog.text


def test_a_request_that_is_stopped_between_tokens_ends_with_what_it_has(open_runtime: Open) -> None:
    rt = open_runtime()
    prompt = words(40)
    whole = rt.generate(prompt, max_tokens=8)
    said: list[str] = []
    request = rt.request(prompt, max_tokens=8, should_stop=lambda: len(said) >= 3)
    chunks = []
    for chunk in request.run():
        chunks.append(chunk)
        said.append(chunk.text)
    assert chunks[-1].finish_reason == request.finish_reason == "stopped"
    assert chunks[-1].reuse is request.report
    assert request.generated == whole.tokens[: len(request.generated)]
    assert 3 <= len(request.generated) < 8
    assert "".join(chunk.text for chunk in chunks) == request.text == rt.detokenize(request.generated)
    assert request.report.ttft_ms > 0
    never = rt.generate(prompt, max_tokens=8, should_stop=lambda: False)
    assert (never.tokens, never.finish_reason) == (whole.tokens, "length")


def test_a_prompt_that_is_stopped_in_the_middle_of_a_batch(open_runtime: Open, cold: ColdRuns) -> None:
    rt = open_runtime(n_batch=128, n_ubatch=128)
    prompt = words(384, 3)
    asked = [0]

    def until(limit: float) -> Callable[[], bool]:
        asked[0] = 0

        def should_stop() -> bool:
            asked[0] += 1
            return asked[0] >= limit

        return should_stop

    rt.generate(prompt, max_tokens=0, cache_prompt=False, should_stop=until(math.inf))
    per_batch = asked[0] // 3
    assert per_batch > 30  # llama.cpp asks between its operations
    stopped = rt.generate(prompt, max_tokens=4, should_stop=until(per_batch * 1.5))
    assert (stopped.text, stopped.tokens, stopped.finish_reason) == ("", [], "stopped")
    assert stopped.reuse.ttft_ms == 0
    assert asked[0] == int(per_batch * 1.5 + 0.5)  # it was not asked again, and the rest of the batch not evaluated
    assert [rt.context.sequences.seq_pos_max(lane) for lane in (0, 1)] == [-1, -1]
    rt.check()
    again = rt.generate(prompt, max_tokens=4)
    assert (again.finish_reason, again.reuse.cached_tokens) == ("length", 128)  # the whole batch is kept
    assert_same_answer(cold, prompt, again.tokens, 4)
    at_once = rt.generate(words(60, 4), max_tokens=4, should_stop=lambda: True)
    assert (at_once.finish_reason, at_once.reuse.evaluated_tokens) == ("stopped", 60)
    assert rt.generate(words(60, 4), max_tokens=1).reuse.cached_tokens == 0
    chunks = list(rt.generate(prompt, max_tokens=0, stream=True, should_stop=lambda: True))
    assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("", "stopped")]


@pytest.mark.parametrize("at", [1, 40, 400])
def test_what_should_stop_raises_ends_the_request(open_runtime: Open, at: int) -> None:
    rt = open_runtime(n_batch=64, n_ubatch=64)
    asked = iter(range(1, 10**6))

    def should_stop() -> bool:
        if next(asked) == at:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        rt.generate(words(200), max_tokens=4, should_stop=should_stop)
    rt.check()
    assert not rt.engine.running
    assert rt.generate(words(200), max_tokens=1).reuse.cached_tokens % 64 == 0


def test_the_session_has_the_report_of_its_last_answer(open_runtime: Open) -> None:
    rt = open_runtime()
    session = rt.session("You are brief. " * 8)
    assert session.reuse is None
    answer = session.send("One.", max_tokens=3)
    assert session.reuse is answer.reuse
    stream = session.send("Two.", max_tokens=6, stream=True)
    assert session.reuse is answer.reuse  # it has not begun
    next(stream)
    assert session.reuse is not answer.reuse
    assert session.reuse.cached_tokens > 20
    stream.close()
    before = (session.reuse, list(session.messages), list(session.tokens))
    assert session.fork().reuse is None
    stopped = session.send("Three.", max_tokens=6, should_stop=lambda: True)
    assert (stopped.finish_reason, stopped.text) == ("stopped", "")
    assert (session.reuse, session.messages, session.tokens) == before
    with pytest.raises(skippy.PromptTooLong):
        session.send("sea " * 3000)
    assert session.reuse is before[0]


def test_a_session_answers_one_message_at_a_time(open_runtime: Open) -> None:
    rt = open_runtime()
    session = rt.session("You are brief. " * 8)
    stream = session.send("One.", max_tokens=6, stream=True)
    next(stream)
    with pytest.raises(RuntimeError, match="an answer of this session is still being made"):
        session.send("Two.", max_tokens=2)
    stream.close()
    late = session.send("Three.", max_tokens=2, stream=True)
    session.send("Four.", max_tokens=2)
    with pytest.raises(RuntimeError, match="this session has gone on since the stream was asked for"):
        next(late)
    assert [message["content"] for message in session.messages if message["role"] == "user"] == ["One.", "Four."]
