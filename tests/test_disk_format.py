"""Damage: whatever happens to a file, the index or the folder, nothing wrong is used and the program goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.errors import StateError
from skippy.store import DiskTier
from skippy.store.format import Entry, ForeignFile, MappedState, Mismatch, pack_head, read_head
from skippy.store.tier import INDEX, QUARANTINE
from tests.disk_folder import (
    NAMESPACE,
    OTHER,
    kv_files,
    offer_checkpoint,
    open_tier,
    path_of,
    put,
    reach,
    read,
)

PATH = path_of(40, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one small segment, closed."""
    tier = open_tier(tmp_path / "kv")
    put(tier, PATH, per_token=4)
    tier.close()
    assert len(kv_files(tmp_path / "kv")) == 1
    return tmp_path / "kv"


def quarantined(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / QUARANTINE)) if (folder / QUARANTINE).exists() else []


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_noticed(folder: Path) -> None:
    file = kv_files(folder)[0]
    entry, _ = read_head(file)
    whole = file.read_bytes()
    for i in range(len(whole)):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << (i % 8)
        file.write_bytes(damaged)
        if i in range(len(pack_head(entry)) - 64, len(pack_head(entry))) and _is_padding(whole, entry, i):
            MappedState(file, entry).close()  # zeros between head and state say nothing
            continue
        with pytest.raises((StateError, ForeignFile)):
            MappedState(file, entry)
    file.write_bytes(whole)
    MappedState(file, entry).close()


def _is_padding(whole: bytes, entry: Entry, i: int) -> bool:
    head = int.from_bytes(whole[12:16], "little")
    return 24 + head <= i < len(whole) - entry.nbytes


