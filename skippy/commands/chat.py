"""What a person's chat can do, without a terminal: answer, answer again, go back and rewrite, fork, switch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from skippy.commands.options import CommandError
from skippy.report import ReuseReport
from skippy.request import Chunk
from skippy.runtime import Runtime
from skippy.session import Session

__all__ = ["Branch", "Chat", "ChatError"]


class ChatError(CommandError):
    """What was asked of the chat cannot be done; nothing was changed."""


@dataclass
class Branch:
    """One conversation: its session, and for each user message the session as it was before that message.

    Sessions are not changed once they are here: each message goes on in a fork.
    """

    session: Session
    before: tuple[Session, ...] = ()

    @property
    def user_texts(self) -> list[str]:
        """The user's messages that can be gone back to, oldest first."""
        messages = self.session.messages
        return [message["content"] for message in messages[len(messages) - 2 * len(self.before) :][::2]]


def reopened(session: Session) -> Branch:
    """A conversation that was kept, with what it was before each message."""
    try:
        return Branch(session, tuple(session.before(turn) for turn in range(len(session.ends))))
    except ValueError:  # a program changed its messages: it can be gone on with, but not back in
        return Branch(session)


class Chat:
    """Conversations over one model.  They share what they have in common, because their tokens do.

    `options` are those of `Runtime.request` (max_tokens, temperature, ...).  With a `seed`, request number n of the
    chat, from 0, gets seed + n: a chat can be repeated, and an answer given again is another one.

    `say`, `regenerate` and `edit` return an iterator of chunks.  Close it, or call `stop`, to end the answer: what was
    said until then stays in the conversation.  An answer that fails, or is stopped before its first word, leaves the
    conversation as it was.  `reuse` is the report of the last answer that began, also of one that was stopped.

    With `session` the first conversation has that name and is kept under it (`Runtime.session`), what was said before
    included; forks are not kept.
    """

    def __init__(
        self, runtime: Runtime, *, system: str | None = None, session: str | None = None, **options: Any
    ) -> None:
        self.name = "main" if session is None else session
        self.kept = session
        self.branches = {self.name: reopened(runtime.session(system, name=session))}
        self.reuse: ReuseReport | None = None
        self.stopped = False
        self._runtime = runtime
        self._seed: int | None = options.pop("seed", None)
        self._options = options
        self._asked = 0

    @property
    def branch(self) -> Branch:
        """The conversation that is being held."""
        return self.branches[self.name]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Its messages, the system prompt included."""
        return self.branch.session.messages

    # -- answers ----------------------------------------------------------------------------------------

    def say(self, text: str) -> Iterator[Chunk]:
        """Say `text` and get the answer."""
        return self._ask(len(self.branch.before), text)

    def regenerate(self) -> Iterator[Chunk]:
        """The last answer again; with a temperature above 0 another one.  ChatError where there is none."""
        texts = self.branch.user_texts
        if not texts:
            raise ChatError("there is no answer yet")
        return self._ask(len(texts) - 1, texts[-1])

    def edit(self, number: int, text: str) -> Iterator[Chunk]:
        """Rewrite the user's message `number`, from 1, and go on from there; what came after it is dropped.

        ChatError where there is no such message.
        """
        self.message(number)
        return self._ask(number - 1, text)

    def message(self, number: int) -> str:
        """The user's message `number`, from 1.  ChatError where there is none."""
        texts = self.branch.user_texts
        if not 1 <= number <= len(texts):
            raise ChatError(f"there is no message {number}: this conversation has {len(texts)} of yours")
        return texts[number - 1]

    def stop(self) -> None:
        """End the answer that is being made, after the word it is at; may be called from a signal handler.

        While the prompt is still being evaluated llama.cpp is told to give up, which it does on a CPU at once.
        """
        self.stopped = True

    def _ask(self, index: int, text: str) -> Iterator[Chunk]:
        """Say `text` as user message `index`; the branch changes when the answer has begun, and not before."""
        self.stopped = False
        branch = self.branch
        start = branch.before[index] if index < len(branch.before) else branch.session
        session = start.fork()
        seed = None if self._seed is None else self._seed + self._asked
        prompt, starts = session.prompt_with_starts(text)
        request = self._runtime.request(
            prompt, **self._options, seed=seed, message_starts=starts, should_stop=lambda: self.stopped
        )
        self._asked += 1
        chunks = request.run()
        begun = False
        try:
            for chunk in chunks:
                if chunk.finish_reason == "stopped" and not chunk.text:
                    break  # nobody waits for that
                begun = True
                self.reuse = request.report
                yield chunk
        finally:
            chunks.close()
            if begun:
                session.went_on(text, request)
                branch.session, branch.before = session, (*branch.before[:index], start)
                if self.kept is not None and branch is self.branches[self.kept]:
                    session.save(self.kept)

    # -- conversations ----------------------------------------------------------------------------------

    def fork(self, name: str | None = None) -> str:
        """Go on in a copy of this conversation, which is called `name`; the name.  ChatError if it is taken.

        O(1): both hold the same session until one of them goes on, in a fork of it.
        """
        if name is None:
            name = next(free for i in count(1) if (free := f"fork{i}") not in self.branches)
        if name.split() != [name]:
            raise ChatError(f"{name!r} is no name for a conversation: give one word")
        if name in self.branches:
            raise ChatError(f"there is a conversation {name!r} already")
        self.branches[name] = Branch(self.branch.session, self.branch.before)
        self.name = name
        return name

    def switch(self, name: str) -> None:
        """Go on in the conversation `name`.  ChatError, which names those there are, if there is none."""
        if name not in self.branches:
            raise ChatError(f"there is no conversation {name!r}, only {', '.join(self.branches)}")
        self.name = name
