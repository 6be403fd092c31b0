"""Writers that are killed, that race, and that are stopped: what was reported as written is there, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.errors import StateError
from skippy.store import DiskTier
from skippy.store.folder import Folder
from skippy.store.format import Entry, digest
from skippy.store.index import Row
from skippy.store.known import Known, least_worth
from tests.disk_folder import (
    NAMESPACE,
    OTHER,
    kv_files,
    offer,
    offer_checkpoint,
    open_tier,
    path_of,
    put,
    reach,
    read,
    sizes,
)

ROOT = Path(__file__).parent.parent


def child(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )


def left_over(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


# --- killed -----------------------------------------------------------------------------------------------------------

# One interpreter for all rounds: each forks a writer, which is killed.
KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    from tests.disk_folder import open_tier, offer, path_of

    folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)

    def write(number, out):
        tier = open_tier(folder, capacity=2**40)  # nothing leaves
        for i in range(1000):
            path = path_of(120, 1000 * number + i)
            for end in (40, 120):
                offer(tier, path[:end], per_token=rng.choice([64, 4096]))
            tier.flush()
            os.write(out, f"{1000 * number + i}\\n".encode())

    for number in range(rounds):
        into, out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(into)
            try:
                write(number, out)
            finally:
                os._exit(1)
        os.close(out)
        first = os.read(into, 1 << 16)  # it has begun
        time.sleep(rng.random() * 0.08)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said = first
        while more := os.read(into, 1 << 16):
            said += more
        os.close(into)
        print(number, *said.decode().split("\\n")[:-1], flush=True)
        if sys.stdin.readline() != "next\\n":
            break
"""


