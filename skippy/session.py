"""A conversation that keeps the tokens of its answers as they were generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from skippy.report import ReuseReport
from skippy.request import Chunk, Completion, Request
from skippy.template import ChatTemplate

if TYPE_CHECKING:
    from skippy.runtime import Runtime

__all__ = ["Session"]


class Session:
    """A chat whose history is never tokenised again, so that no retokenised answer can break the prefix.

    `messages` is the conversation as text, `tokens` what the model has seen and said, in order; `reuse` is the report
    of the last answer that began, in a stream as well, None before; a fork begins without one.
    """

    def __init__(
        self, runtime: Runtime, template: ChatTemplate, *, system: str | None = None, namespace: str = ""
    ) -> None:
        self._runtime = runtime
        self._template = template
        self._namespace = namespace
        self._closed = False
        self._answering = False
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.tokens: list[int] = []
        self.reuse: ReuseReport | None = None

    def send(self, text: str, **options: Any) -> Any:
        """Say `text` and get the answer; `options` as in `Runtime.generate`.

        With stream=True the answer becomes part of the session when the stream ends or is closed; until then the
        session takes nothing else (RuntimeError).  An answer that fails, or is stopped by `should_stop`, before its
        first token leaves the session as it was.
        """
        stream = bool(options.pop("stream", False))
        if self._answering:
            raise RuntimeError("an answer of this session is still being made: finish or close its stream first")
        prompt, starts = self.prompt_with_starts(text)
        request = self._runtime.request(prompt, **{"message_starts": starts, **options, "namespace": self._namespace})
        chunks = self._follow(text, request)
        if stream:
            return chunks
        for _ in chunks:
            pass
        return Completion(request.text, request.generated, request.finish_reason or "stop", request.report)

    def prompt_for(self, text: str) -> list[int]:
        """The tokens that `send(text)` would ask with; nothing is sent."""
        return self.prompt_with_starts(text)[0]

    def prompt_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens that `send(text)` would ask with, and at which of them messages begin that are new."""
        if self._closed:
            raise ValueError("this session is closed")
        if self.tokens:
            rest = self._template.continuation(self.messages, text)
            return self.tokens + self._runtime.model.tokenize(rest, add_bos=False), [len(self.tokens)]
        return self._runtime.render_with_starts([*self.messages, {"role": "user", "content": text}])

    def _follow(self, text: str, request: Request) -> Iterator[Chunk]:
        if self._answering or request.prompt[: len(self.tokens)] != self.tokens:
            raise RuntimeError("this session has gone on since the stream was asked for")
        self._answering = True
        begun = False
        chunks = request.run()
        try:
            for chunk in chunks:
                if chunk.finish_reason != "stopped" or request.generated:
                    begun = True
                    self.reuse = request.report
                yield chunk
        finally:
            self._answering = False
            chunks.close()
            if begun:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": request.text}]
                self.tokens = [*request.prompt, *request.generated]

    def fork(self) -> Session:
        """A second conversation that goes on from here.  What both have in common stays stored once."""
        other = Session(self._runtime, self._template, namespace=self._namespace)
        other.messages = [dict(message) for message in self.messages]
        other.tokens = list(self.tokens)
        return other

    def close(self) -> None:
        """End the conversation; what it left in the cache stays until it is evicted."""
        self._closed = True
