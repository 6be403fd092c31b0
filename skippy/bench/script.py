"""What is really sent: prompts in tokens, once the answers are known, and the least that has to be evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from skippy.bench.workloads import Ask, Restart, Workload
from skippy.history import common_length

__all__ = ["Request", "Script"]


@dataclass(frozen=True)
class Request:
    """A prompt, the tokens of its answer, and of the prompt the least number of tokens that is new."""

    conversation: str
    prompt: tuple[int, ...]
    answer: int
    least: int


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
    _seen: list[npt.NDArray[np.int32]] = field(default_factory=list)
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
        path = np.array(prompt, np.int32)
        known = max((common_length(path, seen) for seen in self._seen), default=0)
        self.requests.append(Request(step.conversation, prompt, step.answer, len(prompt) - known))
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
        # The last token that was answered is never evaluated.
        self._seen.append(np.array(history[:-1] if answer else history, np.int32))
        self._at += 1
