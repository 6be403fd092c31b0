"""Many requests at once, on a pool and RAM that are too small, with llama.cpp failing now and then.

After every step tree, ledger and llama.cpp's cells agree; what is answered is what a cold run answers; what is not is a
typed error; and in the end everything is free.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy.engine import _Item
from skippy.errors import ContextFull, LanesBusy, NativeError, SkippyError, StateError
from skippy.holding import Pin
from skippy.lease import Lease, Observer
from skippy.request import Request
from tests.conftest import failing
from tests.ledger import Answers, Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

NAMES = ["llama", "gemma3", "falconh1", "mamba"]
SETTINGS = [("worth", "auto"), ("lru", "keep"), ("worth", "keep"), ("lru", "auto")]
NO_SLOT = "failed to find a memory slot"


class Torn(RuntimeError):
    """What a batch raises when it is made to fail."""


class Faults:
    """Makes calls of llama.cpp fail with a chance of `rate`; counts what failed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rate = 0.0
        self.seen: Counter[str] = Counter()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Nothing is made to fail in here."""
        rate, self.rate = self.rate, 0.0
        try:
            yield
        finally:
            self.rate = rate

    def _hit(self, name: str) -> bool:
        if self.rate == 0.0 or self.rng.random() >= self.rate:
            return False
        self.seen[name] += 1
        return True

    def save(self, real: Any, seq: int, out: Any, flags: int = 0) -> int:
        if not self._hit("save"):
            return int(real(seq, out, flags))
        if self.rng.random() < 0.5:
            raise StateError("made to fail")
        return int(real(seq, out, flags)) - 1

    def load(self, real: Any, seq: int, data: Any, flags: int = 0) -> None:
        hit = self._hit("load")
        if not hit or self.rng.random() < 0.5:  # half of it may be there
            real(seq, data, flags)
        if hit:
            raise StateError("made to fail")

    def seq_cp(self, real: Any, src: int, dst: int, start: int = 0, end: int = -1) -> None:
        if not self._hit("seq_cp"):
            real(src, dst, start, end)
        elif self.rng.random() < 0.5:
            raise NativeError("made to fail")

    def seq_rm(self, real: Any, seq: int, start: int = 0, end: int = -1) -> bool:
        if not self._hit("seq_rm"):
            return bool(real(seq, start, end))
        if self.rng.random() < 0.3:
            raise NativeError("made to fail")
        return False

    def state_size(self, real: Any, seq: int, flags: int = 0) -> int:
        size = int(real(seq, flags))
        if not self._hit("state_size"):
            return size
        if self.rng.random() < 0.3:
            raise StateError("made to fail")
        return self.rng.choice([size + 64, max(0, size - 8)])

    def call(self, real: Callable[[list[_Item]], int], items: list[_Item]) -> int:
        if not self._hit("decode"):
            return real(items)
        outcome = self.rng.choice([1, -1, 2, -2, None])
        if outcome not in (1, -1) and self.rng.random() < 0.5 and (code := real(items)):
            return code  # else it went in before it failed
        if outcome is None:
            raise Torn("made to fail")
        return outcome


@dataclass
class Undisturbed:
    """An observer that sees llama.cpp as it is."""

    observer: Observer
    faults: Faults

    def restored(self, lease: Lease, tokens: Any) -> None:
        with self.faults.none():
            self.observer.restored(lease, tokens)

    def evaluated(self, lease: Lease, tokens: Any) -> None:
        with self.faults.none():
            self.observer.evaluated(lease, tokens)


class Rig:
    """A runtime under pressure, what is open on it, and the proof of what must hold."""

    def __init__(self, path: Path, name: str, seed: int, *, eviction: str, residency: str, lanes: int = 3) -> None:
        self.rng = random.Random(f"{seed} {name} {eviction} {residency}")
        self.family = FAMILIES[name].family
        config = skippy.CacheConfig.model_validate(
            {
                "min_tokens": 8,
                "ram": self.rng.choice([120_000, 300_000]),
                "eviction": eviction,
                "residency": residency,
                "logits_bytes": self.rng.choice([0, 4 * N_VOCAB]),
                "max_entries": self.rng.choice([3, 8]),
            }
        )
        self.rt = skippy.Runtime(
            path,
            n_ctx=self.rng.choice([256, 512]),
            n_batch=64,
            n_ubatch=64,
            n_threads=1,
            lanes=lanes,
            prompt_budget=self.rng.choice([16, 48]),
            cache=config,
        )
        if residency == "keep":  # else what this machine is fast at decides what is restored
            self.rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        self.answers = Answers(path, n_batch=64, flash_attn="on")
        self.faults = Faults(self.rng)
        self.ledger = Ledger.watch(self.rt)
        self.rt.cache.observer = Undisturbed(self.ledger, self.faults)
        self.paths: list[list[int]] = [self.words(90), self.words(40)]
        self.streams: list[tuple[Request, Any]] = []
        self.pins: list[Pin] = []
        self.done: Counter[str] = Counter()
        self.logged: list[str] = []
        real = self.rt.engine._call
        self.rt.engine._call = lambda items: self.faults.call(real, items)  # type: ignore[method-assign]

    def words(self, n: int) -> list[int]:
        return [self.rng.randrange(N_CONTROL, N_VOCAB) for _ in range(n)]

    def prompt(self) -> list[int]:
        """A path that is known, extended, cut, or edited in the middle."""
        known = self.rng.choice(self.paths)
        cut = self.rng.randint(1, len(known))
        match self.rng.randrange(5):
            case 0:
                prompt = known[:cut] + self.words(self.rng.randint(1, 60))
            case 1:
                prompt = known[:cut] + self.words(6) + known[cut:]
            case 2:
                prompt = self.words(self.rng.randint(1, 120))
            case _:
                prompt = known + self.words(self.rng.choice([0, 1, 12, 40]))
        return prompt[:170]

    def note(self, path: list[int]) -> None:
        self.paths = [*self.paths[-7:], path]

    def options(self) -> dict[str, Any]:
        return {
            "namespace": self.rng.choice(["", "", "other"]),
            "priority": self.rng.choice([0, 0, 1]),
            "cache_prompt": self.rng.random() > 0.05,
        }

    # -- what must hold -----------------------------------------------------------------------------------

    @property
    def cells(self) -> int:
        """Cells that llama.cpp has in use: all but those that can be filled before it finds no room."""
        sequences = self.rt.context.sequences
        filled, step, logged = 0, 64, len(self.logged)
        with self.rt.cache.pool.scratch() as spare:
            while step:
                room = min(step, sequences.n_ctx - filled)
                if room == 0 or sequences.decode(spare, filled, np.full(room, 7, np.int32), "none") == 1:
                    step //= 2
                else:
                    filled += room
        del self.logged[logged:]  # that was asked for
        return int(sequences.n_ctx - filled)

    def check(self, *, exact: bool) -> None:
        """Tree, ledger and llama.cpp agree; no cell is in use that is not counted."""
        self.rt.check()
        assert self.ledger.wrong == []
        self.check_log()
        with self.rt._step():
            cache, sequences = self.rt.cache, self.rt.context.sequences
            known = {lease.lane: lease.length for lease in cache._leases} | {
                cache.space.sequence_of(node): node.length for node in cache.tree.entries("resident")
            }
            for seq in range(sequences.n_seq_max):
                assert sequences.seq_pos_max(seq) + 1 == known.get(seq, 0) or seq in cache.pool.set_aside, seq
            if self.family == "recurrent":
                return
            counted, found = cache.space.cells_in_use, self.cells
            assert counted == found if exact else counted >= found, f"counted {counted}, in use {found}"

    def check_log(self) -> None:
        """Never is there no room for what was let in, whatever failed."""
        assert [line for line in self.logged if NO_SLOT in line] == []

    def agrees(self, prompt: list[int], answer: list[int]) -> None:
        """The answer is the cold one, or leaves it at a near tie.

        Lanes cut a prompt anywhere, so rounding is measured at more places than `Answers.check` looks at; and where it
        moves a logit by so much, it moves two of them apart by twice that.
        """
        cold = self.answers.cold(prompt, len(answer))
        if cold == answer:
            return
        runs = self.answers._runs
        parting = runs.parting(np.array(prompt, np.int32), cold, answer)
        assert parting is not None
        noise = parting.noise
        if parting.gap > 2 * noise:
            path = np.array([*prompt, *cold[: parting.index]], np.int32)
            plain = runs.logits(path, list(range(len(prompt), len(path))))
            rng = random.Random(len(path))
            for _ in range(8):
                cuts = sorted(rng.sample(range(1, len(path)), min(len(path) - 1, rng.randint(1, 12))))
                noise = max(noise, float(np.abs(plain - runs.logits(path, cuts)).max()))
        assert parting.gap <= 2 * noise, f"the answer leaves the cold one: {parting}, noise {noise}"

    def right(self, request: Request) -> None:
        """What it answered, to whatever length, a cold run answers too."""
        prompt, answer = request.prompt, request.generated
        if answer:
            self.agrees(prompt, list(answer))
        self.note([*prompt, *answer])
        self.done[request.finish_reason or "closed"] += 1

    # -- what is done -------------------------------------------------------------------------------------

    def excused(self, error: Exception) -> None:
        """An error is right where others hold all lanes or cells, or where something was made to fail."""
        self.done[type(error).__name__] += 1
        if isinstance(error, (LanesBusy, ContextFull)):
            return
        assert isinstance(error, (SkippyError, Torn)), error
        assert self.faults.seen, error

    def complete(self) -> None:
        request = self.rt.request(self.prompt(), max_tokens=self.rng.choice([0, 1, 4, 20]), **self.options())
        try:
            request.complete()
        except (SkippyError, Torn) as error:
            self.excused(error)
        else:
            self.right(request)

    def several(self) -> None:
        prompt = self.prompt()
        try:
            for answer in self.rt.generate(prompt, n=3, max_tokens=3):
                self.agrees(prompt, answer.tokens)
        except (SkippyError, Torn) as error:
            self.excused(error)

    def open(self) -> None:
        request = self.rt.request(self.prompt(), max_tokens=self.rng.choice([10, 60, None]), **self.options())
        self.streams.append((request, request.run()))

    def read(self) -> None:
        if not self.streams:
            return
        request, stream = self.rng.choice(self.streams)
        try:
            for _ in range(self.rng.randint(1, 8)):
                next(stream)
        except StopIteration:
            self.streams.remove((request, stream))
            self.right(request)
        except (SkippyError, Torn) as error:
            self.streams.remove((request, stream))
            self.excused(error)

    def leave(self) -> None:
        """Close a stream, or forget it, for the garbage collector to close."""
        if self.streams:
            request, stream = self.streams.pop(self.rng.randrange(len(self.streams)))
            if self.rng.random() < 0.5:
                stream.close()
            del stream
            self.right(request)

    def pin(self) -> None:
        prompt = self.prompt()
        if len(prompt) < 8:
            return
        try:
            self.pins.append(self.rt.pin(prompt, ttl=self.rng.choice([None, 0.001, 5.0])))
        except ValueError as error:
            assert "there is no room for more" in str(error)  # noqa: PT017 - it may as well succeed
        except (SkippyError, Torn) as error:
            self.excused(error)

    def unpin(self) -> None:
        if self.pins and (len(self.pins) > 2 or self.rng.random() < 0.5):
            self.pins.pop(self.rng.randrange(len(self.pins))).close()

    def forget(self) -> None:
        known = self.rng.choice(self.paths)
        match self.rng.randrange(4):
            case 0:
                self.rt.forget(namespace="other")
            case 1:
                self.rt.clear()
            case _:
                self.rt.forget(known[: self.rng.randint(1, len(known))])

    def evict(self) -> None:
        with self.rt._step():
            self.rt.cache.space.evict_resident("test")

    def converse(self) -> None:
        """A turn of a session and one of its fork."""
        session = self.rt.session(self.rng.choice(["Be brief.", "Answer."]))
        try:
            session.send("Who?", max_tokens=6)
            other = session.fork()
            other.send("Why?", max_tokens=4)
            session.send("When?", max_tokens=4)
        except (SkippyError, Torn) as error:
            self.excused(error)

    def finish(self) -> None:
        """Everything ends, and everything is free."""
        self.faults.rate = 0.0
        for request, stream in self.streams:
            stream.close()
            self.right(request)
        for pin in self.pins:
            pin.close()
        rt = self.rt
        assert (rt.engine.running, rt.engine.waiting, len(rt.holding)) == ([], [], 0)
        self.check(exact=not self.faults.seen)
        rt.clear()
        pool = rt.cache.pool
        for seq in list(pool.set_aside):  # what could not be emptied then can be now
            pool.give_back(seq)
        self.check(exact=True)
        assert rt.cache.space.cells_in_use == 0
        assert (rt.cache.store.arena.used, rt.cache.entries, rt.cache._leases) == (0, 0, set())
        assert len(rt.cache.tree) == 0 or self.faults.seen
        assert rt.cache.tree.stats()["locks"] == 0
        rt.check()
        rt.close()
        self.answers.close()


@contextmanager
def rig_of(path: Path, name: str, seed: int, **settings: Any) -> Iterator[Rig]:
    """A rig with llama.cpp's log under watch; it is finished where nothing failed before."""
    rig = Rig(path, name, seed, **settings)
    handler = logging.Handler()
    handler.emit = lambda record: rig.logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("skippy.llama")
    level = log.level
    log.setLevel(logging.WARNING)  # it is said as an error
    log.propagate = False  # or a failing test would show nothing else
    log.addHandler(handler)
    f = rig.faults
    calls = {"save": f.save, "load": f.load, "seq_cp": f.seq_cp, "seq_rm": f.seq_rm, "state_size": f.state_size}
    try:
        with failing(rig.rt.cache.pool, **calls):
            yield rig
            rig.finish()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = True


