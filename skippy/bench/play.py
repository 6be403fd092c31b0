"""Plays workloads on arms, in turns: one process at a time, several rounds in changed order."""

from __future__ import annotations

import os
import platform
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import skippy
from skippy._binding import BUILD, VERSION
from skippy.bench.arms import Arm
from skippy.bench.processes import ArmFailed, Process, started
from skippy.bench.script import Request, Script
from skippy.bench.workloads import Workload
from skippy.demo.evidence import ColdRuns
from skippy.errors import SkippyError
from skippy.model import Model

__all__ = ["Played", "Row", "Settings", "TooLong", "machine", "play"]

# Other words than any workload has, so that nobody gains from them.
_WARM_UP = 24


@dataclass(frozen=True)
class Settings:
    """What all arms have in common: model, context, threads, and how much memory the caches may take."""

    model: Path
    n_ctx: int
    n_batch: int = 512
    threads: int = 2
    n_gpu_layers: int = 0
    ram_bytes: int = 2**30
    disk_bytes: int = 8 * 2**30

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.__dict__, "model": str(self.model)}


@dataclass(frozen=True)
class Row:
    """One request on one arm in one round; `same` says whether it was answered as cold, `near_tie` why not."""

    workload: str
    arm: str
    round: int
    index: int
    request: Request
    answer: dict[str, Any]
    same: bool
    near_tie: bool | None = None


@dataclass
class Played:
    """Everything that was measured, and who could not be."""

    rows: list[Row] = field(default_factory=list)
    loaded_kib: dict[tuple[str, str], int] = field(default_factory=dict)  # (workload, arm) -> memory before it
    failed: dict[tuple[str, str], str] = field(default_factory=dict)


def machine(settings: Settings, model: Model) -> dict[str, Any]:
    """On what and with what it was measured."""
    processor = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        processor = found[1] if found else processor
    except OSError:
        pass
    return {
        "model": model.description or settings.model.stem,  # without its weights a model does not describe itself
        "file": settings.model.name,
        "processor": processor,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "skippy": skippy.__version__,
        "llama_cpp_python": VERSION,
        "llama_cpp": BUILD,
        "llama_cpp_features": llama_cpp.llama_print_system_info().decode(errors="replace").strip(),
    }


class TooLong(SkippyError):
    """A request does not fit into the context."""


OnRequest = Callable[[str, str, int, int, "dict[str, Any] | None"], None]


