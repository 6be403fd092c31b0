"""The disk tier under a model: after a restart nothing is evaluated twice, and its state is exact."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy.errors import StateError
from skippy.store.folder import Folder
from skippy.store.format import read_head
from tests.conftest import failing
from tests.disk_folder import kv_files, sizes
from tests.ledger import Answers, Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

ANSWER = 5
KINDS = ["llama", "gemma3", "mamba2", "falconh1", "lfm2swa"]


def text(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, 12]).integers(N_CONTROL, N_VOCAB, n)]


SYSTEM = text(100, 1)


class Rig:
    """Runtimes on one folder, one after the other; what one has evaluated the next may restore, and nothing else."""

    def __init__(self, path: Path, folder: Path, **cache: Any) -> None:
        self.path, self.folder = path, folder
        self.cache = {"min_tokens": 16, "ram": "64MiB", "residency": "keep", "logits_bytes": 0, **cache}
        self.answers = Answers(path, n_batch=128, flash_attn="on")
        self.open_: list[skippy.Runtime] = []
        self.ledgers: list[Ledger] = []
        self.evaluated = 0
        self.tiers: dict[str, int] = {}
        self.reason = ""

    def open(self, **cache: Any) -> skippy.Runtime:
        config = skippy.CacheConfig(**{**self.cache, "disk": self.folder, "disk_min_free": 0, **cache})
        rt = skippy.Runtime(self.path, n_ctx=1024, n_batch=128, n_ubatch=128, lanes=2, n_threads=1, cache=config)
        rt.cache.speeds.worth_restoring = lambda nbytes, tokens, tier="ram": True  # type: ignore[method-assign]
        ledger = Ledger.watch(rt)
        if self.ledgers:
            ledger.seen, ledger.rows = self.ledgers[0].seen, self.ledgers[0].rows
        self.ledgers.append(ledger)
        self.open_.append(rt)
        return rt

    def restart(self, **cache: Any) -> skippy.Runtime:
        self.open_.pop().close()
        return self.open(**cache)

    def ask(self, prompt: Sequence[int], rt: skippy.Runtime | None = None, **options: Any) -> list[int]:
        """A right answer from exact state; the tokens that are in the lane afterwards, and the last of the answer."""
        rt = rt or self.open_[-1]
        done = rt.generate(list(prompt), max_tokens=ANSWER, **options)
        self.evaluated, self.tiers, self.reason = done.reuse.evaluated_tokens, done.reuse.by_tier, done.reuse.reason
        assert [ledger.wrong for ledger in self.ledgers] == [[]] * len(self.ledgers)
        rt.check()
        self.answers.check(prompt, done.tokens, ANSWER)
        return [*prompt, *done.tokens]

    def close(self) -> None:
        for rt in self.open_:
            rt.close()
        self.answers.close()


Make = Callable[..., Rig]


@pytest.fixture
def make(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make_(name: str, **cache: Any) -> Rig:
        rigs.append(Rig(tiny(name), tmp_path / "kv", **cache))
        return rigs[-1]

    yield make_
    for rig in rigs:
        rig.close()


def evict_residents(rt: skippy.Runtime) -> None:
    while rt.cache.space.evict_resident("test"):
        pass


# --- restart ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_goes_on_after_a_restart(make: Make, name: str) -> None:
    rig = make(name)
    rig.open()
    one = rig.ask(SYSTEM + text(60, 2))
    one = rig.ask(one + text(30, 3))
    rt = rig.restart()
    assert (rt.cache.entries, rt.explain(one + text(31, 4)).cached_tokens) == (0, len(one) - 1)
    longer = rig.ask(one + text(31, 4))
    assert rig.evaluated == 32  # what is new, and the last token of the answer, which never was evaluated
    assert rig.tiers == {"resident": 0, "ram": 0, "disk": len(one) - 1}
    assert rig.ledgers[-1].checked == [len(one) - 1]
    rig.restart()
    rig.ask(longer + text(20, 5))
    assert rig.evaluated == 21
    rig.ask(one[:-1] + text(9, 6))  # the shorter one is there as well
    assert rig.evaluated == 9
    assert rig.open_[-1].stats()["failures"] == {}
    assert rig.open_[-1].cache.disk.verify() == []


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_mixes_tiers(make: Make, name: str) -> None:
    """The first part is in memory, the rest on disk."""
    rig = make(name)
    rig.open()
    first = rig.ask(SYSTEM + text(60, 2))
    rig.open_[-1].cache.close = lambda: None  # type: ignore[method-assign]
    rt = rig.open_[-1]
    evict_residents(rt)
    longer = rig.ask(first + text(80, 3))
    del rt.cache.close  # type: ignore[method-assign]
    rig.restart()
    rt = rig.open_[-1]
    for seed, in_ram in ((4, False), (5, True)):
        rig.ask(first)  # comes from disk, and is in memory from now on
        if in_ram:
            evict_residents(rt)
        rig.ask(longer + text(10, seed))
        in_memory = rig.tiers["resident"] + rig.tiers["ram"]
        assert rig.evaluated in (10, 11)  # the last token of the answer is that of the prompt for some
        if name != "mamba2":  # where only the deepest state is of use
            assert in_memory > 0
        assert rig.tiers["disk"] > 0
        rig.restart()
        rt = rig.open_[-1]


@pytest.mark.parametrize("name", KINDS)
def test_branches_and_a_shared_system_prompt(make: Make, name: str) -> None:
    rig = make(name, ram="8MiB")
    rig.open()
    paths = [rig.ask(SYSTEM + text(60, seed)) for seed in (2, 3, 4)]
    paths = [rig.ask(path + text(30, 7)) for path in paths]
    rig.restart()
    for path in paths:
        rig.ask(path + text(12, 8))
        assert rig.evaluated == 13
    rig.ask(SYSTEM + text(50, 9))
    assert rig.evaluated == 50
    if name in ("llama", "gemma3"):  # the system prompt is there once
        starts = [row.entry.start for row in rig.open_[-1].cache.disk.rows() if row.entry.kind == "segment"]
        assert starts.count(0) == 1


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_conversations_over_restarts_and_little_ram(make: Make, name: str, seed: int) -> None:
    """Whatever is in the pool, in RAM, on disk or gone: exact state and right answers."""
    rig = make(name, ram="192KiB" if name == "llama" else "512KiB", residency="auto")
    rig.open()
    rng = np.random.default_rng(seed)
    talks: list[list[int]] = [SYSTEM]
    reused = 0
    for _ in range(14):
        talk = talks[rng.integers(len(talks))]
        talk = talk[: rng.integers(80, len(talk) + 1)] if rng.random() < 0.3 else talk
        if len(talk) < 500:
            talks.append(rig.ask(talk + text(int(rng.integers(5, 60)), int(rng.integers(1000)))))
            reused += rig.tiers["disk"]
        if rng.random() < 0.25:
            rig.restart()
        if rng.random() < 0.3:
            evict_residents(rig.open_[-1])
    assert rig.open_[-1].stats()["failures"] == {}
    disk = rig.open_[-1].cache.disk
    disk.flush()
    assert (disk.verify(), disk.counts["quarantined"], disk.counts["damaged_in_memory"]) == ([], 0, 0)
    assert reused > 0


def test_two_runtimes_share_a_folder(make: Make) -> None:
    rig = make("llama")
    one, two = rig.open(), rig.open()
    first = rig.ask(SYSTEM + text(60, 2), one)
    evict_residents(one)
    rig.ask(first, one)  # its second use: worth keeping
    one.cache.disk.flush()
    rig.ask(first + text(10, 3), two)
    assert rig.tiers["disk"] >= 160
    one.clear()  # while the other one goes on
    rig.ask(first + text(10, 4), two)
    assert rig.evaluated == 10  # it has it in memory by now


def test_nothing_of_another_namespace_is_used(make: Make) -> None:
    rig = make("llama")
    rig.open()
    rig.ask(SYSTEM, namespace="alice")
    rig.restart()
    rig.ask(SYSTEM, namespace="bob")
    assert (rig.evaluated, rig.reason) == (100, "never_seen")
    rig.ask(SYSTEM, namespace="alice")
    assert rig.evaluated == 1


def test_mode_lookup_writes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make("llama")
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rig.open_.pop().close()

    def look() -> dict[str, tuple[bytes, int]]:
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in rig.folder.iterdir()}

    before = look()
    monkeypatch.setenv("SKIPPY_MODE", "lookup")
    rig.open()
    assert rig.open_[-1].cache.config.mode == "lookup"
    rig.ask(path + text(10, 3))
    assert (rig.evaluated, rig.tiers["disk"]) == (11, len(path) - 1)
    rig.ask(text(90, 4))
    rig.open_.pop().close()
    assert look() == before


def test_exact_repeat_and_kept_logits(make: Make) -> None:
    rig = make("llama", logits_bytes="512KiB")
    rig.open()
    rig.ask(SYSTEM)
    rig.restart()
    rig.ask(SYSTEM)
    assert rig.evaluated == 1
    rig.ask(SYSTEM)
    assert rig.evaluated == 0


def test_a_slow_disk_is_not_waited_for(make: Make) -> None:
    """Where evaluating is faster, nothing is restored; and not for ever, should the disk become faster."""
    rig = make("llama")
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rt = rig.restart()
    del rt.cache.speeds.worth_restoring  # type: ignore[method-assign]
    rt.cache.speeds.prefilled(10_000, 0.001)
    rt.cache.speeds.restored(1000, 1.0, "disk")
    rig.ask(path)
    assert (rig.tiers["disk"], rig.reason) == (0, "not_worth_it")


# --- skippy.Llama -----------------------------------------------------------------------------------------------------


def test_llama_goes_on_after_a_restart(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny("llama")
    config = skippy.CacheConfig(min_tokens=16, ram="64MiB", disk=tmp_path / "kv", disk_min_free=0)

    def ask(llama: Any, prompt: list[int]) -> list[int]:
        out = []
        for token in llama.generate(prompt, temp=0.0):
            out.append(token)
            if len(out) == ANSWER:
                break
        return out

    def open_(**settings: Any) -> Any:
        return skippy.Llama(os.fspath(path), n_ctx=512, n_batch=128, n_threads=1, verbose=False, **settings)

    plain = open_(cache=skippy.CacheConfig(mode="disabled"))
    prompt = SYSTEM + text(60, 2)
    expected = ask(plain, prompt), ask(plain, prompt + text(10, 3))
    plain.close()
    one = open_(cache=config)
    assert ask(one, prompt) == expected[0]
    one.close()
    assert len(kv_files(tmp_path / "kv")) > 0
    two = open_(cache=config)
    assert ask(two, prompt + text(10, 3)) == expected[1]
    assert two.last_reuse.by_tier["disk"] == 160
    assert two.last_reuse.evaluated_tokens == 10
    two.close()


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 8
    file.write_bytes(data)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def missing(file: Path) -> None:
    file.unlink()


def a_link(file: Path) -> None:
    elsewhere = file.parent.parent / file.name
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize("name", ["llama", "falconh1", "mamba"])
@pytest.mark.parametrize("damage", [flip, cut_short, empty, missing, a_link], ids=lambda f: f.__name__)
def test_t8_damage_is_a_miss_with_its_reason(
    make: Make, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(name)
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rt = rig.restart()
    for file in kv_files(rig.folder):
        damage(file)
    live = rt.generate(text(50, 7), max_tokens=30, stream=True)
    next(live)
    rig.ask(path)
    assert (rig.reason, rig.evaluated, sum(rig.tiers.values())) == ("corrupt", len(path), 0)
    found = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    counts = rt.cache.disk.counts
    if damage is missing:
        assert counts["dropped:missing"] > 0
        assert found == []
    else:
        assert len(found) == counts["quarantined"] == counts["dropped:corrupt"] > 0
        assert len(list((rig.folder / "quarantine").iterdir())) == counts["quarantined"]
    assert len(list(live)) > 1  # the live conversation is not lost
    evict_residents(rt)
    rig.ask(path)
    assert (rig.evaluated, rig.reason) == (1, "hit")  # it is in memory, and the damage is not met again
    rig.restart()
    rig.ask(path + text(10, 3))
    assert rig.evaluated == 10
    disk = rig.open_[-1].cache.disk
    disk.verify(fix=True)  # what nobody has come across may still be damaged
    assert disk.verify() == []


def test_t8_of_another_model_or_kv_type(make: Make, tiny: Callable[[str], Path]) -> None:
    """Under its own name it is never looked at; under ours it is refused."""
    rig = make("gemma3")
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    ours = kv_files(rig.folder)
    rig.open_.pop().close()
    ours = kv_files(rig.folder)
    config = skippy.CacheConfig(**{**rig.cache, "disk": rig.folder, "disk_min_free": 0})
    with skippy.Runtime(
        rig.path, n_ctx=1024, n_batch=128, lanes=2, type_k="q8_0", type_v="q8_0", cache=config
    ) as other:
        done = other.generate(path, max_tokens=1)
        assert done.reuse.reason == "never_seen"
    theirs = [file for file in kv_files(rig.folder) if file not in ours]
    assert theirs
    assert read_head(theirs[0])[0].namespace != read_head(ours[0])[0].namespace
    for file in ours:
        file.write_bytes(theirs[0].read_bytes())
    rt = rig.open()
    rig.ask(path)
    assert (rig.reason, rig.evaluated) == ("corrupt", len(path))
    assert rt.cache.disk.counts["quarantined"] > 0
    assert all(file.exists() for file in theirs)


def test_a_state_that_llama_cpp_refuses_is_set_aside(make: Make) -> None:
    rig = make("llama")
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rt = rig.restart()

    def refuse(real: Any, seq: int, state: Any, flags: int = 0) -> None:
        held = np.frombuffer(state, np.uint8)  # an array over the file lives on in the traceback
        raise StateError(f"made to fail with {held.size} bytes")

    with failing(rt.cache.pool, load=refuse):
        rig.ask(path)
    assert (rig.reason, rig.evaluated) == ("corrupt", len(path))
    assert rt.cache.disk.counts["quarantined"] == len(list((rig.folder / "quarantine").iterdir())) == 1
    rig.restart()
    rig.ask(path + text(10, 3))
    assert rig.evaluated == 10


def test_a_part_of_a_chain_is_gone(make: Make) -> None:
    """What is before the gap is still used, and the rest evaluated and written anew."""
    rig = make("llama")
    rig.open()
    path = SYSTEM
    for seed in (2, 3, 4):
        path = rig.ask(path + text(60, seed))
        rig.restart()
    files = sorted((read_head(file)[0].start, file) for file in kv_files(rig.folder))
    assert len(files) == 3
    files[1][1].unlink()
    rig.ask(path)
    assert rig.tiers["disk"] == files[1][0]
    rig.restart()
    rig.ask(path + text(10, 9))
    assert rig.evaluated == 10


def test_the_disk_fails_in_the_middle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make("llama")
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rt = rig.restart()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("skippy.store.format.os.open", fail)
        rig.ask(path)
    assert (rig.reason, rig.evaluated) == ("corrupt", len(path))
    assert "Input/output" in rt.stats()["disk"]["off"]
    rig.ask(path)
    assert rig.evaluated == 1
    assert len(kv_files(rig.folder)) > 0


def test_damage_in_ram_does_not_reach_the_disk(make: Make) -> None:
    rig = make("llama")
    rt = rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    evict_residents(rt)
    for node in rt.cache.tree.entries("segment"):
        rt.cache.shelf.segment(node).block.view[-50] ^= 1
    rig.restart()
    assert kv_files(rig.folder) == []
    rig.ask(path)
    assert rig.evaluated == len(path)


# --- what is written, and when ----------------------------------------------------------------------------------------


def test_a_growing_conversation_writes_deltas(make: Make) -> None:
    """Bytes written over bytes of new tokens' state: under 1.1, in one process and over restarts."""
    for restarts in (False, True):
        rig = make("llama")
        rig.folder = rig.folder.parent / f"kv-{restarts}"
        rt = rig.open()
        per_token = rt.capability.bytes_per_token
        path, written = SYSTEM, 0
        for seed in range(12):
            path = rig.ask(path + text(50, seed))
            evict_residents(rt)
            rt.cache.spill.path(rt.namespace_hash(""), np.array(path[:-1], np.int32))
            rt.cache.disk.flush()
            if restarts:
                written += rt.cache.disk.bytes_written
                rt = rig.restart()
        written += rt.cache.disk.bytes_written
        rig.open_.pop().close()
        written = max(written, sum(file.stat().st_size for file in kv_files(rig.folder)))
        assert written / (per_token * (len(path) - 1)) < 1.1


