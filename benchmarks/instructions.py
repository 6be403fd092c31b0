"""Instructions that the tree's hot operations take, counted by callgrind: much the same on every run.

    python benchmarks/instructions.py [--store] [--json FILE]

Counted is each method of the compiled tree with all it calls, per call, over a tree of 400 paths of 1,088 tokens.
Without --store the counts are compared with benchmarks/instructions.json, which holds them by Python version and
processor family: leaves with 1 where one is more than 15 % above what is stored, or half as much again where nothing is
stored for this Python, because the interpreter's own calls are counted too.  Valgrind is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("instructions.json")
TOLERANCE, TOLERANCE_ELSEWHERE = 1.15, 1.50  # addresses differ from run to run, and with them what is hashed
PREFIXES, PATHS, SHARED, TAIL = 8, 400, 1024, 64
CALLS = 200
METHODS = ("match", "insert", "put", "take", "victim", "touch", "lock", "unlock")


def operations() -> None:
    """What is counted; runs under callgrind."""
    import numpy as np

    from skippy._radix import RadixTree

    rng = np.random.default_rng(20)

    def words(n: int) -> Any:
        return rng.integers(1, 32_000, n).astype(np.int32)

    heads = [words(SHARED) for _ in range(PREFIXES)]
    paths = [np.concatenate([heads[i % PREFIXES], words(TAIL)]) for i in range(PATHS)]
    tree = RadixTree()
    for path in paths:
        tree.put(tree.insert("n", path), "resident", 1)
    prompts = [np.concatenate([paths[i][: SHARED + 32], words(32)]) for i in range(CALLS)]
    for prompt in prompts:
        match = tree.match("n", prompt)
        assert match.matched == SHARED + 32
        assert match.resident is not None
        lock = tree.lock(match.resident, SHARED)
        tree.touch(match.resident)
        tree.unlock(lock)
        victim = tree.victim("resident")
        assert victim is not None
        path = tree.tokens(victim)
        tree.take(victim, "resident")
        tree.put(tree.insert("n", path), "resident", 1)


def key() -> str:
    return f"python {sys.version_info.major}.{sys.version_info.minor}, {platform.machine()}"


def counted() -> dict[str, float]:
    """Instructions per call of each method, with all it calls.  RuntimeError where valgrind fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--compress-strings=no", "--compress-pos=no",
            sys.executable, __file__, "--operations",
        ]  # fmt: skip
        settings = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc"}
        done = subprocess.run(command, capture_output=True, text=True, env=settings)
        if done.returncode:
            raise RuntimeError(f"valgrind ended with {done.returncode}: {done.stderr[-500:]}")
        return per_call(out.read_text(errors="replace"))


def per_call(text: str) -> dict[str, float]:
    """Sums of a callgrind file (uncompressed names): own and called instructions of each method, by its calls."""
    own: dict[str, int] = {}
    calls: dict[str, int] = {}
    name = None
    called = None
    for line in text.splitlines():
        if line.startswith("fn="):
            found = re.search(r"__pyx_pw_6skippy_6_radix_9RadixTree_\d+(\w+)", line)
            name = found[1] if found and found[1] in METHODS else None
        elif line.startswith("cfn="):
            found = re.search(r"__pyx_pw_6skippy_6_radix_9RadixTree_\d+(\w+)", line)
            called = found[1] if found and found[1] in METHODS else None
        elif line.startswith("calls="):
            if called is not None:
                calls[called] = calls.get(called, 0) + int(line[6:].split()[0])
        elif name is not None and (line[:1].isdigit() or line[:1] in ("+", "-", "*")):
            own[name] = own.get(name, 0) + int(line.split()[-1])
    return {name: own[name] / calls[name] for name in METHODS if calls.get(name) and name in own}


def too_many(found: dict[str, float], stored: dict[str, dict[str, float]]) -> list[str]:
    """What takes more instructions than it may, in words: than the counts of this Python, else than the largest."""
    here = key() in stored
    before = (
        stored[key()]
        if here
        else {
            name: max(each[name] for each in stored.values() if name in each)
            for name in {name for each in stored.values() for name in each}
        }
    )
    most = TOLERANCE if here else TOLERANCE_ELSEWHERE
    return [
        f"{name} takes {found[name]:,.0f} instructions, {most:g} times {before[name]:,.0f} are allowed"
        for name in found
        if name in before and found[name] > most * before[name]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="keep the counts as those to compare with")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--operations", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.operations:
        operations()
        return
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is needed (Debian: apt-get install valgrind)")
    stored: dict[str, dict[str, float]] = json.loads(STORED.read_text()) if STORED.exists() else {}
    found = {name: round(count, 1) for name, count in counted().items()}
    before = stored.get(key(), {})
    for name, count in found.items():
        beside = f", {100 * (count / before[name] - 1):+.1f} % of {before[name]:,.0f}" if name in before else ""
        print(f"{name:8} {count:10,.0f} instructions a call{beside}")
    if options.json:
        options.json.write_text(json.dumps({"key": key(), "counts": found, "stored": before}, indent=1) + "\n")
    if options.store:
        STORED.write_text(json.dumps(stored | {key(): found}, indent=1) + "\n")
    elif wrong := too_many(found, stored):
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