class _Player:
    def __init__(self, settings: Settings, model: Model, on_request: OnRequest) -> None:
        self.settings = settings
        self.model = model
        self.on_request = on_request
        self.played = Played()
        rng = random.Random("warm up")
        self.warm_up = [rng.randrange(model.n_vocab // 4, model.n_vocab // 2) for _ in range(_WARM_UP)]
        self.start = tuple(model.tokenize(""))

    def run(self, workload: Workload, script: Script, arm: Arm, round_: int) -> None:
        """One arm plays one workload, from an empty cache."""
        settings = {**self.settings.as_dict(), "warm_up": self.warm_up}
        at = 0
        with tempfile.TemporaryDirectory(prefix="skippy-bench-") as folder:
            try:
                while True:
                    with started(arm, settings, conversations=workload.conversations, folder=Path(folder)) as process:
                        self.played.loaded_kib.setdefault((workload.name, arm.name), process.loaded_kib)
                        at = self._until_restart(process, workload, script, arm, round_, at)
                    if at == workload.requests and script.complete:
                        break
            except ArmFailed as error:
                self.played.failed[workload.name, arm.name] = str(error)

    def _until_restart(
        self, process: Process, workload: Workload, script: Script, arm: Arm, round_: int, at: int
    ) -> int:
        """Ask what comes next, up to a restart or the end; the number of the request that is next."""
        first = at
        while True:
            if at < len(script.requests):
                request: Request | None = script.requests[at]
            else:
                request = script.next()
            if request is None or (at > first and at in script.restarts):
                return at
            if len(request.prompt) + request.answer > self.settings.n_ctx:
                raise TooLong(
                    f"request {at + 1} of {workload.name} has {len(request.prompt)} tokens and an answer of "
                    f"{request.answer}, the context {self.settings.n_ctx}: give a larger --n-ctx, or shorter lengths"
                )
            self.on_request(workload.name, arm.name, round_, at, None)
            answer = process.ask(request.prompt, request.answer, request.chat)
            tokens = answer["tokens"] = self._without_end(answer["tokens"])
            if at == len(script.answers):
                script.note(tokens)
            self.played.rows.append(
                Row(workload.name, arm.name, round_, at, request, answer, tokens == script.answers[at])
            )
            self.on_request(workload.name, arm.name, round_, at, answer)
            at += 1

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Some arms give the token that ends an answer, some do not."""
        return tokens[:-1] if tokens and self.model.is_end(tokens[-1]) else tokens


def play(
    workloads: Sequence[Workload],
    arms: Sequence[Arm],
    settings: Settings,
    model: Model,
    *,
    rounds: int = 1,
    on_request: OnRequest = lambda *_: None,
    on_workload: Callable[[Workload, Played], None] = lambda *_: None,
) -> Played:
    """Measure every workload on every arm, `rounds` times.  `model` is the settings' model, its vocabulary at least.

    Cold goes first in the first round, because its answers are what the others are told that was answered.  ArmFailed
    where it fails, TooLong where a request does not fit into the context; what happens to other arms is in `failed`.
    `on_request(workload, arm, round, index, answer)` is called before a request, with None, and after it;
    `on_workload(workload, played)` when a workload has been played on all arms.
    """
    player = _Player(settings, model, on_request)
    there = [arm for arm in arms if arm.unavailable is None]
    cold = next(arm for arm in there if arm.name == "cold")
    others = [arm for arm in there if arm is not cold]
    played = player.played
    for workload in workloads:
        script = Script(workload, player.start)
        first = len(played.rows)
        for round_ in range(rounds):
            first_of_all = (round_ // 2) % max(1, len(others))
            order = [cold, *others[first_of_all:], *others[:first_of_all]]
            for arm in order if round_ % 2 == 0 else reversed(order):
                if arm.settings.get("slots") == 0 and workload.conversations == 1:
                    played.failed[workload.name, arm.name] = "there is one chat, so it would be server-1 once more"
                    continue
                player.run(workload, script, arm, round_)
                if arm is cold and (why := played.failed.get((workload.name, cold.name))) is not None:
                    raise ArmFailed(f"the cold run of {workload.name}, to which all are compared, failed: {why}")
        played.rows[first:] = _judged(played.rows[first:], settings)
        on_workload(workload, played)
    return played


def _judged(rows: list[Row], settings: Settings) -> list[Row]:
    """Of answers that leave the cold one, whether they do so at a near tie.  Only while no arm is running."""
    cold = {row.index: row.answer["tokens"] for row in rows if row.arm == "cold" and row.round == 0}
    known: dict[tuple[int, tuple[int, ...]], bool] = {}
    judged = []
    model = None
    try:
        for row in rows:
            if row.same:
                judged.append(row)
                continue
            key = (row.index, tuple(row.answer["tokens"]))
            if key not in known:
                model = model or Model(settings.model, n_gpu_layers=settings.n_gpu_layers)
                runs = ColdRuns(
                    model, n_ctx=settings.n_ctx, n_batch=settings.n_batch, n_threads=settings.threads, flash_attn="on"
                )
                prompt = np.array(row.request.prompt, np.int32)
                parting = runs.parting(prompt, cold[row.index], row.answer["tokens"])
                known[key] = parting is None or parting.near_tie
            judged.append(Row(**{**row.__dict__, "near_tie": known[key]}))
    finally:
        if model is not None:
            model.close()
    return judged
