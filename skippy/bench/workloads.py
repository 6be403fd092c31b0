"""What is asked in a benchmark: conversations as token counts and where they come from, made from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["SIZES", "WORKLOADS", "Ask", "Knobs", "Lengths", "Restart", "Workload", "Writer", "make"]

Size = Literal["small", "medium", "large"]


@dataclass(frozen=True)
class Lengths:
    """How long texts are, in tokens, drawn with a seed: `120`, `uniform(20,60)`, `normal(40,10)`, `lognormal(40,0.5)`.

    The first number of a lognormal distribution is its median, the second its sigma; nothing is shorter than one token.

    >>> Lengths.parse("uniform(20,60)"), str(Lengths.parse("120"))
    (Lengths(kind='uniform', a=20.0, b=60.0), '120')
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ValueError, naming the text, for anything else."""
        found = re.fullmatch(r"\s*(?:(uniform|normal|lognormal)\(\s*([\d.]+)\s*,\s*([\d.]+)\s*\)|(\d+))\s*", text)
        try:
            if found is None:
                raise ValueError(text)
            numbers = [float(each) for each in found.groups()[1:] if each is not None]
            made = cls(found[1] or "fixed", *numbers)
        except ValueError:
            expected = "a number, uniform(a,b), normal(mean,deviation) or lognormal(median,sigma)"
            raise ValueError(f"{text!r} is no length, expected {expected}") from None
        if made.a < 1 or (made.kind == "uniform" and made.b < made.a):
            raise ValueError(f"{text!r} is no length: it must begin with at least 1, and may not run backwards")
        return made

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}({self.a:g},{self.b:g})"

    def draw(self, rng: random.Random) -> int:
        """A number of tokens, at least 1."""
        match self.kind:
            case "uniform":
                value = rng.uniform(self.a, self.b)
            case "normal":
                value = rng.gauss(self.a, self.b)
            case "lognormal":
                value = self.a * rng.lognormvariate(0.0, self.b)
            case _:
                value = self.a
        return max(1, round(value))


@dataclass(frozen=True)
class Knobs:
    """What can be turned: how many conversations and turns, and how long the system prompt, messages and answers are.

    `document` is what retrieval asks about, `seed` decides every text.
    """

    chats: int = 3
    turns: int = 4
    system: Lengths = Lengths("fixed", 240)
    message: Lengths = Lengths("uniform", 20, 50)
    document: Lengths = Lengths("fixed", 320)
    answer: int = 8
    seed: int = 0


SIZES: dict[str, Knobs] = {
    "small": Knobs(),
    "medium": Knobs(4, 6, Lengths("fixed", 600), Lengths("uniform", 20, 80), Lengths("fixed", 800), 16),
    "large": Knobs(8, 10, Lengths("fixed", 2000), Lengths("lognormal", 60, 0.6), Lengths("fixed", 3000), 32),
}


class Writer:
    """Makes texts of so many tokens; each call gives another one, the same ones for the same seed and label."""

    def __init__(self, draw: Callable[[random.Random, int], list[int]], seed: int) -> None:
        self._draw = draw
        self._seed = seed

    def text(self, label: str, tokens: int) -> tuple[int, ...]:
        """A text of `tokens` tokens that belongs to this label."""
        return tuple(self._draw(random.Random(f"{self._seed} {label}"), tokens))

    def lengths(self, label: str) -> random.Random:
        """What lengths are drawn with."""
        return random.Random(f"{self._seed} {label} lengths")


@dataclass(frozen=True)
class Ask:
    """One request: what conversation `conversation` is so far, and `new` after it.

    With `base` (conversation, turn) it goes on from that conversation as it was after so many answers instead; a turn
    of 0 is its very beginning, the tokens of its first request before its first own message.  The answer becomes part
    of `conversation`.  `alone`: nothing comes before `new`.
    """

    conversation: str
    new: tuple[int, ...]
    answer: int
    base: tuple[str, int] | None = None
    alone: bool = False


@dataclass(frozen=True)
class Restart:
    """The program ends and is started again."""


Step = Ask | Restart


@dataclass(frozen=True)
class Workload:
    """A list of steps under a name; `about` says what kind of work it stands for."""

    name: str
    about: str
    steps: tuple[Step, ...]
    conversations: int = 1

    @property
    def requests(self) -> int:
        """How many there are."""
        return sum(isinstance(step, Ask) for step in self.steps)


def _chats(writer: Writer, knobs: Knobs, name: str, chats: int) -> Iterator[Ask]:
    """`chats` conversations over one system prompt, in turns."""
    system = writer.text(f"{name} system", knobs.system.draw(writer.lengths(name)))
    rng = writer.lengths(f"{name} messages")
    for turn in range(knobs.turns):
        for chat in range(chats):
            message = writer.text(f"{name} {chat} {turn}", knobs.message.draw(rng))
            yield Ask(f"chat {chat}", (*system, *message) if turn == 0 else message, knobs.answer)


def growing(writer: Writer, knobs: Knobs) -> Workload:
    """One chat that grows."""
    return Workload("growing", "one chat, turn after turn", tuple(_chats(writer, knobs, "growing", 1)))


def turns(writer: Writer, knobs: Knobs) -> Workload:
    """Several chats in turns."""
    steps = tuple(_chats(writer, knobs, "turns", knobs.chats))
    return Workload("chats", f"{knobs.chats} chats over one system prompt, in turns", steps, knobs.chats)


def agent(writer: Writer, knobs: Knobs) -> Workload:
    """An agent that sends everything again with each step."""
    rng = writer.lengths("agent")
    tools = writer.text("tools", 2 * knobs.system.draw(rng))
    steps = []
    for step in range(2 * knobs.turns):
        observation = writer.text(f"observation {step}", knobs.message.draw(rng))
        steps.append(Ask("agent", (*tools, *observation) if step == 0 else observation, knobs.answer))
    about = f"an agent of {len(steps)} steps with a long system prompt and tools"
    return Workload("agent", about, tuple(steps))


def edited(writer: Writer, knobs: Knobs) -> Workload:
    """A chat whose messages are written anew, and whose answers are asked for again."""
    steps: list[Step] = list(_chats(writer, knobs, "edited", 1))
    rng = writer.lengths("edits")
    for turn in range(1, knobs.turns):
        message = writer.text(f"edit {turn}", knobs.message.draw(rng))
        steps.append(Ask(f"edit {turn}", message, knobs.answer, base=("chat 0", turn)))
    last = steps[knobs.turns - 1]
    assert isinstance(last, Ask)
    again = Ask("again", last.new, knobs.answer, base=("chat 0", knobs.turns - 1) if knobs.turns > 1 else None)
    steps += [again, replace(again, conversation="once more")]
    return Workload("edited", "a chat in which messages are edited and answers regenerated", tuple(steps))


def best_of(writer: Writer, knobs: Knobs) -> Workload:
    """The same prompt again and again."""
    prompt = writer.text("best of", knobs.document.draw(writer.lengths("best of")))
    steps = tuple(Ask(f"sample {i}", prompt, knobs.answer, alone=True) for i in range(2 * knobs.turns))
    return Workload("best-of-n", f"{len(steps)} answers to one prompt", steps)


def retrieval(writer: Writer, knobs: Knobs) -> Workload:
    """Questions about one document."""
    rng = writer.lengths("retrieval")
    document = writer.text("document", knobs.document.draw(rng))
    steps = tuple(
        Ask(
            f"question {i}",
            (*document, *writer.text(f"question {i}", knobs.message.draw(rng))),
            knobs.answer,
            alone=True,
        )
        for i in range(2 * knobs.turns)
    )
    return Workload("retrieval", f"{len(steps)} questions about one document", steps)


def restart(writer: Writer, knobs: Knobs) -> Workload:
    """A chat that goes on after the program was started again."""
    asks: list[Step] = list(_chats(writer, knobs, "restart", 1))
    half = max(1, len(asks) // 2)
    return Workload(
        "restart", "a chat, the program ends, and the chat goes on", (*asks[:half], Restart(), *asks[half:])
    )


def nothing(writer: Writer, knobs: Knobs) -> Workload:
    """Prompts that share nothing."""
    rng = writer.lengths("nothing")
    lengths = [knobs.document.draw(rng) for _ in range(knobs.turns)]
    steps = tuple(
        Ask(f"prompt {i}", writer.text(f"nothing {i}", n), knobs.answer, alone=True) for i, n in enumerate(lengths)
    )
    return Workload("nothing", f"{len(steps)} prompts that have nothing in common", steps)


_MAKERS = (growing, turns, agent, edited, best_of, retrieval, restart, nothing)
WORKLOADS: dict[str, Callable[[Writer, Knobs], Workload]] = dict(
    zip(("growing", "chats", "agent", "edited", "best-of-n", "retrieval", "restart", "nothing"), _MAKERS, strict=True)
)


def make(names: list[str], writer: Writer, knobs: Knobs) -> list[Workload]:
    """The workloads of these names.  ValueError, naming the known ones, for another."""
    for name in names:
        if name not in WORKLOADS:
            raise ValueError(f"{name!r} is no workload, expected one of {', '.join(WORKLOADS)}")
    return [WORKLOADS[name](writer, knobs) for name in names]
