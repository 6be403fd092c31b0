"""The command: what it says of itself, its exit codes, and what explain and bench find."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import skippy
from skippy import cli
from skippy.commands.explain import explain_prompts, read_prompt
from skippy.demo.run import Outcome, Row
from skippy.model import Model
from tests.conftest import words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/commands.md"
COMMANDS = ("", "demo", "chat", "explain", "bench", "status", "ls", "prune", "clear", "check")
MARKED = re.compile(r"(<!-- help: skippy ?(\w*) -->\n```text\n)(.*?)(```\n<!-- end -->\n)", re.DOTALL)


def run(*arguments: str | Path) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "80", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], prog_name="skippy", env=env)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """What the installed command leaves with."""
    monkeypatch.setattr("sys.argv", ["skippy", *map(str, arguments)])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


def help_of(command: str) -> str:
    """What the installed command prints in a terminal of 80 columns."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        for name, value in (("NO_COLOR", "1"), ("COLUMNS", "80")):
            patch.setenv(name, value)
        assert main(patch, *command.split(), "--help") == 0
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


# -- what it says of itself -----------------------------------------------------------------------------


def test_the_page_shows_the_help_as_it_is() -> None:
    """`python -m tests.test_cli` writes the page anew."""
    blocks = {command: text for _, command, text, _ in MARKED.findall(PAGE.read_text())}
    assert tuple(blocks) == COMMANDS
    for command, text in blocks.items():
        assert text == help_of(command), f"docs/commands.md is not what `skippy {command} --help` prints"


def test_every_command_is_on_the_page_and_shows_an_example_and_json() -> None:
    names = [command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback]
    assert ("", *names) == COMMANDS
    for name in names:
        text = help_of(name)
        assert f"\n    skippy {name} " in text[text.index("  Examples:") :]
        assert "  --json " in text
        assert max(map(len, text.splitlines())) <= 80
    assert "Exit codes: 0" in help_of("")


def test_the_distribution_has_every_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("skippy/**/__init__.py")}
    assert set(packages) == found


