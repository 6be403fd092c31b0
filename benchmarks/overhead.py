"""What the cache costs where there is nothing to reuse: skippy.Llama beside llama_cpp.Llama, in pairs.

    python benchmarks/overhead.py [--model PATH] [--tokens 256] [--pairs 20] [--threads N] [--max-resident-tokens N]

Each round asks both for the first token of the same new prompt, in changing order, and skippy.Llama with mode
"disabled" beside them, which does what llama_cpp.Llama does: its difference is noise.  Printed are medians and
quartiles of the times and of the differences within a round; each is noise plus overhead, so look at its quartiles.
The last row is what the cache itself did meanwhile, by its own clock: looking up, and keeping what was evaluated (which
comes after the first token).  Prompts that stay in the pool make llama.cpp attend over more cells; to see what that
costs, compare with --max-resident-tokens 256.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import llama_cpp
import numpy as np
from rich.console import Console
from rich.table import Table

import skippy
from skippy.cli import packaged_model


def first_token_ms(llama: llama_cpp.Llama, prompt: list[int]) -> float:
    began = time.perf_counter()
    tokens = llama.generate(prompt, temp=0.0)
    next(tokens)
    elapsed = 1e3 * (time.perf_counter() - began)
    tokens.close()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-resident-tokens", type=int, help="cap of the cells that cached prompts keep")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = str(options.model or packaged_model())
    settings = {
        "n_ctx": 4096, "flash_attn": True, "verbose": False, "n_threads": options.threads,
        "n_threads_batch": options.threads,
    }  # fmt: skip
    parent = llama_cpp.Llama(path, **settings)
    cap = options.max_resident_tokens
    ours = skippy.Llama(path, cache=skippy.CacheConfig(max_resident_tokens=cap), **settings)
    control = skippy.Llama(path, cache=skippy.CacheConfig(mode="disabled"), **settings)
    assert ours.prefix_cache is not None
    cache = ours.prefix_cache.cache
    own: list[float] = []
    record, lookup = cache.record, cache.begin

    def timed_record(*args: object) -> bool:
        began = time.perf_counter()
        try:
            return record(*args)  # type: ignore[arg-type]
        finally:
            own[-1] += 1e3 * (time.perf_counter() - began)

    def timed_begin(*args: object, **kwargs: object) -> object:
        began = time.perf_counter()
        try:
            return lookup(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            own.append(1e3 * (time.perf_counter() - began))

    cache.record, cache.begin = timed_record, timed_begin  # type: ignore[method-assign, assignment]
    rng = np.random.default_rng(1)
    arms = {"llama_cpp.Llama": parent, "skippy.Llama": ours, "skippy.Llama, disabled": control}
    times: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for i in range(options.pairs + 2):
        prompt = rng.integers(1000, 20000, options.tokens).tolist()
        order = [*order[1:], order[0]]
        for name in order:
            elapsed = first_token_ms(arms[name], prompt)
            if i >= 2:
                times[name].append(elapsed)
    plain, with_cache, without = times.values()
    rows = {
        **times,
        "difference within a pair": [b - a for a, b in zip(plain, with_cache, strict=True)],
        "the same, disabled": [b - a for a, b in zip(plain, without, strict=True)],
        "the cache by its own clock": own[2:],
    }
    table = Table(title=f"first token of {options.tokens} new tokens, {options.pairs} pairs, {options.threads} threads")
    for column in ("ms", "quartile", "median", "quartile", "median, % of TTFT"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    base = statistics.median(times["llama_cpp.Llama"])
    result = {}
    for name, values in rows.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result[name] = {"quartile_1": low, "median": middle, "quartile_3": high, "percent_of_ttft": 100 * middle / base}
        table.add_row(name, f"{low:.3f}", f"{middle:.3f}", f"{high:.3f}", f"{100 * middle / base:.3f}")
    Console(width=110).print(table)
    parent.close()
    ours.close()
    control.close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
