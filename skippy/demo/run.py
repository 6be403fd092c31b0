"""Plays the demonstration and collects what it shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from skippy._binding import BUILD, VERSION
from skippy.config import CacheConfig
from skippy.demo.evidence import ColdRuns, Parting, Witness
from skippy.demo.texts import CONVERSATIONS, EDIT, PLAIN_TEMPLATE, SYSTEM
from skippy.model import Model
from skippy.request import Completion
from skippy.runtime import Runtime
from skippy.session import Session

__all__ = ["Outcome", "Row", "play"]


@dataclass(frozen=True)
class Row:
    """One request: what was reused, how long it took cold and with reuse, and what the checks found."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    by_tier: dict[str, int]
    saveable_tokens: int
    behind_checkpoint: int
    rows_checked: int
    rows_wrong: int
    ttft_cold_ms: float
    ttft_ms: float
    same_answer: bool
    parting: Parting | None
    answer: str

    @property
    def failures(self) -> list[str]:
        """What the checks found wrong, in words."""
        found = []
        if self.rows_wrong or self.rows_checked != self.cached_tokens:
            found.append(f"{self.rows_wrong} of {self.rows_checked} restored tokens are not what was evaluated")
        if self.cached_tokens < self.saveable_tokens:
            found.append(f"{self.saveable_tokens - self.cached_tokens} tokens were evaluated again without need")
        if self.parting is not None and not self.parting.near_tie:
            found.append(f"the answer leaves the cold one by {self.parting.gap:.3f}, noise {self.parting.noise:.3f}")
        return found


@dataclass(frozen=True)
class Outcome:
    """All requests, what the cache holds at the end, and on what it was run."""

    rows: list[Row]
    memory: dict[str, int]
    machine: dict[str, Any]
    stats: dict[str, Any]

    @property
    def failures(self) -> list[str]:
        """What went wrong, with the request it went wrong in."""
        return [f"{row.name}: {failure}" for row in self.rows for failure in row.failures]


def _turns(turns: int) -> Iterator[tuple[str, str, int]]:
    """(conversation, message, turn), the conversations interleaved."""
    for turn in range(turns):
        for name, messages in CONVERSATIONS.items():
            yield name, messages[turn], turn


class _Player:
    def __init__(self, runtime: Runtime, max_tokens: int) -> None:
        self.runtime = runtime
        self.max_tokens = max_tokens
        context = runtime.context.sequences
        self.witness = Witness(context, runtime.capability)
        runtime.cache.observer = self.witness
        flash_attn = "off" if runtime.capability.flash_attn is False else "on"
        self.cold = ColdRuns(
            runtime.model,
            n_ctx=context.n_ctx,
            n_batch=context.n_batch,
            n_threads=runtime.n_threads,
            flash_attn=flash_attn,
        )

    def request(self, name: str, session: Session, text: str) -> Row:
        prompt = np.array(session.prompt_for(text), np.int32)
        cold = self.cold.answer(prompt, self.max_tokens)
        answer: Completion = session.send(text, max_tokens=self.max_tokens)
        reuse = answer.reuse
        return Row(
            name=name,
            prompt_tokens=reuse.prompt_tokens,
            cached_tokens=reuse.cached_tokens,
            evaluated_tokens=reuse.evaluated_tokens,
            by_tier=reuse.by_tier,
            saveable_tokens=self.witness.should_be_restored,
            behind_checkpoint=self.witness.behind_checkpoint,
            rows_checked=self.witness.checked,
            rows_wrong=self.witness.wrong,
            ttft_cold_ms=cold.ttft_ms,
            ttft_ms=reuse.ttft_ms - 1e3 * self.witness.seconds,
            same_answer=answer.tokens == cold.tokens,
            parting=self.cold.parting(prompt, cold.tokens, answer.tokens),
            answer=answer.text,
        )


def play(
    model_path: str | os.PathLike[str],
    *,
    n_ctx: int = 1536,
    max_tokens: int = 40,
    turns: int = 4,
    n_threads: int | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Outcome:
    """Play three conversations of `turns` turns, an edit and a regeneration, each request cold and with reuse.

    ValueError unless `turns` is 1 to 4; with 1 there is no second message to edit.  `n_ctx` is small, so that
    conversations leave the pool and come back from RAM.
    """
    if not 1 <= turns <= 4:
        raise ValueError(f"turns is {turns}, expected 1 to 4")
    rows: list[Row] = []
    with Model(model_path, vocab_only=True) as model:
        chat_template = PLAIN_TEMPLATE if model.chat_template is None else None
    with Runtime(
        model_path,
        n_ctx=n_ctx,
        n_threads=n_threads,
        lanes=1,
        chat_template=chat_template,
        cache=CacheConfig(mode="lookup-record"),
    ) as runtime:
        player = _Player(runtime, max_tokens)
        sessions = {name: runtime.session(SYSTEM) for name in CONVERSATIONS}
        before: dict[tuple[str, int], Session] = {}

        def ask(name: str, session: Session, text: str) -> None:
            rows.append(player.request(name, session, text))
            on_row(rows[-1])

        for name, text, turn in _turns(turns):
            before[name, turn] = sessions[name].fork()
            ask(f"{name} {turn + 1}", sessions[name], text)
        first, *_, last = CONVERSATIONS
        paths = list(sessions.values())
        if turns > 1:
            ask(f"{first} 2 edited", before[first, 1], EDIT)
            paths.append(before[first, 1])
        ask(f"{last} {turns} again", before[last, turns - 1], CONVERSATIONS[last][turns - 1])
        runtime.check()
        stats = runtime.stats()
        capability = runtime.capability
        memory = {
            "cells": stats["cells"]["resident"],
            "cells_bytes": stats["cells"]["resident"] * capability.bytes_per_token,
            "saved_bytes": stats["ram"]["in_use"],
            "conversation_tokens": sum(len(session.tokens) for session in paths),
            "full_copies_bytes": sum(capability.full_copy_bytes(len(session.tokens)) for session in paths),
        }
        machine = {
            "model": runtime.model.description,
            "llama_cpp_python": VERSION,
            "llama_cpp": BUILD,
            "threads": runtime.n_threads,
            "n_ctx": runtime.context.sequences.n_ctx,
            "flash_attn": runtime.capability.flash_attn,
        }
    return Outcome(rows, memory, machine, stats)