# -- exit codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--turns", "5"], ["chat", "--max-tokens", "0"], ["chat", "--temperature", "-1"], ["explain"],
        ["explain", "m"], ["bench", "--n-ctx", "x"], ["nothing"], ["demo", "--nothing"],
        ["prune"], ["prune", "--to", "1G"], ["ls", "--limit", "-1"], ["ls", "--sort", "name"], ["check", "model.gguf"],
    ],
)  # fmt: skip
def test_wrong_arguments_leave_with_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize("command", [["chat"], ["bench"], ["demo", "--model"], ["explain"]])
def test_a_model_that_cannot_be_loaded_is_one_line_and_2(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hello")
    files = [prompt] if command == ["explain"] else []
    assert main(monkeypatch, *command, tmp_path / "[no].gguf", *files) == 2
    expected = f"skippy: model_path: there is no file '{tmp_path}/[no].gguf', expected a GGUF model\n"
    assert capsys.readouterr().err == expected
    (tmp_path / "bad.gguf").write_text("this is no model")
    assert main(monkeypatch, *command, tmp_path / "bad.gguf", *files) == 2
    err = capsys.readouterr().err
    assert err.startswith("skippy: model_path: llama.cpp could not load ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("gone.txt", None, "No such file or directory"),
        ("latin.txt", b"caf\xe9", "no UTF-8 text: unexpected end of data at byte 3"),
        ("broken.json", b"[{", "Expecting property name enclosed in double quotes: line 1 column 3 (char 2), expected"),
        ("number.json", b"7", 'expected a list of messages with "role" and "content", or {"messages": [...]}'),
        ("empty.txt", b"", "the prompt has no tokens"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_line_and_2(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, content: bytes | None, complaint: str,
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(monkeypatch, "explain", smol_path, tmp_path / name, "--json") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"skippy: {tmp_path / name}: {complaint}")
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line_and_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(monkeypatch, "bench", "m.gguf", "--out", tmp_path / "file") == 2
    assert re.fullmatch(r"skippy: \[Errno 17\] File exists: '.*/file'\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_where_nothing_can_be_drawn_it_is_said_before_anything_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else real(name, *more)
    )
    assert main(monkeypatch, command, "--out", tmp_path / "out") == 2
    assert "--out draws with matplotlib, which is not installed: pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [["status"], ["ls"], ["prune", "--to", "0"], ["clear"], ["check"]])
def test_a_folder_that_is_not_there_is_one_line_and_2(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SKIPPY_DISK", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "skippy: there is no folder of saved state: give --disk FOLDER, or set SKIPPY_DISK=FOLDER, "
        'or disk = "FOLDER" in skippy.toml\n'
    )


# -- explain --------------------------------------------------------------------------------------------

SHOP = " The shop lends bicycles to guests of the town, by the day and by the week, with a helmet and a lock." * 3


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_explain_says_where_prompts_part(smol: Model, smol_path: Path, tmp_path: Path) -> None:
    head = "You help the guests of a shop in a harbour town." + SHOP + " Today is "
    days = ["Monday", "Tuesday", "Wednesday", "Monday"]
    texts = [f"{head}{day}.{SHOP}" for day in days]
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    result = run("explain", smol_path, *paths, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    ids = [smol.tokenize(text) for text in texts]
    at = common(ids[0], ids[1])
    assert smol.detokenize(ids[0][at : at + 2]) == " Monday."
    assert {common(ids[i], ids[j]) for i in range(3) for j in range(i)} == {at}
    n = len(ids[0])
    assert 64 < at < n
    assert {len(tokens) for tokens in ids} == {n}
    expected = [
        (0, 0, n, "never_seen", None, None, None), (at, at, n - at, "partial", at, None, None),
        (at, at, n - at, "partial", at, "volatile_prefix", at), (n, n - 1, 1, "hit", None, "volatile_prefix", at),
    ]  # fmt: skip
    fields = ("matched_tokens", "cached_tokens", "evaluated_tokens", "reason", "diverged_at", "hint", "hint_at")
    assert [tuple(found[field] for field in fields) for found in data["prompts"]] == expected
    assert [found["name"] for found in data["prompts"]] == [str(path) for path in paths]
    assert {found["prompt_tokens"] for found in data["prompts"]} == {n}
    for i in (1, 2):
        assert data["prompts"][i]["stored_text"] == smol.detokenize(ids[i - 1][at - 8 : at + 8])
        assert data["prompts"][i]["prompt_text"] == smol.detokenize(ids[i][at - 8 : at + 8])
    assert data["totals"] == {
        "prompt_tokens": 4 * n, "cached_tokens": 2 * at + n - 1, "evaluated_tokens": 2 * n - 2 * at + 1 + n,
    }  # fmt: skip
    assert data["min_tokens"] == 64
    shown = run("explain", smol_path, *paths, "--min-tokens", at + 1).output
    assert f"2.txt parts from an earlier prompt at token {at}:" in shown
    assert shown.count("volatile_prefix: three prompts or more part") == 1
    assert re.search(r"1\.txt +│ +\d+ │ +0 │ +\d+ │ +\d+ │ below_min_tokens", shown)


def test_explain_finds_what_the_runtime_does(
    open_runtime: Callable[..., skippy.Runtime], smol_path: Path, tmp_path: Path
) -> None:
    chats: list[list[dict[str, str]]] = [
        [{"role": "system", "content": "You mend bicycles." + SHOP}, {"role": "user", "content": text}]
        for text in ("My chain is off.", "My chain is rusty.", "The bell is gone.")
    ]
    paths = [tmp_path / "0.json", tmp_path / "1.json", tmp_path / "2"]
    for path, messages in zip(paths, chats, strict=True):
        path.write_text(json.dumps(messages if path.name != "1.json" else {"messages": messages, "model": "m"}))
    data = json.loads(run("explain", smol_path, *paths, "--json").stdout)
    runtime = open_runtime({"min_tokens": 64})
    for messages, found in zip(chats, data["prompts"], strict=True):
        told = runtime.explain(runtime.render(messages))
        reuse = runtime.chat(messages, max_tokens=0).reuse
        assert found["prompt_tokens"] == reuse.prompt_tokens
        assert found["cached_tokens"] == reuse.cached_tokens == told.cached_tokens
        assert found["evaluated_tokens"] == reuse.evaluated_tokens
        assert found["diverged_at"] == reuse.diverged_at
        assert (found["reason"], found["stored_text"], found["prompt_text"]) == (
            told.reason, told.stored_text, told.prompt_text,
        )  # fmt: skip
    assert "<|im_start|>user\nMy chain is rusty" in data["prompts"][1]["prompt_text"]


def test_what_is_not_stored_parts_nothing() -> None:
    short, long = np.array(words(9), np.int32), np.array(words(20), np.int32)
    prompts = [("short", short), ("long", long), ("one", long[:1]), ("again", long)]
    found = explain_prompts(prompts, lambda tokens: str(len(tokens)), min_tokens=10)
    assert [(f.matched_tokens, f.cached_tokens, f.reason) for f in found] == [
        (0, 0, "never_seen"), (0, 0, "never_seen"), (1, 0, "below_min_tokens"), (20, 19, "hit"),
    ]  # fmt: skip
    assert {f.diverged_at for f in found} == {None}
    assert explain_prompts([("a", long), ("b", long[:1])], str, min_tokens=0)[1].cached_tokens == 0


def test_of_several_earlier_prompts_the_last_one_is_shown() -> None:
    one, two, three = (np.array([*words(10), *words(9, seed)], np.int32) for seed in (1, 2, 3))
    prompts = [("one", one), ("two", two), ("one", one), ("three", three)]
    found = explain_prompts(prompts, lambda tokens: str(tokens.tolist()), min_tokens=10)[3]
    assert found.stored_text == str([*words(10)[2:], *words(9, 1)[:8]])
    assert found.prompt_text == str([*words(10)[2:], *words(9, 3)[:8]])


def test_a_chat_is_known_by_its_content(tmp_path: Path, smol_path: Path) -> None:
    path = tmp_path / "file.txt"
    messages = [{"role": "user", "content": "hi"}]
    for text, prompt in (
        (json.dumps(messages), (messages, None)),
        (json.dumps({"messages": messages, "tools": [{}]}), (messages, [{}])),
        ('{"a": 1}', '{"a": 1}'),
        ("[1, 2]", "[1, 2]"),
        ("[]", "[]"),
    ):
        path.write_text(text)
        assert read_prompt(path) == prompt
    path.write_text('[{"role": "user"}]')
    with pytest.raises(skippy.SkippyError, match=r"file.txt: the model's chat template refuses it: "):
        cli.app(["explain", str(smol_path), str(path)], standalone_mode=False)


# -- demo -----------------------------------------------------------------------------------------------


def test_a_check_that_fails_leaves_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(
        name="request 1", prompt_tokens=100, cached_tokens=95, evaluated_tokens=5,
        by_tier={"resident": 95, "ram": 0, "disk": 0}, saveable_tokens=95, behind_checkpoint=0, rows_checked=95,
        rows_wrong=3, ttft_cold_ms=100.0, ttft_ms=10.0, same_answer=True, parting=None, answer="Yes.",
    )  # fmt: skip
    bad = Outcome([row], {}, {"model": "m", "threads": 2}, {})
    monkeypatch.setattr("skippy.demo.run.play", lambda *_, **__: bad)
    result = run("demo", "--model", "m.gguf", "--json")
    assert result.exit_code == 1
    assert "request 1: 3 of 95 restored tokens are not what was evaluated" in result.stderr
    assert run("demo", "--model", "m.gguf").exit_code == 1


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda m: m[1] + help_of(m[2]) + m[4], PAGE.read_text()))
