"""Several lanes against one: throughput and waiting, what agents in turns reuse, and what the cache costs them.

    python benchmarks/lanes.py [--model PATH] [--threads N] [--rounds 3] [--json FILE]

1. Eight requests with nothing in common, from eight threads, on four lanes and on one, in turns: tokens per second of
   all together, time to first token (p50, p99).
2. Four agents, each sending its history with every step over a shared system prompt with tools, in turns: the share of
   prompt tokens that was reused, with a pool that holds them all and with smaller ones (no RAM beside them, then with).
3. As 1 on four lanes, with the cache and with mode "disabled", in pairs: what it costs where there is nothing to reuse.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import skippy
from skippy.commands.options import packaged_model

PROMPT, ANSWER = 128, 32
POOLS = ((4096, "0"), (2048, "0"), (1536, "0"), (1536, "256MiB"))


def words(n: int, rng: np.random.Generator, rt: skippy.Runtime) -> list[int]:
    return [int(token) for token in rng.integers(300, rt.model.n_vocab, n)]


def at_once(calls: list[Callable[[], skippy.Completion]]) -> tuple[float, list[skippy.Completion]]:
    """Seconds until all of them have answered, each in a thread of its own, and the answers."""
    answers: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        answers[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, answers


def load(rt: skippy.Runtime, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    prompts = [words(PROMPT, rng, rt) for _ in range(8)]
    seconds, answers = at_once([lambda p=prompt: rt.generate(p, max_tokens=ANSWER) for prompt in prompts])  # type: ignore[misc]
    ttft = [answer.reuse.ttft_ms for answer in answers]
    tokens = sum(PROMPT + len(answer.tokens) for answer in answers)
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "p50": statistics.median(ttft), "p99": max(ttft)}


def lanes_against_one(path: Path, threads: int, rounds: int) -> dict[str, Any]:
    found: dict[int, list[dict[str, float]]] = {4: [], 1: []}
    runtimes = {lanes: skippy.Runtime(path, n_ctx=4096, lanes=lanes, n_threads=threads) for lanes in found}
    for i in range(rounds + 1):
        for lanes in sorted(found, reverse=bool(i % 2)):
            result = load(runtimes[lanes], i)
            if i:
                found[lanes].append(result)
    for rt in runtimes.values():
        rt.close()
    return {
        f"{lanes} lanes": {key: statistics.median(result[key] for result in results) for key in results[0]}
        for lanes, results in found.items()
    }


def agents(path: Path, threads: int, n_ctx: int, ram: str, steps: int = 8) -> dict[str, Any]:
    """Four agents in turns; each step sends everything so far and 40 tokens of observations."""
    cache = skippy.CacheConfig(ram=ram, max_resident_tokens=0)
    with skippy.Runtime(path, n_ctx=n_ctx, lanes=4, n_threads=threads, cache=cache) as rt:
        rng = np.random.default_rng(5)
        system = words(1000, rng, rt)
        histories = [list(system) for _ in range(4)]
        prompt = reused = 0
        for _ in range(steps):
            for history in histories:
                history += words(40, rng, rt)
                answer = rt.generate(history, max_tokens=12)
                history += answer.tokens
                prompt += answer.reuse.prompt_tokens
                reused += answer.reuse.cached_tokens
        return {"n_ctx": n_ctx, "ram": ram, "prompt_tokens": prompt, "reused_percent": 100 * reused / prompt}


def cost_of_the_cache(path: Path, threads: int, rounds: int) -> dict[str, float]:
    runtimes = {
        mode: skippy.Runtime(path, n_ctx=4096, lanes=4, n_threads=threads, cache=skippy.CacheConfig(mode=mode))  # type: ignore[arg-type]
        for mode in ("lookup-record", "disabled")
    }
    differences = []
    for i in range(rounds + 1):
        seconds = {mode: load(runtimes[mode], 100 + i)["seconds"] for mode in sorted(runtimes, reverse=bool(i % 2))}
        if i:
            differences.append(100 * (seconds["lookup-record"] / seconds["disabled"] - 1))
    for rt in runtimes.values():
        rt.close()
    low, middle, high = statistics.quantiles(differences, n=4) if len(differences) > 1 else 3 * differences
    return {"quartile_1": low, "median": middle, "quartile_3": high, "pairs": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, choices=(1, 2, 3), help="one part alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = options.model or packaged_model()
    console = Console(width=120)
    parts = (options.only,) if options.only else (1, 2, 3)
    results: dict[str, Any] = {}
    if 1 in parts:
        results["lanes"] = show_load(lanes_against_one(path, options.threads, options.rounds), options.rounds, console)
    if 2 in parts:
        results["agents"] = show_agents([agents(path, options.threads, *pool) for pool in POOLS], console)
    if 3 in parts:
        cost = results["cost"] = cost_of_the_cache(path, options.threads, 3 * options.rounds)
        console.print(
            f"nothing to reuse, four lanes, with the cache against without: {cost['median']:+.2f} % of the time "
            f"(quartiles {cost['quartile_1']:+.2f} and {cost['quartile_3']:+.2f}, {cost['pairs']} pairs)"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def show_load(found: dict[str, Any], rounds: int, console: Console) -> dict[str, Any]:
    table = Table(title=f"eight requests of {PROMPT} new tokens and {ANSWER} answered, medians of {rounds} rounds")
    for column in ("", "tokens/s", "TTFT p50, ms", "p99, ms"):
        table.add_column(column, justify="right")
    for name, result in found.items():
        table.add_row(name, f"{result['tokens_per_second']:.1f}", f"{result['p50']:.0f}", f"{result['p99']:.0f}")
    console.print(table)
    return found


def show_agents(pools: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    table = Table(title="four agents in turns over a system prompt of 1,000 tokens, eight steps each")
    for column in ("cells", "RAM", "prompt tokens", "reused, %"):
        table.add_column(column, justify="right")
    for pool in pools:
        table.add_row(str(pool["n_ctx"]), pool["ram"], str(pool["prompt_tokens"]), f"{pool['reused_percent']:.1f}")
    console.print(table)
    return pools


if __name__ == "__main__":
    main()
