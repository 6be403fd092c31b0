"""The writer of the disk tier by itself: short pieces with a pause between them, unless somebody waits for it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from skippy.store.folder import Cancelled, Folder, pieces
from skippy.store.writer import Job, Writer
from tests.disk_folder import kv_files, offer, open_tier, path_of, reach


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the writer has paused, each time."""
    found: list[float] = []
    monkeypatch.setattr("skippy.store.writer.time.sleep", found.append)
    return found


class Work:
    """A job of five pieces, which begins when it may and tells of each."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.may = threading.Event()
        self.began = threading.Event()
        self.answers: list[bool] = []

    def run(self, job: Job) -> None:
        self.began.set()
        assert self.may.wait(10)
        self.answers += [self.writer.between(job) for _ in range(5)]


def test_a_job_that_nobody_waits_for_pauses_between_its_pieces(pauses: list[float]) -> None:
    writer = Writer(threading.RLock(), 100)
    work, done = Work(writer), threading.Event()
    writer.put(Job(work.run, 10))
    writer.put(Job(lambda job: done.set()))
    work.may.set()
    assert done.wait(10)
    assert pauses == [0.001] * 5
    assert work.answers == [False] * 5
    writer.stop()


def test_it_does_not_pause_while_somebody_waits_for_it(pauses: list[float]) -> None:
    writer = Writer(threading.RLock(), 100)
    work = Work(writer)
    writer.put(Job(work.run, 10))
    flushing = threading.Thread(target=writer.flush, args=(lambda left: work.may.set(),))  # which says it is waiting
    flushing.start()
    flushing.join(10)
    assert not flushing.is_alive()
    assert (work.answers, pauses) == ([False] * 5, [])
    writer.stop()


def test_it_does_not_pause_while_more_waits_than_half_of_what_may(pauses: list[float]) -> None:
    writer = Writer(threading.RLock(), 100)
    work, done = Work(writer), threading.Event()
    writer.put(Job(work.run, 30))
    writer.put(Job(lambda job: done.set(), 30))
    work.may.set()
    assert done.wait(10)
    assert (work.answers, pauses) == ([False] * 5, [])
    writer.stop()


def test_a_job_that_is_discarded_is_told_at_its_next_piece(pauses: list[float]) -> None:
    writer = Writer(threading.RLock(), 100)
    work = Work(writer)
    writer.put(Job(work.run, 10, "a"))
    assert work.began.wait(10)

    def choose(job: Job) -> bool:
        work.may.set()
        return job.namespace == "a"

    with writer.work:  # it cannot end before it is told
        job = writer._running
        assert job is not None
        job.cancelled = True
    writer.discard(choose)
    assert (work.answers, pauses) == ([True] * 5, [])
    writer.stop()


def test_a_job_that_is_done_by_whoever_queues_it_does_not_pause(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = Writer(threading.RLock(), 100)
    work = Work(writer)
    work.may.set()
    writer.put(Job(work.run, 10))
    assert (work.answers, pauses) == ([False] * 5, [])


@pytest.mark.parametrize("size", [0, 1, 2**18 - 1, 2**18, 2**18 + 1, 10**6])
def test_pieces_are_the_whole(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    calls: list[int] = []
    found = list(pieces(data, lambda: bool(calls.append(1))))
    assert b"".join(found) == data.tobytes()
    assert len(calls) == len(found) == -(-size // 2**18)
    path = tmp_path / "file"
    with path.open("wb") as file:
        Folder.fill(file.fileno(), data)
    assert path.read_bytes() == data.tobytes()


def test_what_is_not_wanted_any_more_is_not_written_on() -> None:
    given = iter([False, False, True])
    found = pieces(bytes(10**6), lambda: next(given))
    assert [len(next(found)), len(next(found))] == [2**18] * 2
    with pytest.raises(Cancelled):
        next(found)


def test_a_state_of_many_pieces_is_checked_as_a_whole(tmp_path: Path) -> None:
    """Its checksum is made piece by piece, and is that of all of them."""
    tier = open_tier(tmp_path / "kv")
    offer(tier, path_of(1000, 1), per_token=1000)
    tier._writer.flush()
    assert reach(tier, path_of(1000, 1)) == 1000
    (file,) = kv_files(tmp_path / "kv")
    assert file.stat().st_size > 3 * 2**18
    data = np.arange(10**6, dtype=np.uint8)
    whole = xxhash.xxh3_64()
    for piece in pieces(data, lambda: False):
        whole.update(piece)
    assert whole.intdigest() == xxhash.xxh3_64_intdigest(data)
    tier.close()
