"""What is really sent: prompts in tokens, once the answers are known, and the least that has to be evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from skippy.bench.workloads import Ask, Restart, Workload
from skippy.history import Tokens, common_length

__all__ = ["Request", "Script", "Seen", "path_of"]


def path_of(prompt: Sequence[int], answer: Sequence[int]) -> Tokens:
    """What was evaluated of a request: its prompt and its answer, whose last token never is."""
    return np.array([*prompt, *answer[:-1]], np.int32)


class Seen:
    """Paths that were evaluated: how much of a prompt is new to them."""

    def __init__(self) -> None:
        self._paths: list[Tokens] = []

    def new_in(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` behind the longest head that it has in common with one of them.  O(tokens of all)."""
        path = path_of(prompt, ())
        return len(path) - max((common_length(path, seen) for seen in self._paths), default=0)

    def add(self, path: Tokens) -> None:
        """Another one was evaluated."""
        self._paths.append(path)


@dataclass(frozen=True)
class Request:
    """A prompt, the tokens of its answer, and of the prompt the least number of tokens that is new."""

    conversation: str
    prompt: tuple[int, ...]
    answer: int
    least: int
    chat: int = 0  # the number of its conversation, in the order in which they begin


@dataclass
class Script:
    """Resolves the steps of a workload: who plays it first notes the answers, all others play what came out.

    So all send the same prompts, also where an answer falls otherwise by rounding.
    """

    workload: Workload
    start: tuple[int, ...] = ()  # what every prompt begins with: the BOS token, where the model wants one
    requests: list[Request] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)  # before which request
    _histories: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    _seen: Seen = field(default_factory=Seen)
    _chats: dict[str, int] = field(default_factory=dict)
    _at: int = 0

    @property
    def complete(self) -> bool:
        """Whether all answers are known."""
        return self._at == len(self.workload.steps)

    def next(self) -> Request | None:
        """The next request, or None after the last one.  Its answer is expected by `note`."""
        steps = self.workload.steps
        while self._at < len(steps) and isinstance(steps[self._at], Restart):
            self.restarts.append(len(self.requests))
            self._at += 1
        if self._at == len(steps):
            return None
        step = steps[self._at]
        assert isinstance(step, Ask)
        prompt = (*self._before(step), *step.new)
        chat = self._chats.setdefault(step.conversation, len(self._chats))
        self.requests.append(Request(step.conversation, prompt, step.answer, self._seen.new_in(prompt), chat))
        return self.requests[-1]

    def _before(self, step: Ask) -> tuple[int, ...]:
        if step.alone:
            return self.start
        if step.base is not None:
            name, turn = step.base
            return self._histories[name][turn]
        return self._histories.get(step.conversation, [self.start])[-1]

    def note(self, answer: list[int]) -> None:
        """What the request was answered."""
        request = self.requests[-1]
        step = self.workload.steps[self._at]
        assert isinstance(step, Ask)
        history = (*request.prompt, *answer)
        before = self._histories.setdefault(step.conversation, [self.start])
        if step.base is not None:
            del before[:]
            before += self._histories[step.base[0]][: step.base[1] + 1]
        before.append(history)
        self.answers.append(answer)
        self._seen.add(path_of(request.prompt, answer))
        self._at += 1
