"""status, ls, prune, clear and check: what they say of a folder, what they change in it, and what they leave alone."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from skippy import cli
from skippy.commands import store as commands
from skippy.commands.saved import opened, status_of
from skippy.config import CacheConfig
from skippy.errors import SkippyError
from skippy.store import DiskTier
from skippy.store.format import Entry, digest
from skippy.store.index import Index

ALICE, BOB, NOBODY = "a1" * 32, "b2" * 32, "a1b3" * 16
LABELS = {
    ALICE: {"model": "m.gguf", "tenant": "alice"},
    BOB: {"model": "m.gguf", "tenant": "bob"},
    NOBODY: {"model": "other.gguf", "tenant": ""},
}


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("SKIPPY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def path(n: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 30_000, n).astype(np.int32)


def noise(n: int, seed: int) -> bytes:
    return np.random.default_rng([seed, 1]).bytes(n)


def keep(tier: DiskTier, namespace: str, tokens: np.ndarray[Any, Any], data: bytes, start: int = 0) -> None:
    """A segment with these bytes."""
    tier.offer_segment(namespace, tokens, start, start, len(data), lambda begin: (data, xxhash.xxh3_64_intdigest(data)))
    tier.flush()


def keep_point(tier: DiskTier, namespace: str, tokens: np.ndarray[Any, Any], data: bytes) -> None:
    """A checkpoint with these bytes."""
    tier.offer_checkpoint(namespace, tokens, 1, len(data), lambda: (data, xxhash.xxh3_64_intdigest(data)))
    tier.flush()


def session_of(tenant: str) -> str:
    return json.dumps({"label": {"model": "m.gguf", "tenant": tenant}, "messages": [], "ends": [2]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two of alice's segments, one going on from the other, a checkpoint of bob's, one entry of nobody's; sessions."""
    where = tmp_path / "kv"
    tier = DiskTier(where, capacity=2**30, min_free=0)
    tier.labels = {namespace: json.dumps(label) for namespace, label in LABELS.items()}
    long = path(300, 1)
    keep(tier, ALICE, long[:200], noise(200_000, 1))
    keep(tier, ALICE, long, noise(100_000, 2), 200)
    keep_point(tier, BOB, path(80, 2), noise(50_000, 3))
    keep(tier, NOBODY, path(64, 3), noise(10_000, 4))
    found = tier.find(ALICE, long)
    tier.touch([span.payload for span in found.spans])
    tier.save_session("tax", ALICE, session_of("alice"), bytes(40))
    tier.save_session("tax", "c4" * 32, session_of("carol"), bytes(80))  # nothing else is kept of her
    tier.close()
    return where