def test_every_truncation_is_noticed(folder: Path) -> None:
    file = kv_files(folder)[0]
    entry, _ = read_head(file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises((StateError, ForeignFile)):
            MappedState(file, entry)
    file.write_bytes(whole + b"x")
    with pytest.raises(StateError):
        MappedState(file, entry)


@pytest.mark.parametrize("part", ["magic", "head", "tokens", "state", "front cut", "head cut", "state cut", "empty"])
def test_a_damaged_file_is_set_aside_once_and_the_next_writer_writes_it_anew(
    folder: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = kv_files(folder)[0]
    entry, offset = read_head(file)
    data = bytearray(file.read_bytes())
    at = {"magic": 3, "head": 40, "tokens": offset - 100, "state": len(data) - 1}
    cut = {"front cut": 15, "head cut": 50, "state cut": len(data) - 1, "empty": 0}
    if part in at:
        data[at[part]] ^= 4
    file.write_bytes(data[: cut.get(part, len(data))])
    tier = open_tier(folder)
    (span,) = tier.find(NAMESPACE, PATH).spans
    with caplog.at_level(logging.WARNING, "skippy"), pytest.raises(StateError):
        tier.open(span.payload)
    tier.give_up(span.payload)
    assert len(caplog.records) == 1
    assert (tier.counts["quarantined"], tier.counts["dropped:corrupt"]) == (1, 1)
    assert reach(tier, PATH) == 0
    assert quarantined(folder) == [entry.name]
    put(tier, PATH, per_token=4)
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    assert tier.verify() == []
    tier.close()


def test_a_missing_file_is_a_miss(folder: Path) -> None:
    tier = open_tier(folder)
    found = tier.find(NAMESPACE, PATH)
    kv_files(folder)[0].unlink()
    with pytest.raises(StateError, match="No such file"):
        tier.open(found.spans[0].payload)
    assert reach(tier, PATH) == 0
    assert tier.off is None
    tier.flush()
    assert tier.verify() == []
    tier.close()
    tier = open_tier(folder)
    assert len(tier.rows()) == 0
    tier.close()


def test_a_file_that_vanished_while_nobody_looked(folder: Path) -> None:
    kv_files(folder)[0].unlink()
    tier = open_tier(folder)
    assert (len(tier.rows()), tier.counts["missing"]) == (0, 1)
    tier.close()


def test_a_file_of_another_model_under_a_right_name_is_not_used(folder: Path) -> None:
    other = folder.parent / "other"
    tier = open_tier(other)
    put(tier, PATH, per_token=4, namespace=OTHER)
    tier.close()
    file = kv_files(folder)[0]
    shutil.copy(kv_files(other)[0], file)
    tier = open_tier(folder)
    with pytest.raises(StateError, match="says namespace="):
        tier.open(tier.find(NAMESPACE, PATH).spans[0].payload)
    assert reach(tier, PATH) == 0
    assert quarantined(folder) == [file.name]
    tier.close()


def test_files_of_another_model_are_kept_beside(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, PATH, per_token=4, namespace=OTHER)
    tier.close()
    (folder / INDEX).unlink()
    tier = open_tier(folder)
    assert (tier.counts["adopted"], len(tier.rows())) == (2, 2)
    assert reach(tier, PATH, OTHER) == reach(tier, PATH) == 40
    tier.close()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_file_of_a_newer_version_is_left_alone(folder: Path, known: bool) -> None:
    file = kv_files(folder)[0]
    data = bytearray(file.read_bytes())
    data[8] = 2
    file.write_bytes(data)
    if not known:
        (folder / INDEX).unlink()
    tier = open_tier(folder)
    for span in tier.find(NAMESPACE, PATH).spans:
        with pytest.raises(StateError, match="version 2"):
            tier.open(span.payload)
    assert reach(tier, PATH) == 0
    tier.close()
    tier = open_tier(folder)
    assert tier.counts["foreign"] == 1
    tier.erase()
    tier.close()
    assert file.read_bytes() == data
    assert quarantined(folder) == []


def test_what_is_not_ours_is_left_alone(folder: Path) -> None:
    strangers = {"notes.kv": b"shopping list", "empty.kv": b"", "readme.txt": b"hello"}
    for name, data in strangers.items():
        (folder / name).write_bytes(data)
    tier = open_tier(folder)
    assert len(tier.rows()) == 1
    tier.erase()
    tier.prune(0)
    tier.close()
    assert {name: (folder / name).read_bytes() for name in strangers} == strangers


@pytest.mark.parametrize("what", ["link", "dangling link", "folder", "pipe"])
def test_no_plain_file_under_a_right_name(folder: Path, what: str) -> None:
    file = kv_files(folder)[0]
    elsewhere = folder.parent / "elsewhere"
    shutil.move(file, elsewhere)
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    else:
        if what == "dangling link":
            elsewhere.unlink()
        file.symlink_to(elsewhere)
    tier = open_tier(folder)
    for span in tier.find(NAMESPACE, PATH).spans:
        with pytest.raises(StateError):
            tier.open(span.payload)
    assert reach(tier, PATH) == 0
    assert tier.off is None  # it is this file's fault alone
    put(tier, PATH, per_token=4)
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    tier.close()
    if what == "link":
        assert elsewhere.exists()


# --- the index --------------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 9000, np.uint8).tobytes())


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def text(path: Path) -> None:
    path.write_text("this is no database")


def no_table(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE entries")
    db.close()


def odd_values(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE entries SET checksum = 'xyz'")
    db.close()


def short_tokens(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE entries SET tokens = x'0102'")
    db.close()


@pytest.mark.parametrize(
    "damage", [remove, empty, random_bytes, halved, text, no_table, odd_values, short_tokens], ids=lambda f: f.__name__
)
def test_a_lost_or_damaged_index_is_built_anew(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / INDEX)
    looking = open_tier(folder, write=False)
    assert reach(looking, PATH) == 40
    looking.close()
    tier = open_tier(folder)
    assert tier.off is None
    assert tier.counts["adopted"] == 1
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    assert tier.verify() == []
    tier.close()


def test_random_bytes_within_the_index(folder: Path) -> None:
    """Whatever a few wrong bytes do to it: what is found is right, and the folder is whole again afterwards."""
    tier = open_tier(folder)
    paths = [path_of(40, seed) for seed in range(2, 12)]
    for path in paths:
        put(tier, path, per_token=4)
    tier.close()
    whole = (folder / INDEX).read_bytes()
    rng = np.random.default_rng(5)
    for _ in range(40):
        damaged = np.frombuffer(whole, np.uint8).copy()
        at = rng.integers(0, len(damaged), 8)
        damaged[at] = rng.integers(0, 256, len(at))
        (folder / INDEX).write_bytes(damaged.tobytes())
        tier = open_tier(folder)
        if tier.off is not None:
            assert "of version" in tier.off
        else:
            for path in [PATH, *paths]:
                for _ in range(3):  # a wrong row is put right by what the file says
                    found = tier.find(NAMESPACE, path)
                    try:
                        read(tier, found, path, 4)
                    except StateError:
                        tier.flush()
            assert tier.verify(fix=True) is not None
            assert tier.verify() == []
        tier.close()
        for name in quarantined(folder):
            (folder / QUARANTINE / name).unlink()
        assert len(kv_files(folder)) == 11  # none of the files was to blame


def test_an_index_of_a_newer_version_is_left_alone(folder: Path) -> None:
    with sqlite3.connect(folder / INDEX) as db:
        db.execute("PRAGMA user_version = 2")
    db.close()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for write in (True, False):
        tier = open_tier(folder, write=write)
        assert "of version 2" in str(tier.off)
        assert (reach(tier, PATH), tier.rows(), tier.takes) == (0, [], False)
        put(tier, PATH)
        tier.close()
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before


def test_a_locked_index_is_not_taken_for_a_damaged_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: real(*args, **{**kwargs, "timeout": 0.1}))
    other = real(folder / INDEX, isolation_level=None)
    other.execute("PRAGMA journal_mode=DELETE")
    other.execute("BEGIN EXCLUSIVE")
    tier = DiskTier(folder, capacity=2**20, min_free=0)
    assert "locked" in str(tier.off)
    tier.close()
    other.execute("ROLLBACK")
    other.close()
    assert quarantined(folder) == []
    tier = open_tier(folder)
    assert reach(tier, PATH) == 40
    tier.close()


def test_the_index_is_wrong_and_the_file_is_right(folder: Path) -> None:
    with sqlite3.connect(folder / INDEX) as db:
        db.execute("UPDATE entries SET checksum = '0123456789abcdef'")
    db.close()
    tier = open_tier(folder)
    with pytest.raises(StateError, match="the index"):
        tier.open(tier.find(NAMESPACE, PATH).spans[0].payload)
    tier.flush()
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    assert quarantined(folder) == []
    tier.close()


def test_tokens_of_the_index_are_compared(folder: Path) -> None:
    entry, _ = read_head(kv_files(folder)[0])
    other = Entry(**{**vars(entry), "tokens": path_of(40, 2)})
    with pytest.raises(Mismatch):
        MappedState(kv_files(folder)[0], other)


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_only_its_owner_can_read_it(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "kv").mkdir()
        (tmp_path / "kv").chmod(0o755)
        tier = open_tier(tmp_path / "kv")
        put(tier, PATH)
        offer_checkpoint(tier, PATH)
        tier.flush()
        file = kv_files(tmp_path / "kv")[0]
        file.write_bytes(b"SKIPPYKVx")
        tier.verify(fix=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kv" / QUARANTINE).stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").iterdir() if path.is_file()}
    assert {f"{INDEX}-wal", INDEX} < set(modes)
    assert set(modes.values()) == {0o600}
    tier.close()


def test_links_are_refused(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    tier = open_tier(link)
    assert "symbolic link" in str(tier.off)
    tier.close()
    elsewhere = folder.parent / "elsewhere.sqlite"
    shutil.move(folder / INDEX, elsewhere)
    (folder / INDEX).symlink_to(elsewhere)
    for write in (True, False):
        tier = open_tier(folder, write=write)
        assert "symbolic link" in str(tier.off)
        tier.close()


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("x")
    tier = open_tier(tmp_path / "kv")
    assert tier.off is not None
    put(tier, PATH)
    assert (reach(tier, PATH), tier.rows(), tier.sessions(), tier.session("a", "b"), tier.erase()) == (
        0,
        [],
        [],
        None,
        0,
    )
    assert tier.stats()["off"] == tier.off
    tier.close()
    tier.close()


AS_NOBODY = """
    import os, sys
    from pathlib import Path
    import tests.disk_folder as d
    import xxhash, sqlite3, numpy
    numpy.random.default_rng(1)
    folder = Path(sys.argv[1])
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        for path in folder.iterdir():
            os.chown(path, 65534, 65534)
        os.setgid(65534)
        os.setuid(65534)
    os.chmod(folder, int(sys.argv[2], 8))
    for write in (True, False):
        tier = d.open_tier(folder, write=write)
        d.put(tier, d.path_of(40, 2))
        print(d.reach(tier, d.path_of(40, 1)), tier.off)
        tier.close()
"""


def as_nobody(folder: Path, mode: str) -> list[str]:
    """What a process that is not root sees of the folder with this mode: with and without writing."""
    for parent in (folder, *list(folder.parents)[:3]):
        parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AS_NOBODY), os.fspath(folder), mode],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_folder_that_cannot_be_written_is_only_looked_into(folder: Path) -> None:
    before = sorted(os.listdir(folder))
    writing, looking = as_nobody(folder, "500")
    assert writing.startswith("0 ")
    assert "cannot be used" in writing
    assert looking == "40 None"
    assert sorted(os.listdir(folder)) == before


def test_a_folder_that_cannot_be_read(folder: Path) -> None:
    for line in as_nobody(folder, "000"):
        assert line.startswith("0 ")
        assert "Permission denied" in line
    if os.geteuid() == 0:
        tier = open_tier(folder)
        assert "somebody else" in str(tier.off)
        tier.close()
    folder.chmod(0o700)


def failing_with(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.open

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(folder)):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    tier = open_tier(folder)
    assert os.strerror(code) in str(tier.off)
    tier.close()
    before = sorted(os.listdir(folder))
    tier = open_tier(folder, write=False)
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    tier.close()
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_failure_while_writing_switches_it_off_and_costs_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing_with(code))
        for seed in (2, 3, 4):
            put(tier, path_of(40, seed))
    assert os.strerror(code) in str(tier.off)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert (reach(tier, PATH), tier.takes) == (0, False)
    assert tier.stats()["queued_bytes"] == 0
    tier.close()
    tier = open_tier(folder)
    assert len(tier.rows()) == 1
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []
    assert tier.verify() == []
    tier.close()


def test_network_loss_while_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(folder)
    found = tier.find(NAMESPACE, PATH)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing_with(errno.EIO))
        with pytest.raises(StateError, match="Input/output"):
            tier.open(found.spans[0].payload)
        tier.give_up(found.spans[0].payload)
    assert "Input/output" in str(tier.off)
    tier.close()
    assert len(kv_files(folder)) == 1


