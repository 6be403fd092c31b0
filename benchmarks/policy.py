"""What leaves first: policies on traces of requests, without a model.

    python benchmarks/policy.py [TRACE.jsonl ...] [--budgets 16K,32K] [--tiers pool,ram] [--requests N] [--json FILE]

TRACE is in Mooncake's format: a line a request, with `hash_ids` of blocks of 512 tokens and `input_length`.  Without
one, a synthetic trace is made: agents over a few system prompts, conversations that go on and end, and prompts that
come once.  Answers are not replayed: a trace does not say which block of the next turn holds them.

A block is replayed as 32 tokens, so that 1 cell stands for 16 tokens; figures and budgets are in the trace's tokens.
"worth" and "lru" are skippy's: its cache, tree, pool, shelf and choice, over a context that holds positions and no
memory.  What a running request needs is not part of the budget.  Tiers: "pool": all of it cells of residents; "ram":
all of it saved state; "both": a quarter of it cells, the rest saved state.  Beside them, in blocks: "blocks, lru" is
what caches of fixed pages do; "bound" lets leave what is used again the latest, which only who knows the future can.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from skippy.bench.replay import Tier, replay

BLOCK, PER_BLOCK = 512, 32
SCALE = BLOCK // PER_BLOCK


class Request:
    """A prompt: its blocks, and how many of its (scaled) tokens each of them holds."""

    def __init__(self, blocks: list[int], length: int) -> None:
        length = max(1, min(round(length / SCALE), len(blocks) * PER_BLOCK))
        self.blocks = blocks[: -(-length // PER_BLOCK)]
        self.sizes = [PER_BLOCK] * len(self.blocks)
        self.sizes[-1] = length - PER_BLOCK * (len(self.blocks) - 1)
        names = np.array(self.blocks, np.int64)[:, None] * PER_BLOCK + np.arange(PER_BLOCK)
        self.tokens = (names.reshape(-1)[:length] % (2**31 - 1)).astype(np.int32)


def read_trace(path: Path, most: int) -> list[Request]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    rows = sorted(rows, key=lambda row: row.get("timestamp", 0))[:most]
    return [Request(row["hash_ids"], row["input_length"]) for row in rows if row["hash_ids"]]


def synthetic(requests: int, seed: int = 5) -> list[Request]:
    """Of each ten requests four come once, about one begins a conversation over one of eight system prompts."""
    rng = random.Random(seed)
    made = 0

    def blocks(n: int) -> list[int]:
        nonlocal made
        made += n
        return list(range(made - n, made))

    systems = [blocks(rng.randint(1, 8)) for _ in range(8)]
    going: list[list[int]] = []  # the latest first: who has just written writes again the soonest
    found: list[Request] = []
    for _ in range(requests):
        chance = rng.random()
        if chance < 0.4:
            prompt = blocks(rng.randint(2, 30))
        elif chance < 0.9 and going:
            prompt = going.pop(min(int(rng.expovariate(0.25)), len(going) - 1)) + blocks(rng.randint(1, 4))
            if rng.random() < 0.85 and len(prompt) < 64:
                going.insert(0, prompt)
        else:
            prompt = systems[min(int(rng.expovariate(0.5)), 7)] + blocks(rng.randint(1, 6))
            going.insert(0, prompt)
        found.append(Request(prompt, len(prompt) * BLOCK - rng.randint(0, BLOCK - 1)))
    return found


def next_uses(requests: list[Request]) -> Iterator[list[int]]:
    """For each request, when each of its blocks is used again."""
    coming: dict[int, int] = defaultdict(lambda: len(requests))
    backwards = []
    for at in range(len(requests) - 1, -1, -1):
        backwards.append([coming[block] for block in requests[at].blocks])
        coming.update(dict.fromkeys(requests[at].blocks, at))
    return reversed(backwards)


def in_blocks(requests: list[Request], budget: int, *, future: bool) -> int:
    """Tokens that a cache of blocks finds which drops the least recent one, or the one that is needed the latest.

    Of one path the deepest is first in both orders, so that no block is left behind a gap.
    """
    sizes: dict[int, int] = {}
    rank: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    used = hits = 0
    for at, (request, again) in enumerate(zip(requests, next_uses(requests), strict=True)):
        found, running = 0, True
        for depth, (block, size, later) in enumerate(zip(request.blocks, request.sizes, again, strict=True)):
            running = running and block in sizes
            if running:
                found += min(size, sizes[block])
            used += size - sizes.get(block, 0)
            sizes[block] = size
            rank[block] = (-later if future else at, -depth)
            heapq.heappush(heap, (*rank[block], block))
        hits += min(found, len(request.tokens) - 1)
        while used > budget:
            when, depth, block = heapq.heappop(heap)
            if rank.get(block) == (when, depth):
                used -= sizes.pop(block)
                del rank[block]
    return hits


def measure(requests: list[Request], budgets: list[int], tiers: list[Tier], prefill: float) -> dict[str, Any]:
    total = sum(len(request.tokens) for request in requests)

    def figure(hits: float, more: dict[str, float] | None = None) -> dict[str, float]:
        return {"hit_rate": hits / total, "seconds_saved": hits * SCALE / prefill, **(more or {})}

    rows: dict[str, Any] = {}
    policies: tuple[Literal["lru", "worth"], ...] = ("lru", "worth")
    for tier in tiers:
        for eviction in policies:
            row = rows[f"{tier}, {eviction}"] = {}
            for budget in budgets:
                found = replay(
                    [(request.tokens, len(request.tokens)) for request in requests],
                    eviction, tier, budget // SCALE, prefill=prefill, tokens_each=SCALE, min_tokens=64 // SCALE,
                )  # fmt: skip
                row[budget] = figure(found.pop("hits"), found)
    for name, future in (("blocks, lru", False), ("bound", True)):
        rows[name] = {budget: figure(in_blocks(requests, budget // SCALE, future=future)) for budget in budgets}
    rows["no limit"] = dict.fromkeys(budgets, figure(in_blocks(requests, total, future=False)))
    return {"requests": len(requests), "tokens": total * SCALE, "policies": rows}


def show(name: str, found: dict[str, Any], budgets: list[int], prefill: float) -> None:
    title = (
        f"{name}: {found['requests']} requests, {found['tokens']:,} tokens; hit rate, seconds saved at {prefill:g}/s"
    )
    table = Table(title=title)
    table.add_column("policy")
    for budget in budgets:
        table.add_column(f"{budget:,}", justify="right")
    for policy, row in found["policies"].items():
        table.add_row(policy, *(f"{row[b]['hit_rate']:.3f}  {row[b]['seconds_saved']:7,.0f}" for b in budgets))
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def size(text: str) -> int:
    return int(text[:-1]) * 1024 if text[-1:] in "kK" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.jsonl")
    parser.add_argument("--budgets", default="16K,32K,64K,128K", help="in tokens")
    parser.add_argument("--tiers", default="pool,ram,both")
    parser.add_argument("--requests", type=int, default=600, metavar="N", help="at most, of each trace")
    parser.add_argument("--prefill", type=float, default=500.0, help="tokens per second")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE as well")
    arguments = parser.parse_args()
    logging.getLogger("skippy").setLevel(logging.ERROR)
    budgets = [size(text) for text in arguments.budgets.split(",")]
    tiers: list[Tier] = arguments.tiers.split(",")
    traces = {path.name: read_trace(path, arguments.requests) for path in arguments.traces}
    found = {}
    for name, requests in (traces or {"synthetic": synthetic(arguments.requests)}).items():
        found[name] = measure(requests, budgets, tiers, arguments.prefill)
        show(name, found[name], budgets, arguments.prefill)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"block": BLOCK, "replayed_as": PER_BLOCK, "traces": found}, indent=1)
        )


if __name__ == "__main__":
    main()
