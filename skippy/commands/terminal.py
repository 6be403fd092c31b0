"""`skippy chat`: a `Chat` on a terminal, or on a pipe."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from skippy.commands.chat import Chat, ChatError
from skippy.commands.options import (
    HOW_TO_SET,
    CommandError,
    Disk,
    MaybeModel,
    Threads,
    chosen_model,
    configured,
)
from skippy.errors import SkippyError
from skippy.report import REASONS, ReuseReport
from skippy.request import Chunk

if TYPE_CHECKING:
    from skippy.runtime import Runtime

__all__ = ["COMMANDS", "Terminal", "chat"]

# Control characters but for tab and newline: what a model says must not steer the terminal it is shown on.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

COMMANDS = {
    "/regenerate": "the last answer again; with a temperature above 0 another one",
    "/edit N [TEXT]": "rewrite your message number N, and go on from there",
    "/fork [NAME]": "go on in a copy of this conversation",
    "/switch NAME": "go on in another conversation",
    "/list": "the conversations",
    "/history": "this conversation, your messages numbered",
    "/reuse": "what of the last prompt was reused, and from where",
    "/help": "this list; a message that begins with / is written with two: //",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops the running answer",
}


def reuse_table(report: ReuseReport) -> Table:
    """A ReuseReport for people."""
    table = Table(title="the last prompt", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("prompt tokens", str(report.prompt_tokens))
    table.add_row("reused", str(report.cached_tokens))
    for tier, tokens in report.by_tier.items():
        if tokens:
            table.add_row(f"  from {tier}", str(tokens))
    table.add_row("evaluated", str(report.evaluated_tokens))
    table.add_row("restoring, ms", f"{report.restore_ms:.1f}")
    table.add_row("evaluating, ms", f"{report.prefill_ms:.1f}")
    table.add_row("to the first token, ms", f"{report.ttft_ms:.1f}")
    if report.diverged_at is not None:
        table.add_row("leaves the stored path at", str(report.diverged_at))
    table.add_row("reason", report.reason)
    table.caption = REASONS[report.reason]
    return table


@contextmanager
def on_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on Ctrl-C instead of breaking off in the middle of something."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_line(prompt: str, suggestion: str = "") -> str:
    """A line from stdin, with readline where there is one, to be edited from `suggestion`.  EOFError at the end."""
    try:
        import readline
    except ImportError:
        return input(prompt)
    readline.set_startup_hook(lambda: readline.insert_text(suggestion))
    try:
        return input(prompt)
    finally:
        readline.set_startup_hook()


class Terminal:
    """Reads lines and shows what the chat says to them.

    `interactive`: a person types, so there are prompts and an error leaves the chat open; else the first error
    ends it, and nothing but answers goes to stdout.  `as_json`: each answer, and what a command shows, as a line of
    JSON.
    """

    def __init__(
        self, chat: Chat, *, interactive: bool, as_json: bool = False, read: Callable[[str, str], str] = read_line
    ) -> None:
        self.chat = chat
        self.interactive = interactive
        self.as_json = as_json
        self.console = Console(soft_wrap=not interactive)
        self.errors = Console(stderr=True, soft_wrap=True, highlight=False)
        self._read = read

    def run(self) -> None:
        """Until /quit or the end of the input.  SkippyError, where nobody types, for what cannot be done."""
        going_on = True
        while going_on:
            try:
                going_on = self.obey(self._ask_for(f"{self.chat.name}> "))
            except EOFError:
                if self.interactive:
                    self.say("")
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.say("")
            except SkippyError as error:
                if not self.interactive:
                    raise
                self.errors.print(str(error), style="red", markup=False)

    def _ask_for(self, prompt: str, suggestion: str = "") -> str:
        return self._read(prompt, suggestion) if self.interactive else self._read("", "")

    def obey(self, line: str) -> bool:
        """A message to the model, or a command; False to leave.  SkippyError for what cannot be done."""
        line = line.strip()
        if line.startswith("//") or not line.startswith("/"):
            if line:
                self.answer(self.chat.say(line[line.startswith("//") :]))
            return True
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command == "/quit":
            return False
        acts: dict[str, Callable[[str], None]] = {
            "/regenerate": lambda _: self.answer(self.chat.regenerate()),
            "/edit": self.edit,
            "/fork": lambda name: self.note(f"this is {self.chat.fork(name or None)} now"),
            "/switch": self.switch,
            "/list": self.conversations,
            "/history": self.history,
            "/reuse": self.reuse,
            "/help": self.help,
        }
        if command not in acts:
            raise ChatError(f"there is no command {command}; /help shows those there are")
        acts[command](rest)
        return True

    # -- what is shown ----------------------------------------------------------------------------------

    def show(self, data: Any, picture: RenderableType) -> None:
        """What a command found: a line of JSON, or a picture for people."""
        if self.as_json:
            self.say(json.dumps(data))
        else:
            self.console.print(picture)

    def note(self, text: str) -> None:
        """Tell a person what was done."""
        if self.interactive:
            self.console.out(text, style="dim", highlight=False)

    def say(self, text: str, end: str = "\n") -> None:
        """Show text of the conversation as it is; to a person, without characters that steer the terminal."""
        out = self.console.file  # rich would turn tabs into spaces
        out.write((_STEERING.sub("", text) if self.interactive else text) + end)
        out.flush()

    def answer(self, chunks: Iterator[Chunk]) -> None:
        """Show an answer while it is made."""
        text, finish_reason, begun = "", None, False
        with on_ctrl_c(self.chat.stop):
            for chunk in chunks:
                begun = True
                text += chunk.text
                finish_reason = chunk.finish_reason
                if not self.as_json:
                    self.say(chunk.text, end="")
        if self.as_json:
            report = self.chat.reuse.as_dict() if begun and self.chat.reuse else None
            data = {"text": text, "finish_reason": finish_reason or "stopped", "reuse": report}
            self.say(json.dumps(data))
        else:
            self.say("")
        if self.chat.stopped:
            if not self.interactive:
                raise KeyboardInterrupt
            self.note("(stopped)" if begun else "(stopped before the first word; the message is not in the history)")

    def edit(self, rest: str) -> None:
        """Rewrite a message: `N` and perhaps the new text."""
        number, _, text = rest.partition(" ")
        if not number.isdecimal():
            raise ChatError("/edit needs the number of one of your messages; /history shows them")
        text = text.strip() or self._ask_for("new text: ", self.chat.message(int(number))).strip()
        if not text:
            raise ChatError("there is no new text; nothing was changed")
        self.answer(self.chat.edit(int(number), text))

    def switch(self, rest: str) -> None:
        """Go on in another conversation."""
        self.chat.switch(rest)
        self.note(f"this is {self.chat.name} now")

    def conversations(self, rest: str = "") -> None:
        """The conversations: how long they are, and what was said last."""
        del rest
        rows = [
            {
                "name": name,
                "current": name == self.chat.name,
                "messages": len(branch.user_texts),
                "tokens": len(branch.session.tokens),
                "last": branch.user_texts[-1] if branch.user_texts else None,
            }
            for name, branch in self.chat.branches.items()
        ]
        table = Table("", "conversation", "your messages", "tokens", "the last of them")
        for row in rows:
            last = str(row["last"] or "")
            table.add_row(
                "*" if row["current"] else "", str(row["name"]), str(row["messages"]), str(row["tokens"]),
                last if len(last) < 50 else last[:49] + "…",
            )  # fmt: skip
        self.show(rows, table)

    def history(self, rest: str = "") -> None:
        """The conversation so far."""
        del rest
        if self.as_json:
            self.say(json.dumps(self.chat.messages))
            return
        number = 0
        first = len(self.chat.messages) - 2 * len(self.chat.branch.before)
        for i, message in enumerate(self.chat.messages):
            yours = i >= first and message["role"] == "user"
            number += yours
            self.console.out(f"[{number if yours else message['role']}]", style="bold", highlight=False)
            self.say(message["content"])

    def reuse(self, rest: str = "") -> None:
        """The report of the last answer.  ChatError where there is none."""
        del rest
        if self.chat.reuse is None:
            raise ChatError("there is no answer yet")
        self.show(self.chat.reuse.as_dict(), reuse_table(self.chat.reuse))

    def help(self, rest: str = "") -> None:
        """The commands."""
        del rest
        table = Table(show_header=False, box=None)
        for command, meaning in COMMANDS.items():
            table.add_row(command, meaning)
        self.show(COMMANDS, table)


@contextmanager
def closing(runtime: Runtime, console: Console) -> Iterator[Runtime]:
    """Close `runtime` in the end, and say so where writing to disk takes more than a second."""
    try:
        yield runtime
    finally:
        disk = runtime.cache.disk
        text = "writing the conversation to disk; Ctrl-C leaves out what is not written yet"
        timer = threading.Timer(1.0, lambda: console.print(text, style="dim"))
        timer.daemon = True
        if disk is not None and disk.takes:
            timer.start()
        try:
            runtime.close()
        finally:
            timer.cancel()


def chat(
    model: MaybeModel = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    session: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Go on with the conversation of this name, and keep it on disk."),
    ] = None,
    disk: Disk = None,
    n_ctx: Annotated[
        int, typer.Option(metavar="N", help="Cells of the pool, shared by all conversations.", min=1)
    ] = 8192,
    threads: Threads = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer at most.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(metavar="T", help="0: always the likeliest token.", min=0.0)] = 0.7,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Makes a chat repeatable.", min=0)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each answer, with its reuse, as a line of JSON.")
    ] = False,
) -> None:
    """Chat with a model; going back, forking and asking again evaluate only what is new.

    In the chat /help lists the commands: /regenerate, /edit, /fork, /switch, /list, /history, /reuse, /quit.
    Ctrl-C stops the running answer, Ctrl-D leaves.  Where stdin is no terminal, each line is a message or a
    command, only answers are printed, and the first error ends the chat with 2.
    """
    from skippy.runtime import Runtime

    config = configured(disk)
    if session is not None and config.disk is None:
        raise CommandError(f"--session needs a folder to keep it in: {HOW_TO_SET}")
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    runtime = Runtime(chosen_model(model), n_ctx=n_ctx, n_threads=threads, lanes=1, cache=config)
    with closing(runtime, Console(stderr=True, soft_wrap=True)):
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        talk = Chat(runtime, system=system, session=session, **options)
        terminal = Terminal(talk, interactive=interactive, as_json=as_json)
        terminal.note(f"{runtime.model.description}; /help lists the commands")
        if talk.messages and talk.branch.session.tokens:
            terminal.note(f"this goes on after {len(talk.branch.session.ends)} answers; /history shows them")
        terminal.run()