def test_a_busy_writer_costs_no_request_anything(make: Make) -> None:
    rig = make("llama", ram="256KiB")
    rt = rig.open()
    disk = rt.cache.disk
    disk._writer.most = 2**18
    go = threading.Event()
    real = disk._files.store

    def slow(*args: Any) -> None:
        assert go.wait(120)
        real(*args)

    disk._files.store = slow
    for seed in range(12):
        rig.ask(text(200, seed))
        evict_residents(rt)
    assert disk.stats()["queued_bytes"] <= 2**18 + 200 * rt.capability.bytes_per_token
    assert disk.counts["not_queued"] > 0
    go.set()
    disk.flush()
    assert disk.counts["saves"] > 0


def test_a_pin_is_written_when_it_is_closed(make: Make) -> None:
    rig = make("llama")
    rt = rig.open()
    pin = rt.pin(SYSTEM)
    assert rt.cache.disk.rows() == []
    pin.close()
    rt.cache.disk.flush()
    assert [(row.entry.start, row.entry.end) for row in rt.cache.disk.rows()] == [(0, 100)]
    rig.ask(SYSTEM, rig.open())  # another process
    assert rig.evaluated == 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1"])
def test_a_shared_prefix_is_written_on_its_second_use(make: Make, name: str) -> None:
    rig = make(name)
    rt = rig.open()
    rig.ask(SYSTEM + text(60, 2))
    evict_residents(rt)
    assert rt.cache.disk.rows() == []
    for seed in (3, 4):
        rig.ask(SYSTEM + text(60, seed))
        evict_residents(rt)
    assert rig.tiers["ram"] == 100
    rt.cache.disk.flush()
    assert max(row.entry.end for row in rt.cache.disk.rows()) == 100
    rig.ask(SYSTEM + text(50, 5), rig.open())
    assert (rig.evaluated, rig.tiers["disk"]) == (50, 100)