def run(*arguments: str | Path, code: int = 0) -> Any:
    """The command's output, parsed where it is JSON."""
    result = CliRunner().invoke(cli.app, [str(each) for each in arguments], env={"NO_COLOR": "1", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time and bytes of all that is there."""
    found = {}
    for each in sorted(folder.rglob("*")):
        status = each.lstat()
        found[str(each)] = (status.st_mode, status.st_mtime_ns, b"" if each.is_dir() else each.read_bytes())
    return found


def files(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.glob("*.kv"))


def file_of(folder: Path, namespace: str, which: int = 0) -> Path:
    return sorted(folder.glob(f"{namespace[:16]}-*.kv"))[which]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


# -- which folder ---------------------------------------------------------------------------------------

EVERY: list[list[str]] = [["status"], ["ls"], ["prune", "--to", "0"], ["clear", "--yes"], ["check"], ["check", "--fix"]]


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_without_a_folder_it_says_how_to_give_one(command: list[str], tmp_path: Path) -> None:
    with pytest.raises(SkippyError, match=r"--disk FOLDER, or set SKIPPY_DISK=FOLDER, or disk = \"FOLDER\" in skippy"):
        run(*command)
    with pytest.raises(SkippyError, match=r"there is no folder '.*gone' \(yet\)"):
        run(*command, "--disk", tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    other = tmp_path / "documents"
    other.mkdir(mode=0o755)
    (other / "letter.txt").write_text("Dear")
    before = snapshot(tmp_path)
    with pytest.raises(SkippyError, match=r"documents' is no folder of saved state: there is no index.sqlite in it"):
        run(*command, "--disk", other)
    assert snapshot(tmp_path) == before
    with pytest.raises(SkippyError, match="disk=''"):
        run(*command, "--disk", "")


@pytest.mark.parametrize("how", ["environment", "file", "option"])
def test_the_configured_folder_is_taken(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("SKIPPY_DISK", str(folder))
        monkeypatch.setenv("SKIPPY_DISK_BYTES", "3GiB")
    else:
        Path("skippy.toml").write_text(f'disk = "{folder if how == "file" else "elsewhere"}"\ndisk_bytes = "3GiB"\n')
    data = run("status", "--json", *(["--disk", folder] if how == "option" else []))
    assert data["folder"] == str(folder)
    assert data["capacity"] == 3 * 2**30


@pytest.mark.parametrize(
    "arguments", [["prune"], ["prune", "--to", "2G"], ["ls", "--sort", "x"], ["ls", "--limit", "-1"]]
)
def test_wrong_arguments_leave_with_2(folder: Path, arguments: list[str]) -> None:
    before = files(folder)
    assert run(*arguments, "--disk", folder, code=2) == ""
    assert files(folder) == before


@pytest.mark.parametrize("command", [["status"], ["ls"], ["check"]], ids=" ".join)
def test_looking_changes_nothing(folder: Path, command: list[str]) -> None:
    flip(file_of(folder, BOB), -1)
    (folder / "left.kv.123456.7.tmp").write_bytes(b"half")
    folder.chmod(0o755)
    before = snapshot(folder)
    for more in ([], ["--json"]):
        run(*command, "--disk", folder, *more, code=1 if command == ["check"] else 0)
    assert snapshot(folder) == before
    assert folder.stat().st_mode & 0o777 == 0o755


# -- status and ls --------------------------------------------------------------------------------------


def test_status_says_what_is_there_by_namespace(folder: Path) -> None:
    data = run("status", "--disk", folder, "--json")
    assert data["segments"] == 3
    assert data["checkpoints"] == 1
    assert data["hits"] == 2
    sizes = {name: (folder / name).stat().st_size for name in files(folder)}
    assert data["in_use"] == sum(sizes.values()) + data["index_bytes"]
    assert data["index_bytes"] >= (folder / "index.sqlite").stat().st_size
    assert data["capacity"] == 8 * 2**30
    assert abs(data["free"] - shutil.disk_usage(folder).free) < 2**30
    assert data["min_free"] == 2**30
    assert data["quarantine"] == {"files": 0, "bytes": 0}
    assert (data["not_in_the_index"], data["missing_files"], data["index_unusable"]) == (0, 0, False)
    fields = ("model", "tenant", "segments", "checkpoints", "tokens", "hits", "sessions")
    assert {space["namespace"]: tuple(space[field] for field in fields) for space in data["namespaces"]} == {
        ALICE: ("m.gguf", "alice", 2, 0, 300, 2, 1),
        BOB: ("m.gguf", "bob", 0, 1, 0, 0, 0),
        NOBODY: ("other.gguf", "", 1, 0, 64, 0, 0),
        "c4" * 32: ("m.gguf", "carol", 0, 0, 0, 0, 1),
    }
    assert [space["namespace"] for space in data["namespaces"]][:3] == [ALICE, BOB, NOBODY]  # the largest first
    for space in data["namespaces"]:
        assert space["bytes"] == sum(size for name, size in sizes.items() if name.startswith(space["namespace"][:16]))
    assert {(session["name"], session["tenant"], session["tokens"]) for session in data["sessions"]} == {
        ("tax", "alice", 10), ("tax", "carol", 20),
    }  # fmt: skip
    assert "messages" not in json.dumps(data)


def test_status_for_people(folder: Path) -> None:
    (folder / "quarantine").mkdir()
    (folder / "quarantine/x.kv").write_bytes(bytes(2048))
    file_of(folder, NOBODY).rename(folder / "hidden")
    (folder / "0123456789abcdef-s-00-0.kv").write_bytes(b"another format")
    text = run("status", "--disk", folder)
    for line in (
        f"folder            {folder}", "entries           2 segments, 1 checkpoint, 2 hits",
        "quarantine        1 damaged file, 2.0 KiB", "not in the index  1 file; see skippy check",
        "missing           1 file; see skippy check",
    ):  # fmt: skip
        assert line in text
    assert "│ m.gguf │ alice  │ a1a1a1a1a1a1 │        2 │           0 │    300 │" in text
    assert "│ tax     │ m.gguf │ carol  │     20 │" in text


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_without_an_index_the_files_speak_for_themselves(folder: Path, damage: str) -> None:
    (the_index_is_lost if damage == "lost" else the_index_is_damaged)(folder)
    before = snapshot(folder)
    data = run("status", "--disk", folder, "--json")
    assert data["index_unusable"] is True
    assert (data["segments"], data["checkpoints"], data["hits"], data["sessions"]) == (3, 1, 0, [])
    assert {space["tenant"] for space in data["namespaces"]} == {"alice", "bob", ""}
    assert "cannot be used; see skippy check" in run("status", "--disk", folder)
    assert run("ls", "--disk", folder, "--json")["total"] == 4
    assert snapshot(folder) == before


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", capacity=2**30, min_free=0)
    tier.labels = {ALICE: json.dumps({"model": "m\x1b[2J", "tenant": "[red]x[/red]"})}
    keep(tier, ALICE, path(64, 3), noise(100, 4))
    tier.close()
    for command in ("status", "ls"):
        text = run(command, "--disk", tmp_path / "kv")
        assert "\x1b" not in text
        assert "m?[2J" in text
        assert "[red]x[/red]" in text


def test_labels_that_make_no_sense_are_no_label(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", capacity=2**30, min_free=0)
    tier.labels = {ALICE: "no json", BOB: "[1]"}
    for namespace in (ALICE, BOB):
        keep(tier, namespace, path(64, 3), noise(100, 4))
    tier.save_session("x", "c4" * 32, "no json", bytes(4))
    tier.close()
    spaces = run("status", "--disk", tmp_path / "kv", "--json")["namespaces"]
    assert {(space["model"], space["tenant"]) for space in spaces} == {(None, None)}


def test_ls_lists_sorts_and_limits(folder: Path) -> None:
    data = run("ls", "--disk", folder, "--json")
    assert data["total"] == 4
    entries = data["entries"]
    assert {entry["name"] for entry in entries} == set(files(folder))
    assert {entry["tenant"] for entry in entries[:2]} == {"alice"}  # used last
    by_size = run("ls", "--disk", folder, "--json", "--sort", "size", "--limit", "2")
    assert by_size["total"] == 4
    assert [(entry["start"], entry["end"], entry["tokens"]) for entry in by_size["entries"]] == [
        (0, 200, 200), (200, 300, 100),
    ]  # fmt: skip
    for entry in entries:
        assert entry["size"] == (folder / entry["name"]).stat().st_size
        assert abs(entry["created"] - time.time()) < 600
    found = run("ls", "--disk", folder, "--json", "--sort", "tokens", "--namespace", "bob")["entries"]
    assert [(entry["kind"], entry["end"], entry["hits"]) for entry in found] == [("checkpoint", 80, 0)]
    assert run("ls", "--disk", folder, "--json", "--limit", "0", "--sort", "hits")["entries"][0]["hits"] == 1
    text = run("ls", "--disk", folder, "--limit", "1", "--sort", "created")
    assert "1 of 4; --limit 0 shows all" in text


def test_status_of_ten_thousand_entries_takes_less_than_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "kv"
    DiskTier(where, capacity=2**30, min_free=0).close()
    index = Index(where / "index.sqlite")
    rng = np.random.default_rng(0)
    with index.transaction():
        for i in range(10_000):
            namespace, tokens = (ALICE, BOB)[i % 2], rng.integers(0, 30_000, 128).astype(np.int32)
            entry = Entry(
                namespace, "segment", 0, 128, "", digest(namespace, tokens), 0, 0, 1, 0, json.dumps(LABELS[namespace]),
                tokens,
            )  # fmt: skip
            index.add(entry, 1000)
            (where / entry.name).touch()
    index.close()
    config = CacheConfig(disk=where)
    took = []
    for _ in range(3):
        began = time.process_time()
        with opened(config, write=False) as tier:
            data = status_of(tier, config)
        took.append(time.process_time() - began)
    assert (data["segments"], len(data["namespaces"])) == (10_000, 2)
    assert min(took) < 1


# -- prune and clear ------------------------------------------------------------------------------------


def test_prune_lets_the_least_worth_go(folder: Path) -> None:
    before = run("status", "--disk", folder, "--json")
    to = before["in_use"] - 20_000
    data = run("prune", "--disk", folder, "--to", to, "--json")
    assert data["to"] == to
    assert data["in_use"] <= to
    assert data["removed"] == 4 - data["entries"] >= 1
    assert len(files(folder)) == data["entries"]
    assert len(list(folder.glob(f"{ALICE[:16]}-*"))) == 2  # used, and so worth more
    again = run("prune", "--disk", folder, "--to", to, "--json")
    assert (again["removed"], again["freed"]) == (0, 0)
    text = run("prune", "--disk", folder, "--to", "0MiB")
    assert "; 0 left, " in text
    assert files(folder) == []
    assert len(run("status", "--disk", folder, "--json")["sessions"]) == 2


def test_clear_erases_a_tenant_and_nothing_else(folder: Path) -> None:
    (folder / "quarantine").mkdir()
    for name in (f"{ALICE[:16]}-s-00-0.kv", f"{BOB[:16]}-s-00-0.kv", "index.sqlite"):
        (folder / "quarantine" / name).write_bytes(b"damaged")
    kept = [name for name in files(folder) if not name.startswith(ALICE[:16])]
    data = run("clear", "--disk", folder, "--namespace", "alice", "--yes", "--json")
    assert (data["entries"], data["sessions"]) == (2, 1)
    assert files(folder) == kept
    assert sorted(os.listdir(folder / "quarantine")) == [f"{BOB[:16]}-s-00-0.kv"]
    assert [session["tenant"] for session in run("status", "--disk", folder, "--json")["sessions"]] == ["carol"]
    for file in (folder / "index.sqlite", folder / "index.sqlite-wal"):
        if file.exists():  # nothing of it is left in free pages either
            assert b"alice" not in file.read_bytes()
            assert path(300, 1)[100:140].tobytes() not in file.read_bytes()
    data = run("clear", "--disk", folder, "--namespace", "carol", "--yes", "--json")  # of whom there is a session alone
    assert (data["entries"], data["sessions"]) == (0, 1)
    data = run("clear", "--disk", folder, "--namespace", "", "--yes", "--json")  # what has no tenant
    assert files(folder) == [name for name in kept if name.startswith(BOB[:16])]
    data = run("clear", "--disk", folder, "--namespace", BOB[:6].upper(), "--yes", "--json")
    assert data["entries"] == 1
    assert files(folder) == []


@pytest.mark.parametrize(
    ("namespace", "why"),
    [
        ("a1", "nothing is kept of 'a1', only of the tenants '', 'alice', 'bob', 'carol'; namespaces a1a1"),
        ("a1b", "nothing is kept of 'a1b'"),
        ("dave", "nothing is kept of 'dave'"),
    ],
)
def test_a_namespace_that_is_not_there_is_an_error(folder: Path, namespace: str, why: str) -> None:
    before = files(folder)
    for command in (["clear", "--yes"], ["ls"]):
        with pytest.raises(SkippyError, match=why):
            run(*command, "--disk", folder, "--namespace", namespace)
    assert files(folder) == before


def test_a_hash_that_begins_several_is_an_error(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", capacity=2**30, min_free=0)
    for last in "01":
        keep(tier, "abcd" * 15 + "abc" + last, path(64, 3), noise(100, int(last)))
    tier.close()
    with pytest.raises(SkippyError, match=r"'abcd' begins several namespaces: abcd[abcd]*0, abcd[abcd]*1"):
        run("clear", "--disk", tmp_path / "kv", "--yes", "--namespace", "abcd")


def test_clear_asks_and_erases_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder)
    for more in ([], ["--json"]):
        with pytest.raises(SkippyError, match="nothing was erased: there is nobody to ask, so say --yes"):
            run("clear", "--disk", folder, *more)
    monkeypatch.setattr(commands, "somebody_is_there", lambda: True)
    asked: list[str] = []

    def confirm(answer: bool) -> Callable[..., bool]:
        def ask(question: str, **_: Any) -> bool:
            asked.append(question)
            return answer

        return ask

    monkeypatch.setattr("typer.confirm", confirm(False))
    assert run("clear", "--disk", folder, code=1) == "nothing was erased\n"
    assert files(folder) == before
    assert asked[0].startswith("Erase 4 entries and 2 sessions, 35")
    monkeypatch.setattr("typer.confirm", confirm(True))
    assert run("clear", "--disk", folder).startswith("erased: 4 entries and 2 sessions, 35")
    assert files(folder) == []
    data = run("status", "--disk", folder, "--json")
    assert (data["segments"], data["sessions"], data["namespaces"]) == (0, [], [])
    assert run("clear", "--disk", folder, "--json", "--yes")["entries"] == 0


# -- check ----------------------------------------------------------------------------------------------


def test_check_of_what_is_well(folder: Path) -> None:
    data = run("check", "--disk", folder, "--json")
    assert (data["ok"], data["files"], data["wrong"], data["foreign"]) == (True, 4, [], [])
    assert data["bytes"] == sum((folder / name).stat().st_size for name in files(folder))
    assert run("check", "--disk", folder) == "4 files: all is well\n"
    assert run("check", "--disk", folder, "--fix") == "4 files: all is well\n"


def a_state_is_damaged(folder: Path) -> str:
    flip(file_of(folder, BOB), -1)
    return file_of(folder, BOB).name


def a_head_is_damaged(folder: Path) -> str:
    flip(file_of(folder, BOB), 30)
    return file_of(folder, BOB).name


def a_file_is_cut_off(folder: Path) -> str:
    os.truncate(file_of(folder, BOB), 4000)
    return file_of(folder, BOB).name


def a_file_is_missing(folder: Path) -> str:
    name = file_of(folder, BOB).name
    (folder / name).unlink()
    return name


def a_row_is_missing(folder: Path) -> str:
    name = file_of(folder, BOB).name
    database = sqlite3.connect(folder / "index.sqlite")
    database.execute("DELETE FROM entries WHERE name = ?", (name,))
    database.commit()
    database.close()
    return name


def a_row_says_something_else(folder: Path) -> str:
    name = file_of(folder, BOB).name
    database = sqlite3.connect(folder / "index.sqlite")
    database.execute("UPDATE entries SET checksum = '00' WHERE name = ?", (name,))
    database.commit()
    database.close()
    return name


def a_writer_died(folder: Path) -> str:
    name = f"{BOB[:16]}-c-00-0.kv.0123456789ab.999999999.tmp"
    (folder / name).write_bytes(b"half")
    return name


def the_index_is_lost(folder: Path) -> str:
    for file in folder.glob("index.sqlite*"):
        file.unlink()
    return "index.sqlite"


def the_index_is_damaged(folder: Path) -> str:
    for file in folder.glob("index.sqlite-*"):
        file.unlink()
    (folder / "index.sqlite").write_bytes(noise(20_000, 5))
    return "index.sqlite"


BROKEN = [
    a_state_is_damaged, a_head_is_damaged, a_file_is_cut_off, a_file_is_missing, a_row_is_missing,
    a_row_says_something_else, a_writer_died, the_index_is_lost, the_index_is_damaged,
]  # fmt: skip


@pytest.mark.parametrize("damage", BROKEN)
def test_check_finds_what_is_wrong_and_puts_it_right(folder: Path, damage: Callable[[Path], str]) -> None:
    name = damage(folder)
    data = run("check", "--disk", folder, "--json", code=1)
    assert data["ok"] is False
    assert any(line.startswith(f"{name}: ") for line in data["wrong"])
    text = run("check", "--disk", folder, code=1)
    assert f"wrong: {name}: " in text
    assert "1 thing is wrong; skippy check --fix puts that right" in text
    fixed = run("check", "--disk", folder, "--fix", "--json")
    assert (fixed["ok"], fixed["left"]) == (True, [])
    assert any(line.startswith(f"{name}: ") for line in fixed["wrong"])
    assert run("check", "--disk", folder, "--json")["wrong"] == []
    tier = DiskTier(folder, capacity=2**30, min_free=0)
    assert tier.off is None
    lost = damage in (a_state_is_damaged, a_head_is_damaged, a_file_is_cut_off, a_file_is_missing)
    assert {row.entry.name for row in tier.rows()} == set(files(folder))
    assert len(tier.rows()) == 3 if lost else len(tier.rows()) >= 3
    tier.close()


def test_what_others_do_while_it_is_checked_is_not_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DiskTier.verify

    def meanwhile(tier: DiskTier, **options: Any) -> list[str]:
        other = DiskTier(folder, capacity=2**30, min_free=0)
        other.erase({BOB})
        keep(other, BOB, path(90, 9), noise(500, 9))
        other.close()
        return [*real(tier, **options), f"{file_of(folder, BOB).name}: the index does not know of it"]

    monkeypatch.setattr(DiskTier, "verify", meanwhile)
    assert run("check", "--disk", folder, "--json")["wrong"] == []


def test_fix_says_what_it_did(folder: Path) -> None:
    name = a_state_is_damaged(folder)
    text = run("check", "--disk", folder, "--fix")
    assert f"fixed: {name}: " in text
    assert text.endswith("4 files: 1 thing was wrong, and all is well now\n")
    assert (folder / "quarantine" / name).exists()


def test_what_is_foreign_or_newer_is_left_alone(folder: Path) -> None:
    newer = bytearray(file_of(folder, BOB).read_bytes())
    newer[8] = 99
    (folder / "0123456789abcdef-s-00-0.kv").write_bytes(newer)
    (folder / "notes.kv").write_bytes(b"somebody's notes")
    before = {name: (folder / name).read_bytes() for name in ("0123456789abcdef-s-00-0.kv", "notes.kv")}
    for more in ([], ["--fix"]):
        data = run("check", "--disk", folder, "--json", *more)
        assert data["ok"] is True
        assert data["foreign"] == ["0123456789abcdef-s-00-0.kv", "notes.kv"]
    assert "left alone: notes.kv: " in run("check", "--disk", folder)
    run("clear", "--disk", folder, "--yes")
    for name, content in before.items():
        assert name.startswith("0123") or (folder / name).read_bytes() == content


def test_an_index_of_a_newer_version_is_left_alone(folder: Path) -> None:
    database = sqlite3.connect(folder / "index.sqlite")
    database.execute("PRAGMA user_version=99")
    database.close()
    before = snapshot(folder)
    for command in EVERY:
        with pytest.raises(SkippyError, match="of version 99, this is version"):
            run(*command, "--disk", folder)
    assert snapshot(folder) == before


def test_a_file_under_another_name_is_wrong(folder: Path) -> None:
    file = file_of(folder, BOB)
    shutil.copy(file, folder / f"{file.stem}1.kv")
    data = run("check", "--disk", folder, "--json", code=1)
    assert [line.partition(":")[0] for line in data["wrong"]] == [f"{file.stem}1.kv"]


def test_the_checksum_is_of_what_is_in_the_file(folder: Path) -> None:
    """The check of the check: the state that the folder holds is what was offered."""
    tier = DiskTier(folder, capacity=2**30, write=False)
    row = next(row for row in tier.rows() if row.entry.namespace == NOBODY)
    tier.close()
    assert row.entry.checksum == xxhash.xxh3_64_intdigest(noise(10_000, 4))
