"""The chat: what each thing that can be done in it evaluates, keeps and drops; and one session on a real terminal."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import skippy
from skippy import cli
from skippy.commands.chat import Chat, ChatError
from skippy.commands.terminal import Terminal, reuse_table
from skippy.request import Chunk
from tests.conftest import THREADS

Open = Callable[..., skippy.Runtime]

SYSTEM = "You keep a lighthouse on a small island in the north. You answer every question in one short sentence."


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def chat(open_runtime: Open) -> Chat:
    return Chat(open_runtime(), system=SYSTEM, max_tokens=6)


def text_of(chunks: Iterator[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.messages]


def report(chat: Chat) -> skippy.ReuseReport:
    assert chat.reuse is not None
    assert chat.reuse.cached_tokens + chat.reuse.evaluated_tokens == chat.reuse.prompt_tokens
    return chat.reuse


def test_an_answer_again_evaluates_one_token(chat: Chat) -> None:
    first = text_of(chat.say("Who are you?"))
    second = text_of(chat.say("Are you alone?"))
    before = list(chat.branch.session.tokens)
    assert text_of(chat.regenerate()) == second
    assert report(chat).evaluated_tokens == 1
    assert contents(chat) == [SYSTEM, "Who are you?", first, "Are you alone?", second]
    assert chat.branch.session.tokens == before
    assert [len(session.messages) for session in chat.branch.before] == [1, 3]


def test_an_edit_goes_back_to_before_the_message(chat: Chat) -> None:
    first = text_of(chat.say("Who are you?"))
    text_of(chat.say("Are you alone?"))
    text_of(chat.say("Do you sleep?"))
    old = list(chat.branch.session.tokens)
    answer = text_of(chat.edit(2, "Are you happy?"))
    assert contents(chat) == [SYSTEM, "Who are you?", first, "Are you happy?", answer]
    prompt = chat.branch.session.tokens[: report(chat).prompt_tokens]
    assert report(chat).cached_tokens == report(chat).diverged_at == common(prompt, old)
    # What the first answer left behind, and "<|im_start|>user\nAre you" of the second message, is not evaluated again.
    assert len(chat.branch.before[1].tokens) < common(prompt, old) < len(prompt)
    text_of(chat.edit(1, "Who are you?"))  # the same text: the whole prompt is there
    assert report(chat).evaluated_tokens == 1
    assert contents(chat) == [SYSTEM, "Who are you?", first]


@pytest.mark.parametrize("number", [0, 2, -1])
def test_only_messages_that_are_there_can_be_rewritten(chat: Chat, number: int) -> None:
    with pytest.raises(ChatError, match="there is no answer yet"):
        chat.regenerate()
    text_of(chat.say("Who are you?"))
    before = contents(chat)
    with pytest.raises(ChatError, match=f"there is no message {number}: this conversation has 1 of yours"):
        chat.edit(number, "new")
    assert contents(chat) == before


def test_forks_share_what_they_have_in_common(chat: Chat) -> None:
    text_of(chat.say("Who are you?"))
    stem = list(chat.branch.session.tokens)
    assert chat.fork() == "fork1" == chat.name
    text_of(chat.say("Is it cold?"))
    in_fork = list(chat.branch.session.tokens)
    assert report(chat).cached_tokens == len(stem) - 1  # the last token was said, but never evaluated
    chat.switch("main")
    assert chat.branch.session.tokens == stem
    assert len(chat.messages) == 3
    text_of(chat.say("Do ships come by?"))
    in_main = list(chat.branch.session.tokens)
    shared = common(in_main, in_fork)
    assert report(chat).cached_tokens == shared >= len(stem)
    cells = chat._runtime.stats()["cells"]["resident"]
    assert cells == (len(in_fork) - 1) + (len(in_main) - 1) - shared  # the common part is there once
    assert chat.fork("storm") == "storm"
    assert chat.fork() == "fork2"
    with pytest.raises(ChatError, match="there is a conversation 'storm' already"):
        chat.fork("storm")
    with pytest.raises(ChatError, match="'two words' is no name"):
        chat.fork("two words")
    with pytest.raises(ChatError, match="no conversation 'calm', only main, fork1, storm, fork2"):
        chat.switch("calm")
    assert chat.name == "fork2"


def test_what_was_said_until_it_was_stopped_stays(chat: Chat) -> None:
    chunks = chat.say("Who are you?")
    said = next(chunks).text + next(chunks).text
    chat.stop()
    assert list(chunks) == []
    assert chat.stopped
    assert contents(chat) == [SYSTEM, "Who are you?", said]
    assert report(chat).prompt_tokens == len(chat.branch.session.tokens) - 2
    so_far = len(chat.branch.session.tokens)
    chunks = chat.say("Go on.")
    said = next(chunks).text
    assert not chat.stopped
    assert so_far - 1 <= report(chat).cached_tokens <= so_far  # the last word need not have been evaluated
    chunks.close()  # type: ignore[attr-defined]
    assert contents(chat)[-1] == said


def test_a_prompt_that_is_being_evaluated_can_be_stopped(open_runtime: Open) -> None:
    stopping = [False]

    def on_event(name: str, details: dict[str, Any]) -> None:
        if name == "lookup" and stopping[0]:
            chat.stop()

    runtime = open_runtime(on_event=on_event)
    chat = Chat(runtime, system=SYSTEM, max_tokens=2)
    text_of(chat.say("Who are you?"))
    before, tokens, last = contents(chat), list(chat.branch.session.tokens), chat.reuse
    stopping[0] = True
    assert list(chat.say("Tell me of the sea. " * 200)) == []
    assert (contents(chat), chat.branch.session.tokens, len(chat.branch.before)) == (before, tokens, 1)
    assert chat.reuse is last
    assert [runtime.context.sequences.seq_pos_max(lane) for lane in (0, 1)] == [-1, -1]  # the lanes are clean
    stopping[0] = False
    text_of(chat.say("Are you alone?"))
    assert report(chat).cached_tokens == len(tokens) - 1
    assert len(chat.messages) == 5


def test_what_fails_leaves_the_conversation_as_it_was(chat: Chat) -> None:
    with pytest.raises(skippy.PromptTooLong):
        text_of(chat.say("sea " * 3000))
    assert contents(chat) == [SYSTEM]
    assert chat.branch.before == ()
    text_of(chat.say("Who are you?"))
    before = contents(chat)
    with pytest.raises(skippy.PromptTooLong):
        text_of(chat.edit(1, "sea " * 3000))
    assert contents(chat) == before


def test_a_seed_makes_a_chat_repeatable_and_an_answer_again_another_one(open_runtime: Open) -> None:
    runtime = open_runtime()
    said = []
    for _ in range(2):
        chat = Chat(runtime, system=SYSTEM, max_tokens=8, temperature=1.5, seed=5)
        said.append([text_of(chat.say("Who are you?")), text_of(chat.regenerate())])
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]


# -- the terminal ---------------------------------------------------------------------------------------


class Typed(Terminal):
    """A terminal on which `lines` are typed: what it shows and asks is collected.  A callable is called."""

    def __init__(
        self, chat: Chat, *lines: str | BaseException, interactive: bool = True, as_json: bool = False
    ) -> None:
        super().__init__(chat, interactive=interactive, as_json=as_json, read=self.type)
        self.lines = list(lines)
        self.asked: list[tuple[str, str]] = []
        self.out, self.err = io.StringIO(), io.StringIO()
        self.console = Console(file=self.out, width=100, soft_wrap=not interactive)
        self.errors = Console(file=self.err, soft_wrap=True)

    def type(self, prompt: str, suggestion: str) -> str:
        self.asked.append((prompt, suggestion))
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def test_commands(chat: Chat) -> None:
    terminal = Typed(
        chat, "Who are you?", "", KeyboardInterrupt(), "/regenerate", "/edit 1", "/dev is what?", "//etc is a folder",
        "/fork storm", "/list", "/history", "/reuse", "/help", "/switch main", "/edit 7 x", "/edit", "/nonsense",
        "/switch", "/quit", "no",
    )  # fmt: skip
    terminal.run()
    assert terminal.lines == ["no"]
    assert terminal.asked[:2] == [("main> ", "")] * 2
    assert ("new text: ", "Who are you?") in terminal.asked
    assert ("storm> ", "") in terminal.asked
    assert contents(chat)[1::2] == ["/dev is what?", "/etc is a folder"]
    out = terminal.out.getvalue()
    assert f"[system]\n{SYSTEM}\n[1]\n/dev is what?\n[assistant]\n{contents(chat)[2]}\n[2]\n/etc is a folder\n" in out
    assert "│ * │ storm        │ 2             │" in out
    assert "this is main now" in out
    assert all(command.split()[0] in out for command in ("/regenerate", "/edit N [TEXT]", "/quit"))
    assert terminal.err.getvalue().splitlines() == [
        "there is no message 7: this conversation has 2 of yours",
        "/edit needs the number of one of your messages; /history shows them",
        "there is no command /nonsense; /help shows those there are",
        "there is no conversation '', only main, storm",
    ]


@pytest.mark.parametrize(("interactive", "shown"), [(True, "a[2Jb\tc\n\n"), (False, "a\x1b[2J\x9bb\tc\n\n")])
def test_an_answer_does_not_steer_the_terminal(chat: Chat, interactive: bool, shown: str) -> None:
    terminal = Typed(chat, interactive=interactive)
    terminal.answer(iter([Chunk("a\x1b[2J", [1]), Chunk("\x9bb\tc\n", [2], "stop")]))
    assert terminal.out.getvalue() == shown


def test_the_table_of_a_report() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    by_tier = {"resident": 70, "ram": 20, "disk": 0}
    console.print(reuse_table(skippy.ReuseReport(100, 90, 10, by_tier, 1.25, 20.5, 30.75, "partial", 90)))
    rows = [line.strip("│ ").split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    assert {what.strip(): figure.strip() for what, figure in rows} == {
        "prompt tokens": "100", "reused": "90", "from resident": "70", "from ram": "20", "evaluated": "10",
        "restoring, ms": "1.2", "evaluating, ms": "20.5", "to the first token, ms": "30.8",
        "leaves the stored path at": "90", "reason": "partial",
    }  # fmt: skip


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Typed(chat, "Who are you?", "/history")
    shown: list[str] = []
    real = terminal.say

    def say(text: str, end: str = "\n") -> None:
        real(text, end)
        if end == "":
            shown.append(text)
            if len(shown) == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "say", say)
    handler = signal.getsignal(signal.SIGINT)
    terminal.run()
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(shown) == 2
    assert contents(chat) == [SYSTEM, "Who are you?", "".join(shown)]
    assert f"{''.join(shown)}\n(stopped)\n[system]" in terminal.out.getvalue()


def test_where_nobody_types_an_error_ends_it_and_ctrl_c_too(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Typed(chat, "/fork", "/edit 1 x", "never", interactive=False)
    with pytest.raises(ChatError, match="there is no message 1"):
        terminal.run()
    assert terminal.lines == ["never"]
    assert (terminal.out.getvalue(), terminal.err.getvalue()) == ("", "")
    assert {prompt for prompt, _ in terminal.asked} == {""}
    terminal = Typed(chat, "Who are you?", "never", interactive=False)
    monkeypatch.setattr(terminal, "say", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        terminal.run()
    assert len(chat.messages) == 3


def test_through_a_pipe_answers_are_lines_of_json() -> None:
    lines = "\n".join(["Who are you?", "/regenerate", "/list", "/history", "/reuse", ""])
    options = [
        "chat",
        "--json",
        "--max-tokens",
        "4",
        "--threads",
        str(THREADS),
        "--temperature",
        "0",
        "--system",
        SYSTEM * 3,
    ]
    result = CliRunner().invoke(cli.app, [*options, "--n-ctx", "1024"], input=lines)
    assert result.exit_code == 0, result.output
    first, again, conversations, history, last = map(json.loads, result.stdout.splitlines())
    assert first["finish_reason"] == "length"
    assert first["reuse"]["cached_tokens"] == 0
    assert again["text"] == first["text"]
    assert again["reuse"]["evaluated_tokens"] == 0
    assert last == again["reuse"]
    tokens = first["reuse"]["prompt_tokens"] + 4
    assert conversations == [{"name": "main", "current": True, "messages": 1, "tokens": tokens, "last": "Who are you?"}]
    assert [message["content"] for message in history] == [SYSTEM * 3, "Who are you?", first["text"]]


class Pty:
    """`skippy chat` in a process of its own, with a pseudo-terminal as its controlling terminal."""

    CODE = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from skippy.cli import main; main()"

    def __init__(self, *arguments: str, seconds: float) -> None:
        import pty

        self.end = time.monotonic() + seconds
        self.seen = ""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100"},
        )  # fmt: skip
        os.close(slave)

    def type(self, keys: str) -> None:
        self.seen = ""
        os.write(self.master, keys.encode())

    def interrupt_the_prompt(self) -> None:
        """Ctrl-C until the prompt comes anew.

        Python looks for signals before it waits for keys: one that comes in between is seen with the next one.
        """
        while not self.seen.endswith("main> "):
            os.write(self.master, b"\x03")
            again = time.monotonic() + 2
            self.wait_for(lambda seen, again=again: seen.endswith("main> ") or time.monotonic() > again)  # type: ignore[misc]

    def wait_for(self, done: Callable[[str], bool]) -> str:
        while not done(self.seen):
            left = self.end - time.monotonic()
            assert left > 0, f"timed out; seen so far: {self.seen!r}"
            if select.select([self.master], [], [], min(left, 1))[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace").replace("\r", "")
        return self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_session_on_a_real_terminal() -> None:
    pytest.importorskip("pty")
    options = ["--threads", str(THREADS), "--max-tokens", "900", "--temperature", "0", "--n-ctx", "1024"]
    terminal = Pty("chat", *options, "--system", SYSTEM * 3, seconds=240)
    try:
        terminal.wait_for(lambda seen: seen.endswith("main> "))
        assert "/help lists the commands" in terminal.seen
        question = "Write a very long story about a lighthouse."
        terminal.type(question + "\n")
        terminal.wait_for(lambda seen: len(seen) > len(question) + 10)
        os.write(terminal.master, b"\x03")
        seen = terminal.wait_for(lambda seen: seen.endswith("main> "))
        said = seen.removeprefix(f"{question}\n").removesuffix("main> ").removesuffix("(stopped)\n").strip("^C\n")
        assert "(stopped)" in seen
        assert 5 < len(said) < 3000
        terminal.type("/history\n")
        seen = terminal.wait_for(lambda seen: seen.endswith("main> "))
        assert f"[system]\n{SYSTEM * 3}\n[1]\n{question}\n[assistant]\n{said.replace('^C', '')[:8]}" in seen
        terminal.type("half a mess")
        terminal.wait_for(lambda seen: seen == "half a mess")
        terminal.interrupt_the_prompt()  # which drops the line, not the chat
        terminal.type("/regenerate\n")
        terminal.wait_for(lambda seen: len(seen) > len("/regenerate\n") + 5)
        os.write(terminal.master, b"\x03")
        terminal.wait_for(lambda seen: seen.endswith("main> "))
        terminal.type("/reuse\n")
        seen = terminal.wait_for(lambda seen: seen.endswith("main> "))
        assert [line.split("│")[2].strip() for line in seen.splitlines() if "evaluated" in line] == ["0"]
        terminal.type("\x04")
        assert terminal.process.wait(timeout=max(1, terminal.end - time.monotonic())) == 0
    finally:
        terminal.close()
