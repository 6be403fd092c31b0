"""The tree's figures beside those who do the same job, in one run on one machine.

    python benchmarks/index.py [--json FILE]

A figure of another run, or of another machine, says nothing beside these.  Warm figures are percentiles over samples of
20 calls each, since one call is shorter than the clock is fine; cold ones and changes are over single calls, with the
clock's own time (its median) taken off.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import platform
import sys
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from skippy._radix import RadixTree

PREFIXES, PATHS, SHARED, TAIL = 16, 1_600, 4_096, 64
rng = np.random.default_rng(20)


def tokens(n: int) -> np.ndarray:
    return rng.integers(1, 32_000, n).astype(np.int32)


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


def warm(call: Callable[[], Any], samples: int = 300, calls: int = 20) -> dict[str, float]:
    """Nanoseconds per call."""
    times = []
    for _ in range(samples):
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - began) / calls)
    return percentiles(times)


def single(calls: Sequence[Callable[[], Any]], before: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Nanoseconds of one call each, without what the clock and an empty call take."""
    idle = []
    for _ in range(2_000):
        began = time.perf_counter_ns()
        None.__repr__  # noqa: B018  # as much as a call's look-up
        idle.append(time.perf_counter_ns() - began)
    clock = percentiles(idle)["p50"]
    times = []
    for call in calls:
        before()
        began = time.perf_counter_ns()
        call()
        times.append(max(0, time.perf_counter_ns() - began - clock))
    return percentiles(times)


class Bisect:
    """Paths as bytes in a sorted list: the longest common prefix is with a neighbour."""

    def __init__(self, paths: list[np.ndarray]) -> None:
        self.keys = sorted(path.astype(">i4").tobytes() for path in paths)

    def match(self, prompt: np.ndarray) -> int:
        key = prompt.astype(">i4").tobytes()
        at = bisect(self.keys, key)
        return max(self.common(other, prompt) for other in self.keys[max(0, at - 1) : at + 1])

    @staticmethod
    def common(key: bytes, prompt: np.ndarray) -> int:
        other = np.frombuffer(key, ">i4")
        n = min(len(other), len(prompt))
        differ = other[:n] != prompt[:n]
        return int(differ.argmax()) if differ.any() else n


class DictTrie:
    """A dict per token."""

    def __init__(self, paths: list[np.ndarray]) -> None:
        self.root: dict[int, Any] = {}
        for path in paths:
            node = self.root
            for token in path.tolist():
                node = node.setdefault(token, {})

    def match(self, prompt: list[int]) -> int:
        node, n = self.root, 0
        for token in prompt:
            node = node.get(token)  # type: ignore[assignment]
            if node is None:
                break
            n += 1
        return n


class LinearScan:
    """What `llama_cpp.LlamaRAMCache` does, through its own code where it can be imported."""

    def __init__(self, paths: list[np.ndarray]) -> None:
        self.keys: dict[tuple[int, ...], Any] = {tuple(path.tolist()): None for path in paths}

    def match(self, prompt: tuple[int, ...]) -> int:
        return max(self.common(key, prompt) for key in self.keys)

    @staticmethod
    def common(a: Sequence[int], b: Sequence[int]) -> int:
        n = 0
        for x, y in zip(a, b, strict=False):
            if x != y:
                break
            n += 1
        return n


def llama_ram_cache(paths: list[np.ndarray]) -> Callable[[tuple[int, ...]], Any] | None:
    try:
        cache = importlib.import_module("llama_cpp.llama_cache").LlamaRAMCache()
    except (ImportError, AttributeError):
        return None
    cache.cache_state.update((tuple(path.tolist()), None) for path in paths)
    return cache._find_longest_prefix_key


def sglang_tree(paths: list[np.ndarray]) -> Callable[[list[int]], Any] | None:
    """SGLang's radix cache, if it is installed in a version whose tree stands alone."""
    try:
        cache_of = importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixCache
        cache = cache_of(None, None, page_size=1)
        for path in paths:
            cache.insert(path.tolist())
        cache.match_prefix(paths[0].tolist())
    except (ImportError, AttributeError, TypeError):
        return None
    return cache.match_prefix


