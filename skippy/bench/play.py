"""Plays workloads on arms, in turns: one process runs at a time, several rounds in changed order."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skippy.bench.arms import Arm
from skippy.bench.judge import judged
from skippy.bench.memory import available_kib
from skippy.bench.part import Part
from skippy.bench.processes import ArmFailed, started
from skippy.bench.script import Request, Script
from skippy.bench.workloads import Workload
from skippy.errors import SkippyError
from skippy.model import Model

__all__ = ["Played", "Row", "Settings", "TooLong", "play"]

_SHARE_OF_MEMORY = 0.8  # of what is available, for the processes of all arms together

# Other words than any workload has, so that nobody gains from them.
_WARM_UP = 24


@dataclass(frozen=True)
class Settings:
    """What all arms have in common: model, context, threads, attention, and how much memory the caches may take."""

    model: Path
    n_ctx: int
    n_batch: int = 512
    threads: int = 2
    n_gpu_layers: int = 0
    flash_attn: Literal["on", "off"] = "on"
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
    in_turns: bool = True  # request by request; else one arm after the other, because memory does not hold all


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

    def play(self, workload: Workload, script: Script, arms: Sequence[Arm], round_: int) -> None:
        """A round: each arm plays the workload from an empty cache; in turns, where memory holds all of them."""
        if self.played.in_turns:
            self.played.in_turns = self._take_turns(workload, script, arms, round_)
        if not self.played.in_turns:
            for arm in arms:
                self._take_turns(workload, script, [arm], round_)

    def _take_turns(self, workload: Workload, script: Script, arms: Sequence[Arm], round_: int) -> bool:
        """Send each request to each of the arms before the next one.  False, and nothing played, if they do not fit."""
        with ExitStack() as stack:
            parts: list[Part] = []
            for arm in arms:
                if parts and not self._fits(parts, len(arms)):
                    return False
                with self._blamed(workload, arm):
                    part = self._begin(stack, workload, arm)
                    parts.append(part)
                    self.played.loaded_kib.setdefault((workload.name, arm.name), part.loaded_kib)
            index = 0
            while (request := self._request(workload, script, index)) is not None:
                for part in _order(parts, index, round_, first="cold" if index == len(script.answers) else None):
                    with self._blamed(workload, part.arm):
                        if index in script.restarts and index > 0:
                            part.restart()
                        self._ask(part, workload, script, request, round_, index)
                parts = [part for part in parts if not part.over]
                if index == len(script.answers):
                    return True  # cold, to which the others are compared, has failed
                index += 1
            for part in parts:
                with self._blamed(workload, part.arm):
                    part.close()
        return True

    def _fits(self, parts: Sequence[Part], total: int) -> bool:
        """Whether as many more arms can be loaded: each as large as the largest so far, with a full cache."""
        each = max(part.loaded_kib for part in parts) + self.settings.ram_bytes // 1024
        return (total - len(parts)) * each <= _SHARE_OF_MEMORY * available_kib()

    def _begin(self, stack: ExitStack, workload: Workload, arm: Arm) -> Part:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skippy-bench-")))
        settings = {**self.settings.as_dict(), "warm_up": self.warm_up}
        part = Part(arm, lambda: started(arm, settings, conversations=workload.conversations, folder=folder))
        stack.callback(part.close)
        return part

    @contextmanager
    def _blamed(self, workload: Workload, arm: Arm) -> Iterator[None]:
        """An arm that fails is noted."""
        try:
            yield
        except ArmFailed as error:
            self.played.failed[workload.name, arm.name] = str(error)

    def _request(self, workload: Workload, script: Script, index: int) -> Request | None:
        request = script.requests[index] if index < len(script.requests) else script.next()
        if request is not None and len(request.prompt) + request.answer > self.settings.n_ctx:
            raise TooLong(
                f"request {index + 1} of {workload.name} has {len(request.prompt)} tokens and an answer of "
                f"{request.answer}, the context {self.settings.n_ctx}: give a larger --n-ctx, or shorter lengths"
            )
        return request

    def _ask(self, part: Part, workload: Workload, script: Script, request: Request, round_: int, index: int) -> None:
        name = part.arm.name
        self.on_request(workload.name, name, round_, index, None)
        answer = part.ask(request)
        tokens = answer["tokens"] = self._without_end(answer["tokens"])
        if index == len(script.answers):
            script.note(tokens)
        same = tokens == script.answers[index]
        self.played.rows.append(Row(workload.name, name, round_, index, request, answer, same))
        self.on_request(workload.name, name, round_, index, answer)

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

    Each request goes to one arm after the other, while the processes of all others stand still, so that what the
    machine does meanwhile meets all of them alike; where memory does not hold all at once, each arm plays the workload
    by itself.  Cold goes first where its answer is not known, because that is what the others are told was answered.
    ArmFailed where cold fails, TooLong where a request does not fit into the context; what happens to other arms is in
    `failed`.
    `on_request(workload, arm, round, index, answer)` is called before a request, with None, and after it;
    `on_workload(workload, played)` when a workload has been played on all arms.
    """
    player = _Player(settings, model, on_request)
    there = [arm for arm in arms if arm.unavailable is None]
    cold = next(arm for arm in there if arm.name == "cold")
    played = player.played
    for workload in workloads:
        script = Script(workload, player.start)
        first = len(played.rows)
        playing = [arm for arm in there if not (arm.settings.get("slots") == 0 and workload.conversations == 1)]
        for arm in there:
            if arm not in playing:
                played.failed[workload.name, arm.name] = "there is one chat, so it would be server-1 once more"
        order = [cold, *(arm for arm in playing if arm is not cold)]
        for round_ in range(rounds):
            left = [arm for arm in order if (workload.name, arm.name) not in played.failed]
            player.play(workload, script, left if round_ % 2 == 0 else left[::-1], round_)
            if (why := played.failed.get((workload.name, cold.name))) is not None:
                raise ArmFailed(f"the cold run of {workload.name}, to which all are compared, failed: {why}")
        played.rows[first:] = judged(played.rows[first:], settings)
        on_workload(workload, played)
    return played


def _order(parts: Sequence[Part], index: int, round_: int, *, first: str | None) -> list[Part]:
    """Whose turn is when: another one begins with each request, and every second round goes the other way round."""
    turn = (index + round_ // 2) % max(1, len(parts))
    order = [*parts[turn:], *parts[:turn]]
    return sorted(order, key=lambda part: part.arm.name != first)
