"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_langchain(smol_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / "langchain_chat.py", smol_path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (none, first), (cached, second) = [
        tuple(map(int, pair)) for pair in re.findall(r"reused (\d+) of (\d+)", run.stdout)
    ]
    assert none == 0
    assert first <= cached < second  # the first prompt, and what the model answered, as far as it is the same text
    assert run.stdout.count("->") == 2