def test_pins_are_written_at_the_end(make: Make) -> None:
    rig = make("llama")
    rt = rig.open()
    rt.pin(SYSTEM)
    rig.restart()
    rig.ask(SYSTEM)
    assert rig.evaluated == 1


@pytest.mark.parametrize("name", ["falconh1", "lfm2swa"])
def test_making_room_does_not_spoil_what_is_being_saved(make: Make, name: str) -> None:
    """A state lies in working memory while room is made for it, and what leaves is cut for the disk."""
    rig = make(name)
    rt = rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rig.restart()
    rt = rig.open_[-1]
    longer = rig.ask(path + text(120, 3))  # in RAM from its first token on, on disk only its head
    entry = max(rt.cache.tree.entries("segment"), key=lambda node: node.length)
    store = rt.cache.store
    before = rt.cache.shelf.segment(entry)
    store.scratch[:] = 7
    marks = store.scratch.copy()
    rt.cache.spill.leaving(entry.namespace, rt.cache.tree.tokens(entry), before)
    assert np.array_equal(store.scratch, marks)
    rig.restart()
    rig.ask(longer + text(9, 4))
    assert rig.evaluated == 10


def test_forgetting(make: Make) -> None:
    rig = make("llama")
    rig.open()
    secret = rig.ask(SYSTEM + text(60, 2))
    other = rig.ask(SYSTEM + text(60, 3))
    theirs = rig.ask(SYSTEM, namespace="bob")
    rt = rig.restart()
    assert rt.forget(secret[:150]) > 0
    rig.ask(secret)
    assert rig.evaluated == len(secret) - 100
    rt.forget(secret[:150])
    rt = rig.restart()
    assert rt.explain(secret).cached_tokens == 100
    rig.ask(other)
    assert rig.evaluated == 1
    rt.forget()
    rt = rig.restart()
    assert rt.explain(other).cached_tokens == 0
    assert rt.explain(theirs, namespace="bob").cached_tokens == len(theirs) - 1
    rt.clear()
    assert kv_files(rig.folder) == []
    assert sizes(rig.folder) < 300_000