def test_little_free_space_makes_it_read_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(folder, min_free=2**60)
    for seed in (2, 3):
        put(tier, path_of(40, seed))
    assert (tier.counts["too_full"], tier.off) == (2, None)
    assert len([record for record in caplog.records if "only read" in record.message]) == 1
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    tier.close()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "another"])
def test_the_folder_is_deleted_while_running(folder: Path, again: bool) -> None:
    tier = open_tier(folder)
    found = tier.find(NAMESPACE, PATH)
    shutil.rmtree(folder)
    if again:
        other = open_tier(folder)
    with pytest.raises(StateError):
        tier.open(found.spans[0].payload)
    put(tier, path_of(40, 2))
    assert tier.off is not None
    assert reach(tier, PATH) == 0
    tier.close()
    if again:
        assert (other.verify(), kv_files(folder)) == ([], [])
        put(other, PATH)
        other.close()
        assert len(kv_files(folder)) == 1
    else:
        assert not folder.exists()


def test_nothing_is_touched_without_writing(folder: Path) -> None:
    def look() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}

    os.chmod(folder, 0o755)
    before = look()
    tier = open_tier(folder, write=False)
    assert read(tier, tier.find(NAMESPACE, PATH), PATH, 4) == [(0, 40)]
    tier.touch([span.payload for span in tier.find(NAMESPACE, PATH).spans])
    put(tier, path_of(40, 2))
    tier.save_session("a", NAMESPACE, "[]", b"")
    tier.erase()
    tier.prune(0)
    assert tier.verify(fix=True) == []
    assert tier.sessions() == []
    tier.close()
    assert look() == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    tier = open_tier(folder.parent / "none", write=False)
    assert tier.off is not None
    tier.close()
    assert not (folder.parent / "none").exists()


def test_a_looker_sees_what_a_writer_adds(folder: Path) -> None:
    looker = open_tier(folder, write=False)
    writer = open_tier(folder)
    new = path_of(40, 2)
    put(writer, new)
    assert reach(looker, new) == 40
    writer.erase()
    assert reach(looker, new) == 0
    writer.close()
    looker.close()


def test_files_hold_no_code(folder: Path) -> None:
    data = kv_files(folder)[0].read_bytes()
    head = data[24 : 24 + int.from_bytes(data[12:16], "little")]
    assert json.loads(head.partition(b"\n")[0])["namespace"] == NAMESPACE
    assert not any(b"import pickle" in path.read_bytes() for path in Path("skippy/store").glob("*.py"))
