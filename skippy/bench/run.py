"""One run of the benchmark: workloads made, arms played, figures written."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skippy.bench.arms import Arm
from skippy.bench.figures import figures_of, problems, workload_figures
from skippy.bench.machine import machine
from skippy.bench.play import OnRequest, Played, Settings, play
from skippy.bench.replay import replay
from skippy.bench.script import path_of
from skippy.bench.traces import read_trace
from skippy.bench.words import WORDS
from skippy.bench.workloads import Knobs, Workload, Writer, make
from skippy.config import CacheConfig
from skippy.model import Model
from skippy.template import ChatTemplate

__all__ = ["Run", "run", "writer_for"]


def writer_for(model: Model, seed: int) -> Writer:
    """Texts of plain words in the tokens of `model`; no two texts begin alike, but by chance."""

    def draw(rng: random.Random, n: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < n:
            text = " " + " ".join(rng.choice(WORDS) for _ in range(n))
            tokens += model.tokenize(text, add_bos=False, special=False)
        return tokens[:n]

    return Writer(draw, seed)


@dataclass(frozen=True)
class Run:
    """What is to be measured; `workloads` by name, and a `trace` file beside or instead of them."""

    settings: Settings
    arms: Sequence[Arm]
    workloads: Sequence[str]
    knobs: Knobs
    rounds: int = 1
    trace: Path | None = None
    block: int = 32
    most: int | None = None
    command: str = "skippy bench"

    def make(self, model: Model) -> list[Workload]:
        """Workloads, with the texts in the tokens of `model`."""
        writer = writer_for(model, self.knobs.seed)
        made = make(list(self.workloads), writer, self.knobs)
        if self.trace is not None:

            def render(messages: Sequence[Any]) -> list[int]:
                template = ChatTemplate(model)
                text = template.render(messages)
                return model.tokenize(text, add_bos=not template.begins_with_bos(text))

            made.append(
                read_trace(self.trace, writer, render, answer=self.knobs.answer, block=self.block, most=self.most)
            )
        return made


def run(
    plan: Run,
    *,
    on_request: OnRequest = lambda *_: None,
    on_start: Callable[[int], None] = lambda requests: None,
    on_workload: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:
    """All figures, as plain data: what `bench.json` holds and the page shows.

    `on_start` gets the number of requests that will be sent in all, `on_request` is `play`'s, `on_workload` gets the
    figures of a workload when it has been played.
    """
    with Model(plan.settings.model, vocab_only=True) as model:
        workloads = plan.make(model)
        there = sum(arm.unavailable is None for arm in plan.arms)
        on_start(sum(workload.requests for workload in workloads) * there * plan.rounds)
        played = play(
            workloads,
            plan.arms,
            plan.settings,
            model,
            rounds=plan.rounds,
            on_request=on_request,
            on_workload=lambda workload, played: on_workload(workload_figures(workload, plan.arms, played)),
        )
        on = machine(plan.settings.model, model)
    figures = figures_of(workloads, plan.arms, played)
    for workload in figures["workloads"]:
        workload["hit_rates"] = _hit_rates(workload["name"], played)
    return {
        "command": plan.command,
        "machine": on,
        "settings": plan.settings.as_dict() | {"model": plan.settings.model.name},
        "knobs": {name: str(value) for name, value in plan.knobs.__dict__.items()},
        "rounds": plan.rounds,
        "problems": problems(figures),
        **figures,
    }


def _hit_rates(workload: str, played: Played) -> dict[str, Any] | None:
    """What a budget of saved state would find, by replay through the same cache, and what no limit would."""
    rows = [row for row in played.rows if (row.workload, row.arm, row.round) == (workload, "cold", 0)]
    if not rows:
        return None
    speed = sum(row.answer["evaluated"] for row in rows) / sum(row.answer["ttft_ms"] / 1e3 for row in rows)
    paths = [(path_of(row.request.prompt, row.answer["tokens"]), len(row.request.prompt)) for row in rows]
    total = sum(prompt for _, prompt in paths)
    distinct = sum(row.request.least + max(0, len(row.answer["tokens"]) - 1) for row in rows)
    least = CacheConfig.model_fields["min_tokens"].default
    budgets = [max(64, distinct * part // 8) for part in (1, 2, 3, 4, 6, 8)]
    policies: dict[str, dict[int, float]] = {}
    eviction: Literal["worth", "lru"]
    for eviction in ("worth", "lru"):
        policies[eviction] = {
            budget: replay(paths, eviction, "ram", budget, prefill=speed, min_tokens=least)["hits"] / total
            for budget in budgets
        }
    return {"policies": policies, "no_limit": 1 - sum(row.request.least for row in rows) / total}
