"""The README's examples run as they stand, and what it points to is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import skippy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(5))
def test_examples_run(
    number: int,
    smol_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIPPY_DISK_MIN_FREE", "0")
    assert len(EXAMPLES) == 5
    code = EXAMPLES[number]
    assert len(code.strip().splitlines()) <= 12
    exec(compile(code.replace('"model.gguf"', repr(str(smol_path))), f"README example {number}", "exec"), {})
    out = capsys.readouterr().out
    if number == 0:
        cached, prompt = map(int, re.findall(r"(\d+) of (\d+) tokens were not evaluated again", out)[0])
        assert prompt - 12 < cached < prompt
    elif number == 1:
        tiers = re.findall(r"'resident': (\d+)", out)
        assert int(tiers[0]) > 80
    elif number == 3:
        disk, evaluated = map(int, re.findall(r"'disk': (\d+)\} (\d+)", out)[0])
        assert disk > 100
        assert evaluated < 40
    elif number == 4:
        (none, _), (cached, prompt) = re.findall(r"(\d+) of (\d+)", out)
        assert (int(none), int(cached) > 80) == (0, True)
        assert int(prompt) - int(cached) < 20
    else:
        first, second = re.findall(r"(never_seen|partial) (\d+)", out)
        assert (first[0], second[0]) == ("never_seen", "partial")
        assert int(second[1]) < 20 < int(first[1])


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "vendor/README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == skippy.__version__
    assert f"## {skippy.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    low, high = skippy._binding.SUPPORTED
    assert f"llama-cpp-python>={low},<{high}" in project["dependencies"]
    assert f"llama-cpp-python=={low}" in (ROOT / "vendor/requirements.txt").read_text()
