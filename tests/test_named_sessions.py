"""Sessions with a name: they go on after a restart, as they were, and evaluate only what is new."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import skippy
from skippy import cli
from skippy.commands.chat import Chat
from skippy.session import Session, read_session
from skippy.store import DiskTier
from tests.conftest import THREADS

SYSTEM = "You keep a lighthouse on a small island in the north. You answer every question in one short sentence. " * 3
Open = Callable[..., skippy.Runtime]


@pytest.fixture
def restart(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Open]:
    """Opens a runtime on a tiny model with the same folder each time, after closing the one before."""
    opened: list[skippy.Runtime] = []

    def open_(name: str = "llama", disk: Path | None = tmp_path / "kv", **settings: Any) -> skippy.Runtime:
        for runtime in opened:
            runtime.close()
        cache = {"min_tokens": 16, "ram": "64MiB", "disk_min_free": 0, **settings.pop("cache", {})}
        config = skippy.CacheConfig(disk=disk, **cache)
        settings = {"n_ctx": 1024, "n_threads": 1, "lanes": 1, **settings}
        opened.append(skippy.Runtime(tiny(name), cache=config, **settings))
        return opened[-1]

    yield open_
    for runtime in opened:
        runtime.close()


def as_it_is(session: Session) -> tuple[list[dict[str, Any]], list[int], list[int]]:
    return session.messages, session.tokens, session.ends


@pytest.mark.parametrize("model", ["llama", "gemma3", "mamba", "falconh1"])
def test_a_session_goes_on_after_a_restart_and_evaluates_only_what_is_new(restart: Open, model: str) -> None:
    session = restart(model).session(SYSTEM, name="tax")
    for text in ("Who are you?", "Are you alone?"):
        session.send(text, max_tokens=8)
    before = as_it_is(session)
    again = restart(model).session(SYSTEM, name="tax")
    assert again is not session
    assert as_it_is(again) == before
    assert again.reuse is None
    prompt = again.prompt_for("Is it cold?")
    answer = again.send("Is it cold?", max_tokens=8)
    # All that was evaluated is there: the last token of an answer is said, but never evaluated.
    assert answer.reuse.by_tier["disk"] == answer.reuse.cached_tokens == len(before[1]) - 1
    assert answer.reuse.evaluated_tokens == len(prompt) - len(before[1]) + 1
    third = restart(model).session(name="tax")
    assert [message["role"] for message in third.messages] == ["system", *["user", "assistant"] * 3]
    assert third.tokens == [*prompt, *answer.tokens]


def test_it_is_written_after_every_answer_without_closing_anything(restart: Open) -> None:
    runtime = restart()
    session = runtime.session(SYSTEM, name="tax")
    assert runtime.cache.disk is not None
    assert runtime.cache.disk.sessions() == []  # nothing was said
    for number in range(1, 4):
        answer = session.send("More.", max_tokens=4, stream=number == 2)
        if number == 2:
            next(answer)
            answer.close()  # what was said until then counts
        other = runtime.session(name="tax")
        assert as_it_is(other) == as_it_is(session)
        assert len(other.messages) == 1 + 2 * number
    before = runtime.cache.disk.sessions()
    session.save()
    assert runtime.cache.disk.sessions() == before  # nothing was new
    runtime.forget()
    session.close()
    assert runtime.cache.disk.sessions() == []  # what was forgotten does not come back
    runtime.close()
    session.close()
    other.close()


@pytest.mark.parametrize("model", ["llama", "gemma3", "mamba", "falconh1"])
def test_what_is_closed_is_on_disk_even_if_the_runtime_never_is(restart: Open, tmp_path: Path, model: str) -> None:
    runtime = restart(model)
    session = runtime.session(SYSTEM, name="tax")
    session.send("Who are you?", max_tokens=8)
    session.close()
    session.close()
    assert runtime.cache.disk is not None
    runtime.cache.disk.flush()
    other = DiskTier(tmp_path / "kv", capacity=2**30, write=False)
    found = other.find(runtime.namespace_hash(""), np.array(session.tokens, np.int32))
    assert found.reach == len(session.tokens) - 1
    other.close()
    runtime.check()


def test_a_session_can_get_a_name_later_and_a_fork_has_none(restart: Open) -> None:
    runtime = restart()
    session = runtime.session(SYSTEM)
    session.send("Who are you?", max_tokens=4)
    assert session.name is None
    session.save()
    session.save("tax")
    fork = session.fork()
    assert fork.name is None
    fork.send("And now?", max_tokens=4)
    assert as_it_is(runtime.session(name="tax")) == as_it_is(session)
    fork.save("fork")
    assert as_it_is(runtime.session(name="fork")) == as_it_is(fork)
    assert as_it_is(fork.before(1)) == as_it_is(session)
    assert as_it_is(fork.before(0)) == ([{"role": "system", "content": SYSTEM}], [], [])
    with pytest.raises(ValueError, match="no answer 2"):
        fork.before(2)


def test_names_are_apart_by_tenant_and_model(restart: Open, caplog: pytest.LogCaptureFixture) -> None:
    runtime = restart()
    for tenant in ("", "alice"):
        runtime.session(SYSTEM, name="tax", namespace=tenant).send(f"I am {tenant}.", max_tokens=4)
    assert runtime.session(name="tax", namespace="alice").messages[1]["content"] == "I am alice."
    assert runtime.session(name="tax").messages[1]["content"] == "I am ."
    assert runtime.session(name="other").messages == []
    caplog.clear()
    with caplog.at_level(logging.WARNING, "skippy"):
        assert runtime.session(name="tax", namespace="bob").messages == []
        assert caplog.messages == []
        assert restart(n_ctx=512).session(name="tax").messages == []
    assert caplog.messages == [
        "a session 'tax' is kept for other settings or another model (llama.gguf); with these it begins anew"
    ]
    runtime = restart()
    runtime.forget(namespace="alice")
    assert runtime.session(name="tax", namespace="alice").messages == []
    assert len(runtime.session(name="tax").messages) == 3


def test_another_system_prompt_is_an_error_that_names_both(restart: Open) -> None:
    runtime = restart()
    runtime.session("Be brief.", name="tax").send("Hello.", max_tokens=2)
    assert runtime.session("Be brief.", name="tax").messages[0]["content"] == "Be brief."
    with pytest.raises(skippy.ConfigError, match=r"'tax' is kept with the system prompt 'Be brief\.', not 'Be long\.'"):
        runtime.session("Be long.", name="tax")
    runtime.session(name="plain").send("Hello.", max_tokens=2)
    with pytest.raises(ValueError, match="'plain' is kept with the system prompt None, not 'Be brief"):
        runtime.session("Be brief.", name="plain")
    runtime.session("sea " * 50 + "one", name="long").send("Hello.", max_tokens=2)
    with pytest.raises(ValueError, match=r"prompt '\.\.\.[sea ]{20}one', not '\.\.\.[sea ]{20}two'"):
        runtime.session("sea " * 50 + "two", name="long")


def test_without_a_disk_tier_it_says_how_to_get_one(restart: Open, tmp_path: Path) -> None:
    runtime = restart(disk=None)
    with pytest.raises(ValueError, match=r"CacheConfig\(disk=FOLDER\), SKIPPY_DISK, or disk in skippy.toml"):
        runtime.session(name="tax")
    session = runtime.session()
    with pytest.raises(skippy.ConfigError, match="session\\(name='tax'\\) is kept in the disk tier"):
        session.save("tax")
    assert session.name is None
    with pytest.raises(ValueError, match="mode is 'disabled'"):
        restart(cache={"mode": "disabled"}).session(name="tax")
    for name in ("", " tax", "a\nb", "x" * 201, 7):
        with pytest.raises(skippy.ConfigError, match="expected 1 to 200 printable characters"):
            restart().session(name=name)


def test_where_nothing_can_be_written_it_says_so_and_goes_on(
    restart: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restart().session(SYSTEM, name="tax").send("Hello.", max_tokens=4)
    runtime = restart(cache={"mode": "lookup"})
    with caplog.at_level(logging.WARNING, "skippy"):
        session = runtime.session(name="tax")
    assert caplog.messages == ["the session 'tax' will not be kept: the disk tier is only read"]
    assert len(session.messages) == 3
    session.send("And now?", max_tokens=4)
    assert len(restart().session(name="tax").messages) == 3
    (tmp_path / "file").write_text("")
    runtime = restart(disk=tmp_path / "file")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "skippy"):
        session = runtime.session(SYSTEM, name="tax")
    assert caplog.messages[-1].startswith("the session 'tax' will not be kept: the folder ")
    assert session.send("Hello.", max_tokens=4).tokens


GOOD = {
    "label": {},
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "ends": [3],
}


@pytest.mark.parametrize(
    ("text", "tokens", "why"),
    [
        ("", [1, 2, 3], "Expecting value"),
        ("[" * 100_000, [1, 2, 3], ""),
        ("[]", [1, 2, 3], "no messages"),
        ({**GOOD, "messages": []}, [1, 2, 3], "no messages"),
        ({**GOOD, "messages": ["a"]}, [1, 2, 3], "no object with a role"),
        ({**GOOD, "messages": [{"role": 3}]}, [1, 2, 3], "no object with a role"),
        (GOOD, [], "take 0 bytes"),
        (GOOD, b"\0\0\0\0\0", "take 5 bytes"),
        (GOOD, [1, 2, 384], "not in the vocabulary of 384"),
        (GOOD, [1, -2, 3], "not in the vocabulary of 384"),
        (GOOD, [1, 2], "not those of its tokens"),
        ({**GOOD, "ends": None}, [1, 2, 3], "ends of its answers are missing"),
        ({**GOOD, "ends": [True, 3]}, [1, 2, 3], "ends of its answers are missing"),
        ({**GOOD, "ends": [3, 3]}, [1, 2, 3], "not those of its tokens"),
        ({**GOOD, "ends": [0, 3]}, [1, 2, 3], "not those of its tokens"),
    ],
)  # fmt: skip
def test_what_is_damaged_begins_anew_with_a_warning(
    restart: Open, caplog: pytest.LogCaptureFixture, text: Any, tokens: Any, why: str
) -> None:
    runtime = restart()
    data = tokens if isinstance(tokens, bytes) else np.array(tokens, "<i4").tobytes()
    text = text if isinstance(text, str) else json.dumps(text)
    assert runtime.cache.disk is not None
    runtime.cache.disk.save_session("tax", runtime.namespace_hash(""), text, data)
    with caplog.at_level(logging.WARNING, "skippy"):
        session = runtime.session("Be brief.", name="tax")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("what is kept of the session 'tax' is damaged, so it begins anew: ")
    assert why in caplog.messages[0]
    assert as_it_is(session) == ([{"role": "system", "content": "Be brief."}], [], [])
    session.send("Hello.", max_tokens=2)
    assert as_it_is(runtime.session(name="tax")) == as_it_is(session)


def test_what_is_whole_is_read_as_it_is() -> None:
    read = read_session(json.dumps(GOOD), np.array([1, 2, 383], "<i4").tobytes(), n_vocab=384)
    assert read == (GOOD["messages"], [1, 2, 383], [3])


def test_columns_of_another_kind_are_damage(restart: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = restart()
    runtime.session(SYSTEM, name="tax").send("Hello.", max_tokens=4)
    database = sqlite3.connect(tmp_path / "kv/index.sqlite")
    database.execute("UPDATE sessions SET tokens = 'text'")
    database.commit()
    database.close()
    with caplog.at_level(logging.WARNING, "skippy"):
        assert runtime.session(name="tax").messages == []
    assert "is damaged, so it begins anew" in caplog.text


def test_messages_that_are_no_json_cost_the_keeping_alone(restart: Open, caplog: pytest.LogCaptureFixture) -> None:
    session = restart().session(name="tax")
    session.messages.append({"role": "user", "content": b"bytes"})
    session.tokens = [5, 6]
    with caplog.at_level(logging.WARNING, "skippy"):
        session.close()
    assert "the session 'tax' is not kept: its messages are no JSON" in caplog.text


def test_the_example_in_the_docs_goes_on_when_it_is_run_again(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parent.parent / "docs/disk.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").symlink_to(tiny("llama"))
    found: list[dict[str, Any]] = [{}, {}]
    for names in found:
        exec(compile(code, "docs/disk.md", "exec"), names)
    first, second = (names["session"] for names in found)
    assert len(second.messages) == len(first.messages) + 2
    assert first.reuse.by_tier["disk"] == 0
    assert second.reuse.by_tier["disk"] == len(first.tokens) - 1
    assert len(capsys.readouterr().out) > 0
    assert Path("states").stat().st_mode & 0o777 == 0o700


# -- the chat -------------------------------------------------------------------------------------------


def said(chat: Chat, text: str) -> str:
    return "".join(chunk.text for chunk in chat.say(text))


def test_a_chat_that_goes_on_can_go_back_too(restart: Open) -> None:
    chat = Chat(restart(), system=SYSTEM, session="tax", max_tokens=4)
    assert chat.name == "tax"
    first, second = said(chat, "One?"), said(chat, "Two?")
    chat.fork("storm")
    said(chat, "Only here?")
    before = as_it_is(chat.branches["tax"].session)

    chat = Chat(restart(), session="tax", max_tokens=4)
    assert list(chat.branches) == ["tax"]  # forks are not kept
    assert as_it_is(chat.branch.session) == before
    assert chat.branch.user_texts == ["One?", "Two?"]
    assert [len(session.tokens) for session in chat.branch.before] == [0, before[2][0]]
    assert "".join(chunk.text for chunk in chat.regenerate()) == second
    assert chat.reuse is not None
    assert chat.reuse.evaluated_tokens <= 1
    third = "".join(chunk.text for chunk in chat.edit(2, "Three?"))

    chat = Chat(restart(), session="tax", max_tokens=4)
    assert [message["content"] for message in chat.messages] == [SYSTEM, "One?", first, "Three?", third]


def test_a_chat_whose_messages_a_program_changed_can_be_gone_on_with(restart: Open) -> None:
    session = restart().session(SYSTEM, name="tax")
    session.messages += [{"role": "user", "content": "Like?"}, {"role": "assistant", "content": "This."}]
    session.send("One?", max_tokens=4)
    chat = Chat(restart(), session="tax", max_tokens=4)
    assert chat.branch.user_texts == ["One?"]
    session = restart().session(name="tax")
    session.messages.append({"role": "note", "content": "x"})
    session.close()
    chat = Chat(restart(), session="tax", max_tokens=4)
    assert chat.branch.user_texts == []
    said(chat, "Two?")
    assert chat.branch.user_texts == ["Two?"]


def chat_command(tmp_path: Path, lines: str, *more: str) -> Any:
    options = [
        "chat",
        "--json",
        "--max-tokens",
        "8",
        "--threads",
        str(THREADS),
        "--temperature",
        "0",
        "--n-ctx",
        "1024",
    ]
    options += ["--disk", str(tmp_path / "kv"), "--session", "tax", *more]
    return CliRunner().invoke(cli.app, options, input=lines, env={"NO_COLOR": "1"})


def test_the_chat_of_yesterday_goes_on(tmp_path: Path) -> None:
    result = chat_command(tmp_path, "Who are you?\nAre you alone?\n", "--system", SYSTEM)
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    evaluated = second["reuse"]["prompt_tokens"] + 7  # of the answer's eight tokens the last one is not
    result = chat_command(tmp_path, "/history\nIs it cold?\n/reuse\n/list\n")
    assert result.exit_code == 0, result.output
    history, answer, reuse, conversations = map(json.loads, result.stdout.splitlines())
    assert [message["content"] for message in history] == [
        SYSTEM, "Who are you?", first["text"], "Are you alone?", second["text"],
    ]  # fmt: skip
    assert reuse == answer["reuse"]
    assert reuse["cached_tokens"] == reuse["by_tier"]["disk"] == evaluated
    assert reuse["evaluated_tokens"] == reuse["prompt_tokens"] - evaluated < 24
    assert conversations[0]["name"] == "tax"
    assert conversations[0]["messages"] == 3


def test_two_processes_and_the_command_as_it_is_installed(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {**os.environ, "SKIPPY_DISK": str(tmp_path / "kv"), "SKIPPY_DISK_MIN_FREE": "0", "NO_COLOR": "1"}
    options = ["chat", str(tiny("llama")), "--json", "--max-tokens", "8", "--threads", "1", "--temperature", "0"]

    def run(lines: str, *more: str) -> list[Any]:
        command = [sys.executable, "-c", "from skippy.cli import main; main()", *options, "--session", "tax", *more]
        done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    first = run("Who are you?\n", "--system", SYSTEM)[0]
    (history, second) = run("/history\nIs it cold?\n")
    assert [message["content"] for message in history] == [SYSTEM, "Who are you?", first["text"]]
    assert second["reuse"]["by_tier"]["disk"] == second["reuse"]["cached_tokens"] == first["reuse"]["prompt_tokens"] + 7


def test_the_chat_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPPY_DISK", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(skippy.SkippyError, match=r"--session needs a folder .* SKIPPY_DISK=FOLDER"):
        cli.app(["chat", "--session", "tax"], standalone_mode=False)


def test_writing_that_takes_long_is_shown(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskTier.close

    def slow(tier: DiskTier) -> None:
        time.sleep(1.3)
        real(tier)

    options = ["chat", str(tiny("llama")), "--threads", "1", "--max-tokens", "4", "--disk", str(tmp_path / "kv")]
    quick = CliRunner().invoke(cli.app, options, input="Hello.\n", env={"NO_COLOR": "1"})
    monkeypatch.setattr(DiskTier, "close", slow)
    result = CliRunner().invoke(cli.app, options, input="Hello.\n", env={"NO_COLOR": "1"})
    assert (quick.exit_code, result.exit_code) == (0, 0), result.output
    assert quick.stderr == ""
    assert result.stderr == "writing the conversation to disk; Ctrl-C leaves out what is not written yet\n"
