"""A conversation that keeps the tokens of its answers as they were generated, over a restart too if it has a name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from skippy.errors import ConfigError
from skippy.report import ReuseReport
from skippy.request import Chunk, Completion, Request
from skippy.template import ChatTemplate

if TYPE_CHECKING:
    from skippy.runtime import Runtime
    from skippy.store import DiskTier

__all__ = ["Session", "read_label", "read_session"]

log = logging.getLogger("skippy")

_LONGEST_NAME = 200


class Session:
    """A chat whose history is never tokenised again, so that no retokenised answer can break the prefix.

    `messages` is the conversation as text, `tokens` what the model has seen and said, in order; `reuse` is the report
    of the last answer that began, in a stream as well, None before; a fork begins without one.

    With a `name` it goes on with the conversation that was kept under it in the disk tier, if there is one, and is
    written there after every answer.  A fork has no name.  `ends` are the lengths of `tokens` after each answer.
    """

    def __init__(
        self,
        runtime: Runtime,
        template: ChatTemplate,
        *,
        system: str | None = None,
        name: str | None = None,
        namespace: str = "",
    ) -> None:
        self._runtime = runtime
        self._template = template
        self._namespace = namespace
        self._closed = False
        self._answering = False
        self._written: str | None = None
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.tokens: list[int] = []
        self.ends: list[int] = []
        self.reuse: ReuseReport | None = None
        self.name: str | None = None
        if name is not None:
            self._resume(name, system)

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
                self.went_on(text, request)

    def went_on(self, text: str, request: Request) -> None:
        """`request`, which asked with `prompt_for(text)`, has been answered: that is part of the conversation now."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": request.text}]
        self.tokens = [*request.prompt, *request.generated]
        self.ends = [*self.ends, len(self.tokens)]
        self.save()

    def fork(self) -> Session:
        """A second conversation that goes on from here.  What both have in common stays stored once."""
        other = Session(self._runtime, self._template, namespace=self._namespace)
        other.messages = [dict(message) for message in self.messages]
        other.tokens = list(self.tokens)
        other.ends = list(self.ends)
        return other

    def before(self, turn: int) -> Session:
        """The conversation as it was before the question of answer number `turn`, from 0, as a fork.

        ValueError where that is not known: there is no such answer, or `messages` was changed from outside.
        """
        begin = len(self.messages) - 2 * (len(self.ends) - turn)
        roles = [message.get("role") for message in self.messages[begin:]] if begin >= 0 else []
        if not 0 <= turn < len(self.ends) or roles != ["user", "assistant"] * (len(self.ends) - turn):
            raise ValueError(f"there is no answer {turn} to go back to")
        other = self.fork()
        other.messages = other.messages[:begin]
        other.ends = other.ends[:turn]
        other.tokens = other.tokens[: other.ends[-1]] if other.ends else []
        return other

    def close(self) -> None:
        """End the conversation; what it left in the cache stays until it is evicted.

        With a name its state is queued for the disk now, so that it is there even if the Runtime is never closed.
        """
        if self._closed:
            return
        self._closed = True
        self.save()
        disk = self._runtime.cache.disk
        if self.name is None or disk is None or not disk.takes:  # also where the Runtime is closed
            return
        key, tokens = self._runtime.namespace_hash(self._namespace), np.array(self.tokens, np.int32)
        with self._runtime._step():
            self._runtime.cache.write_out(key, tokens, from_pool=True)

    # -- keeping it by name -------------------------------------------------------------------------------

    def save(self, name: str | None = None) -> None:
        """Write it to the disk tier under its name, or under `name`, which it has from now on.

        Nothing happens where it has no name, where nothing was said, or where nothing is new.  ConfigError without a
        disk tier, and for a name that is not allowed; what fails while writing is logged, and costs nothing else.
        """
        if name is not None and name != self.name:
            _check_name(name)
            self._disk(name)
            self.name, self._written = name, None
        if self.name is None or not self.tokens:
            return
        disk, key = self._disk(self.name), self._runtime.namespace_hash(self._namespace)
        label = json.loads(disk.labels.get(key, "{}"))
        try:
            text = json.dumps({"label": label, "messages": self.messages, "ends": self.ends})
        except (TypeError, ValueError) as error:
            log.warning("the session %r is not kept: its messages are no JSON: %s", self.name, error)
            return
        if text == self._written:
            return
        self._written = text
        disk.save_session(self.name, key, text, np.array(self.tokens, "<i4").tobytes())

    def _disk(self, name: str) -> DiskTier:
        disk = self._runtime.cache.disk
        if disk is not None:
            return disk
        config = self._runtime.cache.config
        if config.disk is None:
            why = "give the Runtime a folder: cache=CacheConfig(disk=FOLDER), SKIPPY_DISK, or disk in skippy.toml"
        elif config.mode == "disabled":
            why = "mode is 'disabled'"
        else:
            why = f"reuse is off: {self._runtime.cache.unable}"
        raise ConfigError(f"session(name={name!r}) is kept in the disk tier, and there is none: {why}")

    def _resume(self, name: str, system: str | None) -> None:
        """Take the name, and go on with what is kept under it."""
        _check_name(name)
        disk, key = self._disk(name), self._runtime.namespace_hash(self._namespace)
        self.name = name
        if not disk.takes:
            log.warning("the session %r will not be kept: %s", name, disk.off or "the disk tier is only read")
        try:
            found = disk.session(name, key)
            if found is None:
                self._say_where_else(disk, name)
                return
            messages, tokens, ends = read_session(*found, n_vocab=self._runtime.model.n_vocab)
        except (ValueError, TypeError, RecursionError) as error:
            log.warning("what is kept of the session %r is damaged, so it begins anew: %s", name, error)
            return
        kept = messages[0].get("content") if messages[0]["role"] == "system" else None
        if system is not None and system != kept:
            here, there = _where_they_part(system, kept)
            raise ConfigError(
                f"the session {name!r} is kept with the system prompt {there}, not {here}: "
                "give none to go on with it, or take another name"
            )
        self.messages, self.tokens, self.ends, self._written = messages, tokens, ends, found[0]

    def _say_where_else(self, disk: DiskTier, name: str) -> None:
        """A session of this name and tenant may be there for another model or other settings: that is no secret."""
        for row in disk.sessions():
            if row["name"] == name:
                other = disk.session(name, row["namespace"])
                label = read_label(other[0]) if other else {}
                if label.get("tenant", "") == self._namespace:
                    log.warning(
                        "a session %r is kept for other settings or another model (%s); with these it begins anew",
                        name, label.get("model"),
                    )  # fmt: skip
                    return


