"""What keeping state while a prompt is evaluated costs where state cannot be cut: on against off, in pairs.

    python benchmarks/checkpoints.py [--model PATH ...] [--tokens 2000] [--pairs 10] [--threads N] [--json FILE]

Each pair evaluates the same new prompt twice, in changing order: once with pauses at the starts of six messages, a
checkpoint at each and at the end, and once without (`cache_prompt=False`).  Without --model: Gemma 3 270M (sliding
window) from its package, and two tiny models with random weights, one hybrid and one recurrent.  The difference within
a pair is noise plus cost, so look at its quartiles; the last columns are what the cache did, by its own clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import skippy
from skippy.commands.options import packaged_model

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tiny models, which belong to the tests

from tests.tiny_models import write_model


def measure(path: Path, *, tokens: int, pairs: int, threads: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    cache = skippy.CacheConfig(ram="1GiB")
    with skippy.Runtime(path, n_ctx=tokens + 64, lanes=1, n_threads=threads, cache=cache) as rt:
        starts = [tokens * part // 7 for part in range(1, 7)]
        on: list[float] = []
        off: list[float] = []
        for i in range(pairs + 1):
            prompt = rng.integers(5, rt.model.n_vocab, tokens).tolist()
            for keep in sorted((True, False), reverse=bool(i % 2)):
                before = rt.stats()["ram"]["seconds_saving"]
                reuse = rt.generate(prompt, max_tokens=1, message_starts=starts, cache_prompt=keep).reuse
                assert reuse.evaluated_tokens == tokens
                if i:
                    (on if keep else off).append(reuse.ttft_ms)
                if keep:
                    saving = 1e3 * (rt.stats()["ram"]["seconds_saving"] - before)
            rt.clear()
        differences = [a - b for a, b in zip(on, off, strict=True)]
        stats = rt.stats()
        return {
            "model": stats["model"]["description"],
            "family": stats["model"]["family"],
            "off_ms": statistics.median(off),
            "on_ms": statistics.median(on),
            "difference_ms": statistics.quantiles(differences, n=4),
            "saving_ms": saving,
            "bytes_per_token": stats["model"]["bytes_per_token"],
            "bytes_per_checkpoint": stats["model"]["bytes_per_checkpoint"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        models = options.model or [
            packaged_model("gemma3"),
            *(write_model(name, Path(folder) / f"{name}.gguf") for name in ("falconh1", "mamba")),
        ]
        for model in models:
            found = measure(model, tokens=options.tokens, pairs=options.pairs, threads=options.threads)
            results.append(found | {"file": Path(model).name})
    table = Table(title=f"{options.tokens} new tokens, {options.pairs} pairs, {options.threads} threads; times in ms")
    for column in ("model", "family", "off", "on", "difference: quartile", "median", "quartile", "%", "saving"):
        table.add_column(column, justify="left" if column in ("model", "family") else "right")
    for found in results:
        low, middle, high = found["difference_ms"]
        table.add_row(
            found["model"], found["family"], f"{found['off_ms']:.1f}", f"{found['on_ms']:.1f}", f"{low:.1f}",
            f"{middle:.1f}", f"{high:.1f}", f"{100 * middle / found['off_ms']:.2f}", f"{found['saving_ms']:.2f}",
        )  # fmt: skip
    Console(width=132).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
