"""How fast saved state is, beside a plain memcpy of the same bytes in the same run.

    python benchmarks/state.py [--model PATH] [--rounds 40] [--json FILE]

One row per length.  "copy" is llama.cpp's own save or load into or out of memory that stays mapped, "checked" that and
the checksum, "whole" what skippy does for a range of a path: capture on a scratch sequence, size, header, checksum.
The pool has 2,048 cells, or four times the length: every call of llama.cpp walks over all of them.
Each figure is the median over rounds in which all of them take turns; the percentage is memcpy's time over it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from skippy.cli import packaged_model
from skippy.model import Model
from skippy.pool import Pool
from skippy.segments import RamStore

LENGTHS = (64, 512, 2048)
STEPS = tuple(f"{what}_{how}" for what in ("save", "restore") for how in ("copy", "checked", "whole"))


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)


def measure(model: Model, n: int, rounds: int) -> dict[str, float]:
    context = model.new_context(n_ctx=max(2048, 4 * n), n_seq_max=4, n_threads=2)
    sequences = context.sequences
    tokens = np.random.default_rng(n).integers(1000, 20000, n).astype(np.int32)
    for at in range(0, n, 512):
        sequences.decode(0, at, tokens[at : at + 512])
    pool = Pool(sequences, lanes=2, residents=1)
    store = RamStore(512 << 20)
    size = sequences.state_size(0)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    block = store.arena.allocate(size)
    segment = store.save(pool, 0, 0, n)
    assert block is not None
    assert segment is not None
    # The second half of the path, as a delta: what a turn of a conversation saves and restores.
    half = store.save(pool, 0, n // 2, n)
    assert half is not None
    pool.append(0, 1, 0, n // 2)

    def save_checked() -> None:
        sequences.save(0, block.view)
        xxhash.xxh3_64_intdigest(block.view)

    def restore_checked() -> None:
        xxhash.xxh3_64_intdigest(segment.block.view)
        sequences.load(3, segment.block.view)

    def save_whole() -> None:
        found = store.save(pool, 0, 0, n)
        assert found is not None
        store.drop(found)

    def restore_delta() -> None:
        store.restore(pool, half, 1, n // 2, n)

    actions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "save_copy": lambda: sequences.save(0, block.view),
        "save_checked": save_checked,
        "save_whole": save_whole,
        "restore_copy": lambda: sequences.load(3, segment.block.view),
        "restore_checked": restore_checked,
        "restore_whole": lambda: store.restore(pool, segment, 3, 0, n),
        "restore_delta_of_half": restore_delta,
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for i in range(rounds + 3):
        for name, action in actions.items():
            if name.startswith("restore") and name != "restore_delta_of_half":
                pool.empty(3)
            elapsed = timed(action)
            if name == "restore_delta_of_half":
                pool.trim(1, n // 2)
            if i >= 3:
                times[name].append(elapsed)
    context.close()
    result = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    for name in STEPS:
        result[f"{name}_percent_of_memcpy"] = 100 * result["memcpy_ms"] / result[f"{name}_ms"]
    return {"tokens": n, "bytes": size, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = Model(options.model or packaged_model())
    rows = [measure(model, n, options.rounds) for n in LENGTHS]
    table = Table(
        title=f"saved state, {model.description}, ms and percent of memcpy, medians of {options.rounds} rounds"
    )
    table.add_column("step")
    for row in rows:
        table.add_column(f"{row['tokens']:.0f} tokens, {row['bytes'] / 1e6:.1f} MB", justify="right")
    for step in ("memcpy", *STEPS, "restore_delta_of_half"):
        cells = []
        for row in rows:
            percent = row.get(f"{step}_percent_of_memcpy")
            cells.append(f"{row[f'{step}_ms']:.3f}" + (f"  {percent:3.0f} %" if percent else "       "))
        table.add_row(step.replace("_", " "), *cells)
    Console().print(table)
    model.close()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