def _check_name(name: object) -> None:
    fits = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable() and name == name.strip()
    if not fits:
        raise ConfigError(f"name={name!r}: expected 1 to {_LONGEST_NAME} printable characters, no space at the ends")


def _where_they_part(one: str, other: Any) -> tuple[str, str]:
    """Both as they are written in a message: short texts whole, of long ones what is around the first difference."""
    texts = [one, other if isinstance(other, str) else ""]
    at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    begin = max(0, at - 20) if max(map(len, texts)) > 100 else 0
    short = [
        ("..." if begin else "") + text[begin : begin + 100] + ("..." if begin + 100 < len(text) else "")
        for text in texts
    ]
    return repr(short[0]), "None" if other is None else repr(short[1])


def read_session(text: str, tokens: bytes, *, n_vocab: int) -> tuple[list[dict[str, Any]], list[int], list[int]]:
    """Messages, tokens and ends of a kept session; ValueError, TypeError or RecursionError where it is damaged."""
    kept = json.loads(text)
    messages = kept.get("messages") if isinstance(kept, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("it has no messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message is no object with a role")
    if not tokens or len(tokens) % 4:
        raise ValueError(f"its tokens take {len(tokens)} bytes, expected a multiple of 4")
    ids = np.frombuffer(tokens, "<i4")
    if ids.min() < 0 or ids.max() >= n_vocab:
        raise ValueError(f"a token is not in the vocabulary of {n_vocab}")
    ends = kept.get("ends")
    if not isinstance(ends, list) or not all(type(end) is int for end in ends):
        raise ValueError("the ends of its answers are missing")
    if not ends or ends[0] < 1 or ends[-1] != len(ids) or any(a >= b for a, b in pairwise(ends)):
        raise ValueError("the ends of its answers are not those of its tokens")
    return messages, ids.tolist(), ends


def read_label(text: str, *, of_session: bool = True) -> dict[str, str]:
    """Model and tenant of a kept session, or from the label that an entry carries; empty where it is damaged."""
    try:
        label = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if of_session:
        label = label.get("label") if isinstance(label, dict) else None
    return {str(key): str(value) for key, value in label.items()} if isinstance(label, dict) else {}
