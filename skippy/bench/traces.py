"""Requests from a file: chats as OpenAI messages, or block hashes as Mooncake writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skippy.bench.workloads import Ask, Step, Workload, Writer
from skippy.errors import SkippyError

__all__ = ["TraceError", "read_trace"]

Render = Callable[[Sequence[Any]], list[int]]


class TraceError(SkippyError, ValueError):
    """A line of a trace is not what it should be."""


def read_trace(
    path: Path, writer: Writer, render: Render, *, answer: int, block: int = 512, most: int | None = None
) -> Workload:
    """A workload from a JSONL file, its first `most` requests.  TraceError, with the line, for what is neither format.

    A line with `messages` is a chat: each of its user messages is a request, the answers in the file stand before the
    next one, `render(messages)` gives the tokens.  A line with `hash_ids` and `input_length` is a request of blocks
    of 512 tokens, each of which becomes `block` tokens that belong to its hash: with fewer the same pattern is played
    in less time.
    """
    steps: list[Step] = []
    conversations = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                data = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{where} is no JSON: {error}") from None
            if not isinstance(data, dict):
                raise TraceError(f"{where} is {type(data).__name__}, expected an object with messages or hash_ids")
            if "messages" in data:
                steps += _chat(data["messages"], where, render, answer)
                conversations += 1
            elif "hash_ids" in data:
                steps.append(_blocks(data, where, writer, answer, block))
            else:
                raise TraceError(f"{where} has {', '.join(data) or 'nothing'}, expected messages or hash_ids")
            if most is not None and len(steps) >= most:
                break
    if not steps:
        raise TraceError(f"{path.name} holds no request")
    # Other names than the workloads' own, and one slot for requests of which nobody says whose they are.
    return Workload(f"trace:{path.stem}", f"the requests of {path.name}", tuple(steps[:most]), max(1, conversations))


def _chat(messages: Any, where: str, render: Render, answer: int) -> list[Ask]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise TraceError(f"{where}: messages is no list of objects with a role")
    asks = []
    for i, message in enumerate(messages):
        if message["role"] == "user":
            try:
                prompt = render(messages[: i + 1])
            except (SkippyError, ValueError, TypeError, KeyError) as error:
                raise TraceError(f"{where}: the chat template refuses its messages: {error}") from None
            asks.append(Ask(where, tuple(prompt), answer, alone=True))
    return asks


def _blocks(data: dict[str, Any], where: str, writer: Writer, answer: int, block: int) -> Ask:
    hashes, length = data["hash_ids"], data.get("input_length")
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes) or not hashes:
        raise TraceError(f"{where}: hash_ids is {hashes!r:.60}, expected a list of numbers")
    if not isinstance(length, int) or not 0 < length <= 512 * len(hashes):
        raise TraceError(f"{where}: input_length is {length!r}, expected 1 to {512 * len(hashes)}")
    tokens = [token for each in hashes for token in writer.text(f"block {each}", block)]
    return Ask(where, tuple(tokens[: max(1, length * block // 512)]), answer, alone=True)