def stored(paths: list[np.ndarray], kind: Any = "resident") -> RadixTree:
    tree = RadixTree()
    for number, path in enumerate(paths):
        tree.put(tree.insert("m", path), kind, number + 1)
    return tree


def look_up() -> dict[str, dict[str, float]]:
    prefixes = [tokens(SHARED) for _ in range(PREFIXES)]
    paths = [np.concatenate([prefixes[i % PREFIXES], tokens(TAIL)]) for i in range(PATHS)]
    tree = stored(paths)
    prompt = np.concatenate([prefixes[3], tokens(TAIL)])
    prompt[SHARED] = 32_001
    as_list, as_tuple, as_bytes = prompt.tolist(), tuple(prompt.tolist()), prompt[:SHARED].tobytes()
    other_bytes = bytes(bytearray(as_bytes))
    miss = np.concatenate([np.array([32_001], np.int32), prompt])
    assert tree.match("m", prompt).matched == tree.match("m", as_list).matched == SHARED
    bisected, trie, linear = Bisect(paths), DictTrie(paths), LinearScan(paths)
    assert bisected.match(prompt) == trie.match(as_list) == linear.match(as_tuple) == SHARED
    figures = {
        "skippy, int32 buffer": warm(lambda: tree.match("m", prompt)),
        "skippy, list": warm(lambda: tree.match("m", as_list)),
        "skippy, a miss": warm(lambda: tree.match("m", miss)),
        "skippy, an unknown namespace": warm(lambda: tree.match("x", prompt)),
        "one memcmp of the same bytes": warm(lambda: as_bytes == other_bytes),
        "an empty call": warm(lambda: None),
        "bisect over sorted bytes": warm(lambda: bisected.match(prompt), 100, 5),
        "dict trie, list": warm(lambda: trie.match(as_list), 60, 1),
        "linear scan": warm(lambda: linear.match(as_tuple), 11, 1),
    }
    if scan := llama_ram_cache(paths):
        figures["LlamaRAMCache"] = warm(lambda: scan(as_tuple), 11, 1)
    if sglang := sglang_tree(paths):
        figures["SGLang, Python"] = warm(lambda: sglang(as_list), 60, 5)
    stats = tree.stats()
    figures["index bytes per unique token, tails of 64"] = {"value": stats["index_bytes"] / stats["tokens"]}
    return figures


def compare() -> dict[str, dict[str, float]]:
    """A match against one memcmp of as many bytes, with what a call costs in any case taken off both.

    How two arrays lie in memory makes more of a difference than how they are compared, so that each round has new ones.
    """

    def ratio(n: int) -> float:
        path = tokens(n)
        tree, other = stored([path]), path.copy()
        one = path[:1].copy()
        a, b, size = path.ctypes.data, other.ctypes.data, path.nbytes
        call = warm(lambda: tree.match("m", one), 9)["p50"]
        empty = warm(lambda: memcmp(a, b, 0), 9)["p50"]
        match = warm(lambda: tree.match("m", other), 9)["p50"]
        floor = warm(lambda: memcmp(a, b, size), 9)["p50"]
        return (match - call) / (floor - empty)

    libc = ctypes.PyDLL(None)
    memcmp = libc.memcmp
    memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    figures = {}
    for n in (4_096, 16_384, 65_536):
        figures[f"compare, {n:,} tokens: times one memcmp"] = {
            "value": percentiles([ratio(n) for _ in range(61)])["p50"]
        }
    return figures