ACTIONS = {
    "complete": 22, "several": 4, "open": 18, "read": 26, "leave": 9, "pin": 6, "unpin": 6, "forget": 3, "evict": 4,
    "converse": 2,
}  # fmt: skip


@pytest.mark.parametrize("faults", [0.0, 0.03], ids=["sound", "failing"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_one_thread_with_many_streams(tiny: Callable[[str], Path], name: str, seed: int, faults: float) -> None:
    eviction, residency = SETTINGS[(seed + 2 * bool(faults) + NAMES.index(name)) % len(SETTINGS)]
    with rig_of(tiny(name), name, seed, eviction=eviction, residency=residency) as rig:
        for step in range(80):
            rig.faults.rate = faults if step % 10 < 7 else 0.0
            action = rig.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            getattr(rig, action)()
            rig.faults.rate = 0.0
            rig.check(exact=not rig.streams and not rig.faults.seen)
        assert rig.done["length"] > 5
        assert rig.rt.cache.tokens["cached"] > 50 or residency == "auto" or faults
        assert bool(rig.faults.seen) == bool(faults)
        if not faults:
            assert set(rig.rt.stats()["failures"]) == set()
            assert rig.rt.stats()["sequences_set_aside"] == 0


class Crowd:
    """Threads that each do `actions` random things at once; what went wrong in any of them is raised."""

    def __init__(self, rig: Rig, threads: int, actions: int) -> None:
        self.rig = rig
        self.actions = actions
        self.lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.answered: list[tuple[list[int], list[int]]] = []
        self.threads = [threading.Thread(target=self._run, args=(rig.rng.random(),)) for _ in range(threads)]
        self.threads.append(threading.Thread(target=self._run_tasks, args=(rig.rng.random(),)))

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "somebody waits for ever"
        if self.errors:
            raise self.errors[0]
        for prompt, answer in self.answered:
            self.rig.agrees(prompt, answer)

    def _choose(self, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
        with self.lock:
            return self.rig.prompt(), {"max_tokens": rng.choice([0, 1, 5, 25]), "priority": rng.choice([0, 0, 1])}

    def _note(self, prompt: list[int], answer: list[int]) -> None:
        with self.lock:
            self.rig.note([*prompt, *answer])
            if answer:
                self.answered.append((prompt, list(answer)))

    def _run(self, seed: float) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(self.actions):
                try:
                    self._act(rng)
                except (SkippyError, Torn) as error:
                    with self.lock:
                        self.rig.excused(error)
        except BaseException as error:  # noqa: BLE001 - it is raised by who joins
            self.errors.append(error)

    def _act(self, rng: random.Random) -> None:
        rt = self.rig.rt
        prompt, options = self._choose(rng)
        match rng.randrange(9):
            case 0 | 1 | 2:
                self._note(prompt, rt.generate(prompt, **options).tokens)
            case 3 | 4 | 5:  # read a while, slowly or not, then close it
                request = rt.request(prompt, **options)
                stream = request.run()
                for _ in zip(range(rng.randint(0, 12)), stream, strict=False):
                    time.sleep(rng.choice([0, 0, 0.002]))
                stream.close()
                self._note(prompt, request.generated)
            case 6 if len(prompt) >= 8:
                with suppress(ValueError), rt.pin(prompt, ttl=rng.choice([None, 0.001])):
                    time.sleep(0.002)
            case 7:
                rt.forget(prompt[: rng.randint(1, len(prompt))])
            case _:
                rt.check()
                rt.stats()
                rt.explain(prompt)

    def _run_tasks(self, seed: float) -> None:
        try:
            asyncio.run(self._tasks(random.Random(seed)))
        except BaseException as error:  # noqa: BLE001 - it is raised by who joins
            self.errors.append(error)

    async def _tasks(self, rng: random.Random) -> None:
        """Tasks that are cancelled while they wait, while they read their prompt, and while they answer."""
        rt = self.rig.rt

        async def one(prompt: list[int], options: dict[str, Any]) -> None:
            try:
                if rng.random() < 0.5:
                    self._note(prompt, (await rt.agenerate(prompt, **options)).tokens)
                    return
                tokens: list[int] = []
                chunks = await rt.agenerate(prompt, stream=True, **options)
                try:
                    async for chunk in chunks:
                        tokens += chunk.tokens
                finally:
                    await chunks.aclose()
                self._note(prompt, tokens)
            except (SkippyError, Torn) as error:
                with self.lock:
                    self.rig.excused(error)

        for _ in range(self.actions // 3):
            tasks = [asyncio.create_task(one(*self._choose(rng))) for _ in range(4)]
            for task in tasks:
                if rng.random() < 0.4:
                    await asyncio.sleep(rng.choice([0, 0.001, 0.01]))
                    task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


@pytest.mark.parametrize("name", NAMES)
def test_many_threads(tiny: Callable[[str], Path], name: str) -> None:
    """Five threads and asyncio on three lanes; at quiet moments all must be right, with failures in half of it."""
    before = set(threading.enumerate())
    eviction, residency = SETTINGS[NAMES.index(name)]
    with rig_of(tiny(name), name, 7, eviction=eviction, residency=residency) as rig:
        for round_ in range(2):
            rig.faults.rate = 0.02 if round_ else 0.0
            Crowd(rig, threads=5, actions=14).run()
            rig.faults.rate = 0.0
            assert (rig.rt.engine.running, rig.rt.engine.waiting) == ([], [])
            rig.check(exact=not rig.faults.seen)
        assert rig.faults.seen
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