# --- the end ----------------------------------------------------------------------------------------------------------

AT_EXIT = """
    import sys, threading, time
    import skippy
    path, folder, how = sys.argv[1:]
    config = skippy.CacheConfig(min_tokens=16, ram="64MiB", disk=folder, disk_min_free=0)
    if how == "llama":
        llama = skippy.Llama(path, n_ctx=512, n_batch=128, n_threads=1, verbose=False, cache=config)
        next(iter(llama.generate(list(range(10, 150)), temp=0.0)))
    else:
        rt = skippy.Runtime(path, n_ctx=1024, n_batch=128, n_ubatch=128, n_threads=1, lanes=2, cache=config)
        rt.generate(list(range(10, 150)), max_tokens=3)
    if how == "no threads":
        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = refuse
    if how == "raise":
        raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["runtime", "llama", "no threads", "raise"])
def test_what_nobody_closed_is_written_at_exit(make: Make, how: str) -> None:
    rig = make("llama")
    code = textwrap.dedent(AT_EXIT)
    arguments = [sys.executable, "-c", code, os.fspath(rig.path), os.fspath(rig.folder), how]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (3 if how == "raise" else 0, "")
    assert sum(read_head(file)[0].tokens.size for file in kv_files(rig.folder)) >= 140
    if how != "llama":
        assert rig.open().generate(list(range(10, 150)), max_tokens=1).reuse.evaluated_tokens == 1


def test_a_runtime_that_is_let_go_of_is_not_kept_alive(make: Make) -> None:
    from skippy.exits import _open

    rig = make("llama")
    rt = rig.open()
    assert rt in _open
    rig.open_.clear()
    rig.ledgers.clear()
    rt.cache.observer = None
    rt.close()
    seen = weakref.ref(rt)
    del rt
    gc.collect()
    assert seen() is None


def test_e11_ctrl_c_while_closing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make("llama", ram="64MiB")
    rig.open()
    path = rig.ask(SYSTEM + text(60, 2))
    rt = rig.restart()
    for seed in range(3, 9):
        rig.ask(text(150, seed))
    reached = threading.Event()
    real = Folder.publish

    def slow(*args: Any) -> None:
        reached.set()
        time.sleep(0.4)
        real(*args)

    monkeypatch.setattr(Folder, "publish", slow)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.6)
    try:
        with pytest.raises(KeyboardInterrupt):
            rt.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert reached.is_set()
    monkeypatch.undo()
    rig.open_.clear()
    rt.context.close()
    rt.model.close()
    assert not [name for name in os.listdir(rig.folder) if name.endswith(".tmp")]
    rt = rig.open()
    assert rt.cache.disk.verify() == []
    rig.ask(path + text(10, 20))
    assert rig.evaluated == 11


def test_stats_can_be_printed(make: Make) -> None:
    rig = make("llama")
    rt = rig.open()
    rig.ask(SYSTEM)
    assert json.loads(json.dumps(rt.stats()["disk"]))["off"] is None