def cold() -> dict[str, dict[str, float]]:
    """50,000 leaves; each look-up for another one.  The prompt has just been written, as by a tokeniser."""
    shared = tokens(SHARED)
    tails = rng.integers(1, 32_000, (50_000, TAIL)).astype(np.int32)
    tree = RadixTree()
    for number, tail in enumerate(tails):
        tree.put(tree.insert("m", np.concatenate([shared, tail])), "resident", number + 1)
    stats = tree.stats()
    prompt = np.concatenate([shared, tails[0]])
    wanted = iter(rng.integers(0, len(tails), 10_000).tolist())
    flood = np.zeros(1 << 20, np.int64)

    def write() -> None:
        prompt[:SHARED] = shared
        prompt[SHARED:] = tails[next(wanted)]

    def flush_and_write() -> None:
        flood.sum()
        write()

    def look_up() -> None:
        tree.match("m", prompt)

    gc.collect()
    gc.disable()
    figures = {
        "skippy, 50,000 leaves, each look-up another leaf": single([look_up] * 5_000, write),
        "skippy, the same, 8 MB read before each": single([look_up] * 1_000, flush_and_write),
        "index bytes per unique token, 50,000 leaves": {"value": stats["index_bytes"] / stats["tokens"]},
    }
    gc.enable()
    return figures


def change() -> dict[str, dict[str, float]]:
    shared = tokens(SHARED)
    tree = stored([shared])
    paths = [np.concatenate([shared, tokens(448)]) for _ in range(1_000)]
    as_lists = [path.tolist() for path in (np.concatenate([shared, tokens(448)]) for _ in range(300))]
    figures = {
        "skippy, insert 448 tokens on 4,096": single([lambda p=path: tree.insert("m", p) for path in paths]),
        "skippy, the same from a list": single([lambda p=path: tree.insert("m", p) for path in as_lists]),
    }
    for count in (100, 1_000, 10_000, 100_000):
        tree = RadixTree()
        for i in range(count):
            tree.put(tree.insert("m", [i, 1, 2, 3]), "segment", i + 1, bytes=1)
        figures[f"skippy, one victim among {count:,}"] = warm(lambda t=tree: t.victim("segment"), 100)
        nodes = tree.entries("segment")[: min(count, 2_000)]
        figures[f"skippy, take it, among {count:,}"] = single([lambda t=tree, n=n: t.take(n, "segment") for n in nodes])
    times: dict[int, int] = {i: int(tick) for i, tick in enumerate(rng.permutation(10_000))}
    figures["min() over 10,000 entries"] = warm(lambda: min(times, key=times.__getitem__), 30, 1)
    return figures


REACH = {
    "skippy, int32 buffer": "0.8 us",
    "skippy, list": "3.5 us",
    "skippy, a miss": "0.3 us",
    "skippy, 50,000 leaves, each look-up another leaf": "3 us (p99)",
    "skippy, insert 448 tokens on 4,096": "8 us",
    "skippy, one victim among 10,000": "1 us, flat",
    "compare, 4,096 tokens: times one memcmp": "1.5",
    "compare, 16,384 tokens: times one memcmp": "1.5",
    "compare, 65,536 tokens: times one memcmp": "1.5",
    "index bytes per unique token, tails of 64": "8",
    "index bytes per unique token, 50,000 leaves": "8",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures (nanoseconds) to FILE as well")
    arguments = parser.parse_args()
    began = time.perf_counter()
    sections = {
        f"look-up: {SHARED:,} of {SHARED + TAIL:,} tokens, {PATHS:,} stored paths over {PREFIXES} prefixes": look_up(),
        "the comparison alone": compare(),
        "cold": cold(),
        "insert and evict": change(),
    }
    table = Table(title=f"index: {platform.python_implementation()} {platform.python_version()}, {platform.machine()}")
    for title, justify in (
        ("what", "left"),
        ("p50 us", "right"),
        ("p99 us", "right"),
        ("value", "right"),
        ("reach", "left"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for section, figures in sections.items():
        table.add_section()
        table.add_row(f"[bold]{section}")
        for name, figure in figures.items():
            times = [f"{figure[p] / 1_000:,.3f}" if p in figure else "" for p in ("p50", "p99")]
            table.add_row(name, *times, f"{figure['value']:.2f}" if "value" in figure else "", REACH.get(name, ""))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"seconds": time.perf_counter() - began, "sections": sections}, file, indent=1)


if __name__ == "__main__":
    main()