def test_killed_at_random_points(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    rounds = 24
    process = child(KILLED, folder, 7, rounds, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    written: list[int] = []
    cleaned = adopted = 0
    for _ in range(rounds):
        written += [int(seed) for seed in process.stdout.readline().split()[1:]]
        tier = open_tier(folder, capacity=2**40)
        assert tier.off is None
        assert left_over(folder) == []
        assert tier.verify() == []
        for seed in written:
            path = path_of(120, seed)
            found = tier.find(NAMESPACE, path)
            assert found.reach == 120
            for span in found.spans:
                tier.open(span.payload).close()
        assert tier.counts["quarantined"] == 0
        cleaned += tier.counts["cleaned"]
        adopted += tier.counts["adopted"]
        assert tier._files.index.pending() == []
        tier.close()
        process.stdin.write("next\n")
        process.stdin.flush()
    assert process.wait(30) == 0
    process.stdin.close()
    process.stdout.close()
    assert len(written) > rounds
    assert cleaned  # some were killed in the middle of a file


@pytest.mark.parametrize("call", ["fill", "publish", "after"])
def test_killed_at_each_point(tmp_path: Path, call: str) -> None:
    """Before the bytes are there, before the file has its name, and before the index knows of it."""
    folder = tmp_path / "kv"
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from skippy.store.folder import Folder
        from tests.disk_folder import open_tier, put, path_of
        tier = open_tier(Path({str(folder)!r}))
        put(tier, path_of(40, 1))
        real = Folder.publish
        def die(*args):
            if {call!r} == "after":
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(Folder, {"fill" if call == "fill" else "publish"!r}, staticmethod(die) if {call!r} == "fill" else die)
        put(tier, path_of(40, 2))
    """
    process = child(code)
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()
    assert len(left_over(folder)) == (call != "after")
    tier = open_tier(folder)
    assert reach(tier, path_of(40, 1)) == 40
    assert reach(tier, path_of(40, 2)) == (40 if call == "after" else 0)
    assert (tier.counts["cleaned"], tier.counts["adopted"]) == ((0, 1) if call == "after" else (1, 0))
    assert (left_over(folder), tier.verify(), tier._files.index.pending()) == ([], [], [])
    tier.close()


def test_a_file_that_is_being_written_is_not_cleaned_up(tmp_path: Path) -> None:
    one = open_tier(tmp_path / "kv")
    reached, go = threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        reached.set()
        assert go.wait(30)
        Folder.publish(one._files.folder, *args)

    one._files.folder.publish = slow  # type: ignore[method-assign]
    offer(one, path_of(40, 1))
    assert reached.wait(30)
    two = open_tier(tmp_path / "kv")
    assert two.verify() == []
    assert len(left_over(tmp_path / "kv")) == 1
    go.set()
    one.flush()
    assert reach(two, path_of(40, 1)) == 40
    one.close()
    two.close()


# --- stopped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["flush", "close"])
def test_e11_ctrl_c_while_saving_leaves_the_old_file_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "kv"
    tier = open_tier(folder)
    put(tier, path_of(40, 1))
    reached = threading.Event()
    real = os.write

    def slow(descriptor: int, data: Any) -> int:
        reached.set()
        time.sleep(0.01)
        return real(descriptor, data[:100])

    monkeypatch.setattr(os, "write", slow)
    for seed in range(2, 30):
        offer(tier, path_of(4000, seed), per_token=64)
    assert reached.wait(30)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            getattr(tier, where)()
        if where == "flush":
            tier.close(flush=False)
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.undo()
    assert left_over(folder) == []
    tier = open_tier(folder)
    assert tier.verify() == []
    assert [span[1] for span in read(tier, tier.find(NAMESPACE, path_of(40, 1)), path_of(40, 1))] == [40]
    assert len(tier.rows()) < 5
    tier.close()


def test_progress_is_said_where_closing_takes_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(tmp_path / "kv")
    real = tier._files.store

    def slow(*args: Any) -> None:
        time.sleep(0.9)
        real(*args)

    tier._files.store = slow  # type: ignore[method-assign]
    for seed in range(3):
        offer(tier, path_of(40, seed))
    tier.close()
    assert any("left" in record.message for record in caplog.records)
    assert len(kv_files(tmp_path / "kv")) == 3


# --- the queue --------------------------------------------------------------------------------------------------------


class Blocked:
    """Holds the writer of a tier back until it is let go."""

    def __init__(self, tier: DiskTier) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        real = tier._files.store

        def store(*args: Any) -> None:
            self.reached.set()
            assert self.go.wait(60)
            real(*args)

        tier._files.store = store  # type: ignore[method-assign]


def test_an_offer_never_waits_for_the_disk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    tier._writer.most = 2**20
    blocked = Blocked(tier)
    longest = 0.0
    for seed in range(40):
        began = time.perf_counter()
        offer(tier, path_of(1000, seed), per_token=64)
        assert reach(tier, path_of(1000, seed)) == 0  # it cannot be found before it is written
        tier.touch([])
        longest = max(longest, time.perf_counter() - began)
    assert longest < 0.25
    assert tier.stats()["queued_bytes"] <= 2**20
    assert tier.counts["not_queued"] == 40 - 2**20 // 64_000
    blocked.go.set()
    tier.flush()
    assert len(kv_files(tmp_path / "kv")) == 2**20 // 64_000
    assert tier.stats()["queued_bytes"] == 0
    tier.close()


def test_a_locked_index_delays_nobody(tmp_path: Path) -> None:
    """Another process is in the middle of a transaction: look-ups, offers and touches go on."""
    tier, other = open_tier(tmp_path / "kv"), open_tier(tmp_path / "kv")
    put(tier, path_of(40, 1))
    with other._files.index.transaction():
        began = time.perf_counter()
        found = tier.find(NAMESPACE, path_of(40, 1))
        tier.open(found.spans[0].payload).close()
        tier.touch([found.spans[0].payload])
        offer(tier, path_of(40, 2))
        assert time.perf_counter() - began < 0.5
    tier.flush()
    assert reach(other, path_of(40, 2)) == 40
    assert {row.hits for row in open_again(tmp_path / "kv")} == {0, 1}
    tier.close()
    other.close()


def open_again(folder: Path) -> list[Any]:
    tier = open_tier(folder)
    rows = tier.rows()
    tier.close()
    return rows


def test_whoever_is_patient_waits_for_room(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    tier._writer.most = 2**17
    with tier.patiently():
        for seed in range(12):
            offer(tier, path_of(1000, seed), per_token=64)
    tier.close()
    assert len(kv_files(tmp_path / "kv")) == 12
    assert tier.counts["not_queued"] == 0


def test_a_job_that_fails_in_an_unexpected_way_does_not_end_the_writer(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    real = tier._files.store

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    tier._files.store = fail  # type: ignore[method-assign]
    put(tier, path_of(40, 1))
    tier._files.store = real  # type: ignore[method-assign]
    put(tier, path_of(40, 1))
    assert reach(tier, path_of(40, 1)) == 40
    tier.close()


def test_where_no_thread_can_be_started_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is so at exit, from Python 3.12 on."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    tier = open_tier(tmp_path / "kv")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with tier.patiently():
        for seed in range(3):
            offer(tier, path_of(40, seed))
    tier.close()
    assert len(kv_files(tmp_path / "kv")) == 3


def test_a_tier_that_is_let_go_of_ends_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    monkeypatch.setattr("skippy.store.writer._IDLE", 0.05)
    tier = open_tier(tmp_path / "kv")
    offer(tier, path_of(40, 1))
    seen = weakref.ref(tier)
    del tier
    until = time.monotonic() + 20
    while seen() is not None and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()
    assert seen() is None
    assert len(kv_files(tmp_path / "kv")) == 1  # what was queued has been written
    assert not any(thread.name == "skippy-disk" for thread in threading.enumerate())


# --- two processes ----------------------------------------------------------------------------------------------------


def test_one_finds_what_the_other_writes_without_a_restart(tmp_path: Path) -> None:
    one, two = open_tier(tmp_path / "kv"), open_tier(tmp_path / "kv")
    for seed in range(6):  # in turns: what one adds itself must not hide what the other has added before
        writer, reader = (one, two) if seed % 2 else (two, one)
        path = path_of(60, seed)
        put(writer, path[:30])
        put(writer, path, 0)
        assert read(reader, reader.find(NAMESPACE, path), path) == [(0, 30), (30, 60)]
    assert len(one.rows()) == len(two.rows()) == 12
    before = two.bytes_written
    put(two, path_of(60, 1))  # the other one's: not written again
    assert two.bytes_written == before
    offer_checkpoint(one, path_of(50, 9))
    one.flush()
    assert two.find(NAMESPACE, path_of(60, 10)).checkpoints == ()
    assert [state.length for state in two.find(NAMESPACE, path_of(50, 9)).checkpoints] == [50]
    one.close()
    two.close()


def test_both_write_the_same_at_once(tmp_path: Path) -> None:
    one, two = open_tier(tmp_path / "kv"), open_tier(tmp_path / "kv")
    first, second = Blocked(one), Blocked(two)
    offer(one, path_of(40, 1))
    offer(two, path_of(40, 1))
    first.go.set()
    one.flush()
    second.go.set()
    two.flush()
    assert (one.counts["saves"], two.counts["saves"], two.counts["there_already"]) == (1, 0, 1)
    assert reach(one, path_of(40, 1)) == reach(two, path_of(40, 1)) == 40
    assert (len(one.rows()), len(two.rows())) == (1, 1)
    one.close()
    two.close()


def test_deleting_what_another_is_reading(tmp_path: Path) -> None:
    one, two = open_tier(tmp_path / "kv"), open_tier(tmp_path / "kv")
    path = path_of(2000, 1)
    put(one, path)
    file = two.open(two.find(NAMESPACE, path).spans[0].payload)
    planned = two.find(NAMESPACE, path).spans[0].payload
    assert one.erase() == 1
    assert kv_files(tmp_path / "kv") == []
    assert len(bytes(file.view)) == 2000 * 64  # what is mapped stays
    file.close()
    with pytest.raises(StateError):
        two.open(planned)
    assert (reach(two, path), two.off) == (0, None)
    one.close()
    two.close()


RACING = """
    import random, sys, time
    from pathlib import Path
    from skippy.errors import StateError
    from tests.disk_folder import NAMESPACE, offer, offer_checkpoint, open_tier, path_of, read

    folder, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rng = random.Random(seed)
    tier = open_tier(folder, capacity=3 * 2**20)
    until = time.monotonic() + seconds
    hits = gone = 0
    while time.monotonic() < until:
        path = path_of(300, rng.randrange(40))
        end = rng.choice([50, 120, 300])
        if rng.random() < 0.5:
            offer(tier, path[:end], per_token=rng.choice([64, 256]))
            if rng.random() < 0.3:
                tier.flush()
        elif rng.random() < 0.02:
            tier.erase() if rng.random() < 0.3 else tier.prune(2**20)
        found = tier.find(NAMESPACE, path)
        for span in found.spans:
            try:
                file = tier.open(span.payload)
                hits += 1
            except StateError:
                gone += 1
                continue
            file.close()
            tier.touch([span.payload])
    tier.flush()
    assert tier.off is None, tier.off
    assert not tier.counts["quarantined"], tier.counts
    print(hits, gone, tier.counts["saves"], tier.counts["dropped:bytes"])
    tier.close()
"""


@contextmanager
def standing_still(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """In here these processes do not run: what is counted is what was there at one moment."""
    running = [process for process in processes if process.poll() is None]
    for process in running:  # one that ends now stays as a zombie until it is polled: these calls find it
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        yield
    finally:
        for process in running:
            os.kill(process.pid, signal.SIGCONT)


def test_two_processes_write_and_evict_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    seconds = 8
    processes = [child(RACING, folder, seed, seconds) for seed in (1, 2)]
    largest = 0
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        with standing_still(processes):
            if folder.exists():
                largest = max(largest, sizes(folder))
    results = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for hits, _, saves, evicted in results:
        assert int(hits) > 20
        assert int(saves) > 20
        assert int(evicted) > 0
    assert largest <= 3 * 2**20
    tier = open_tier(folder)
    assert (tier.verify(), left_over(folder), tier._files.index.pending()) == ([], [], [])
    assert (tier.counts["adopted"], tier.counts["missing"]) == (0, 0)
    tier.close()


# --- the budget -------------------------------------------------------------------------------------------------------


def test_t11_the_cap_counts_index_and_files_and_is_never_exceeded(tmp_path: Path) -> None:
    folder, cap = tmp_path / "kv", 10 * 10**6
    tier = open_tier(folder, capacity=cap)
    largest = 0
    real = os.write

    def watching(descriptor: int, data: Any) -> int:
        nonlocal largest
        written = real(descriptor, data)
        largest = max(largest, sizes(folder))
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", watching)
        for seed in range(10):
            put(tier, path_of(3000, seed), per_token=1000)
        assert (reach(tier, path_of(3000, 9)), reach(tier, path_of(3000, 0))) == (3000, 0)
        kept, rows = kv_files(folder), len(tier.rows())
        put(tier, path_of(3000, 99), per_token=4000)  # 12 MB: refused before anything leaves for it
        assert (kv_files(folder), len(tier.rows()), tier.counts["not_queued"]) == (kept, rows, 1)
        put(tier, path_of(9, 98), per_token=1_100_000)  # 9.9 MB, which with the index is too much as well
        assert (kv_files(folder), tier.counts["no_room"]) == (kept, 1)
        for seed in range(32):
            offer_checkpoint(tier, path_of(100, 100 + seed), 10**6)
            tier.flush()
    assert cap * 0.7 < largest <= cap
    assert sizes(folder) <= cap
    assert tier.verify() == []
    assert tier.erase() > 5
    assert kv_files(folder) == []
    assert sizes(folder) < 300_000
    tier.close()


def test_many_small_ones_stay_under_the_cap_too(tmp_path: Path) -> None:
    """Where the index is most of it."""
    folder, cap = tmp_path / "kv", 2 * 2**20
    tier = open_tier(folder, capacity=cap)
    for seed in range(160):
        put(tier, path_of(1000, seed), per_token=2)
        assert sizes(folder) <= cap
    assert len(tier.rows()) > 50
    assert tier.verify() == []
    tier.close()


def test_eviction_goes_down_to_85_percent(tmp_path: Path) -> None:
    folder, cap = tmp_path / "kv", 4 * 10**6
    tier = open_tier(folder, capacity=cap)
    before = 0
    for seed in range(60):
        put(tier, path_of(100, seed), per_token=1000)
        now = sizes(folder)
        if tier.counts["dropped:bytes"]:
            break
        before = now
    assert before > 0.9 * cap
    assert 0.75 * cap < now <= 0.85 * cap + 110_000
    tier.close()


def test_a_smaller_cap_holds_from_the_opening_on(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    for seed in range(20):
        put(tier, path_of(100, seed), per_token=1000)
    tier.close()
    tier = open_tier(tmp_path / "kv", capacity=10**6)
    tier.flush()
    assert sizes(tmp_path / "kv") <= 10**6
    assert len(tier.rows()) > 3
    tier.close()


def test_what_others_go_on_from_stays_and_hits_count(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv", capacity=2 * 10**6)
    system = path_of(100, 1)
    ends = [[*system, *path_of(100, seed)] for seed in range(2, 6)]
    put(tier, system, per_token=2000)
    for path in ends:
        put(tier, as_path(path), per_token=2000)
    hot = tier.find(NAMESPACE, as_path(ends[0])).spans[1].payload
    for _ in range(50):
        tier.touch([hot])
    tier.flush()
    for seed in range(10, 16):
        put(tier, path_of(100, seed), per_token=2000)
    assert tier.counts["dropped:bytes"] >= 2
    assert reach(tier, as_path(ends[0])) == 200  # used often, and so what it goes on from is still there
    assert reach(tier, as_path(ends[1])) == 100
    while len(tier.rows()) > 1:
        before = [row.name for row in tier.rows()]
        tier.prune(sizes(tmp_path / "kv") - 10_000)
        names = {row.name for row in tier.rows()}
        assert len(names) < len(before)
        if hot.row.name in names:
            assert reach(tier, as_path(ends[0])) == 200
    tier.close()


def as_path(tokens: Any) -> Any:
    return np.array(tokens, np.int32)


def test_quarantine_counts_and_goes_first(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = open_tier(folder, capacity=10**6)
    for seed in range(3):
        put(tier, path_of(100, seed), per_token=2000)
    damaged = kv_files(folder)[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert tier.verify(fix=True) != []
    put(tier, path_of(100, 5), per_token=2000)
    put(tier, path_of(100, 6), per_token=2000)
    assert sizes(folder) <= 10**6
    assert list((folder / "quarantine").iterdir()) == []
    tier.close()


# --- what is found ----------------------------------------------------------------------------------------------------


def test_branches_inside_a_segment_are_found(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    one = path_of(300, 1)
    two = as_path([*one[:120], *path_of(80, 2)])
    three = as_path([*two[:160], *path_of(100, 3)])
    for path in (one, two, three):
        put(tier, path)
    for _ in range(2):
        assert read(tier, tier.find(NAMESPACE, one), one) == [(0, 300)]
        assert read(tier, tier.find(NAMESPACE, two), two) == [(0, 120), (120, 200)]
        assert read(tier, tier.find(NAMESPACE, three), three) == [(0, 120), (120, 160), (160, 260)]
        written = tier.bytes_written
        for path in (one, two, three):
            put(tier, path)  # all of it is there
        assert tier.bytes_written == written
        tier.close()
        tier = open_tier(tmp_path / "kv")
    tier.close()


def test_segments_of_other_cuts_overlap(tmp_path: Path) -> None:
    """What two processes wrote of one path, cut at other places, serves both."""
    tier = open_tier(tmp_path / "kv")
    path = path_of(300, 1)
    put(tier, path[:100])
    tier.erase()
    put(tier, path[:150])
    offer_checkpoint(tier, path[:120])
    tier.flush()
    put(tier, path[:200], 150)
    rows = {(row.entry.start, row.entry.end) for row in tier.rows()}
    assert rows == {(0, 150), (150, 200), (120, 120)}
    assert reach(tier, path) == 200
    tier.close()


def test_what_is_behind_a_gap_is_found_where_memory_has_the_rest(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    path = path_of(300, 1)
    put(tier, path, 200)
    assert tier.find(NAMESPACE, path).spans == ()
    assert [(span.start, span.reach) for span in tier.find(NAMESPACE, path, 250).spans] == [(200, 300)]
    tier.close()


def test_a_long_path_with_many_places() -> None:
    known, path = Known(), path_of(20_000, 1)
    for end in range(10, 20_000, 10):
        before, after = digest(NAMESPACE, path[: end - 10]), digest(NAMESPACE, path[:end])
        about = (NAMESPACE, "segment", end - 10, end, before, after, end - 10, 0, 1, 0, "{}", path[end - 10 : end])
        known.add(Row(end, Entry(*about), 100, 0.0, 0.0, 0))
        about = (NAMESPACE, "checkpoint", end, end, after, after, end, 0, 1, 0, "{}", path[:0])
        known.add(Row(20_000 + end, Entry(*about), 100, 0.0, 0.0, 0))
    began = time.perf_counter()
    found = known.find(NAMESPACE, path)
    assert time.perf_counter() - began < 0.5
    assert (len(found.spans), len(found.checkpoints), found.reach) == (1999, 1999, 19_990)
    assert known.find(NAMESPACE, path_of(20_000, 2)).reach == 0
    began = time.perf_counter()
    leaving = least_worth([row for row in known if row.entry.kind == "segment"], 1000 * 100, 0.0)
    assert time.perf_counter() - began < 2
    assert {row.entry.end for row in leaving} == set(range(10_000, 20_000, 10))  # from the end of the path on
    for row in list(known):
        known.remove(row)
    assert (len(known), known.written, known.places(NAMESPACE), known.find(NAMESPACE, path).reach) == (0, 0, [], 0)


# --- erasing ----------------------------------------------------------------------------------------------------------


def words_in(folder: Path, path: Any) -> list[str]:
    """Files in which eight tokens in a row of the path can be read."""
    needle = path[-8:].astype("<i4").tobytes()
    return [str(file) for file in folder.rglob("*") if file.is_file() and needle in file.read_bytes()]


def test_erasing_a_tenant_leaves_others_and_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = open_tier(folder)
    mine, theirs, damaged = path_of(1000, 1), path_of(1000, 2), path_of(1000, 3)
    for path in (mine, damaged):
        put(tier, path)
    put(tier, theirs, namespace=OTHER)
    for namespace, path in ((NAMESPACE, mine), (OTHER, theirs)):
        tier.save_session("tax", namespace, "[]", path.tobytes())
    file = next(file for file in kv_files(folder) if str(file) in words_in(folder, damaged))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    tier.verify(fix=True)
    blocked = Blocked(tier)
    queued = path_of(1000, 4)
    offer(tier, queued)
    assert blocked.reached.wait(30)
    offer(tier, path_of(1000, 5))
    offer(tier, path_of(1000, 6), namespace=OTHER)
    threading.Timer(0.2, blocked.go.set).start()
    assert tier.erase({NAMESPACE}) >= 1
    tier.flush()
    for path in (mine, damaged, queued, path_of(1000, 5)):
        assert words_in(folder, path) == []
        assert reach(tier, path) == 0
    assert reach(tier, theirs, OTHER) == reach(tier, path_of(1000, 6), OTHER) == 1000
    assert (tier.session("tax", NAMESPACE), tier.session("tax", OTHER)) == (None, ("[]", theirs.tobytes()))
    assert tier.verify() == []
    tier.close()


def test_erasing_while_another_process_has_it_open(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    one, two = open_tier(folder), open_tier(folder)
    path = path_of(500, 1)
    put(one, path)
    assert reach(two, path) == 500
    two.erase({NAMESPACE})
    assert words_in(folder, path) == []
    assert reach(one, path) == 0
    one.close()
    two.close()


@pytest.mark.parametrize("kind", ["segments", "checkpoints"])
def test_erasing_a_prompt(tmp_path: Path, kind: str) -> None:
    tier = open_tier(tmp_path / "kv")
    system = path_of(100, 1)
    secret = as_path([*system, *path_of(60, 2)])
    longer = as_path([*secret, *path_of(40, 3)])
    other = as_path([*system, *path_of(90, 4)])
    alone = path_of(80, 5)

    def write(path: Any) -> None:
        if kind == "segments":
            put(tier, path)
        else:
            offer_checkpoint(tier, path)
            tier.flush()

    for path in (system, secret, longer, other, alone):
        write(path)

    def held(path: Any) -> int:
        return reach(tier, path)

    assert tier.erase_prompt(NAMESPACE, secret) == (2 if kind == "segments" else 1)
    assert held(other) == 190
    if kind == "segments":
        assert (held(longer), held(secret)) == (100, 100)  # what the other one shares
    assert tier.erase_prompt(NAMESPACE, as_path(alone[:50])) == (1 if kind == "segments" else 0)
    assert tier.erase_prompt(NAMESPACE, other) >= 1
    if kind == "segments":
        assert held(other) == 0  # and now nobody
        assert {row.entry.end for row in tier.rows()} == set()
    assert tier.verify() == []
    tier.close()


def test_hits_and_sessions_survive(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    put(tier, path_of(40, 1))
    for _ in range(3):
        tier.touch([tier.find(NAMESPACE, path_of(40, 1)).spans[0].payload])
    tier.save_session("tax", NAMESPACE, '["hello"]', b"1234")
    tier.close()
    tier = open_tier(tmp_path / "kv")
    assert [row.hits for row in tier.rows()] == [3]
    assert tier.session("tax", NAMESPACE) == ('["hello"]', b"1234")
    assert [(each["name"], each["tokens"]) for each in tier.sessions()] == [("tax", 1)]
    tier.close()


def test_damage_in_memory_is_not_written_as_if_it_were_right(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    path = path_of(40, 1)
    tier.offer_segment(NAMESPACE, path, 0, 0, 100, lambda begin: (bytes(100), 12345))
    tier.flush()
    assert (tier.counts["damaged_in_memory"], kv_files(tmp_path / "kv"), reach(tier, path)) == (1, [], 0)
    put(tier, path)
    assert reach(tier, path) == 40
    tier.close()
