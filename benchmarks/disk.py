"""The disk tier: resuming after a restart, what it costs a running decode, what it writes, and opening a large folder.

    python benchmarks/disk.py [--model PATH] [--threads N] [--rounds 3] [--every 128] [--folder FOLDER] [--json FILE]

1. A prompt of 2,000 tokens, of which all but the last question was evaluated before a restart: time to first token
   cold, from disk with the files in the page cache, and with them dropped from it (posix_fadvise; the index stays).
2. Seconds per token of a running decode while a state of 500 tokens is queued every 128 tokens and written meanwhile,
   against the same with the tier off, in pairs: p50 and p99.
3. A conversation of 12 turns, each after a restart: bytes written over bytes of the state of its new tokens.
4. 10,000 small segments: opening the folder, listing it, its counters; and building a lost index anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

import skippy
from skippy.commands.options import packaged_model
from skippy.store import DiskTier
from skippy.store.folder import INDEX
from skippy.store.format import Entry, digest, pack_head
from skippy.store.index import Index

PROMPT, QUESTION, ANSWER = 2000, 32, 16
MANY = 10_000


def words(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1000, 20_000, n)]


def open_(path: Path, threads: int, folder: Path | None, **settings: Any) -> skippy.Runtime:
    cache = skippy.CacheConfig(disk=folder, disk_min_free=0, ram="1GiB", residency="keep")
    return skippy.Runtime(path, n_threads=threads, cache=cache, **{"n_ctx": 4096, "lanes": 2, **settings})


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.glob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # what is not written yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# -- 1 ----------------------------------------------------------------------------------------------------


def resume(path: Path, threads: int, rounds: int, folder: Path) -> dict[str, Any]:
    with open_(path, threads, folder) as rt:
        done = rt.generate(words(PROMPT - QUESTION - ANSWER, 1), max_tokens=ANSWER)
        prompt = [*words(PROMPT - QUESTION - ANSWER, 1), *done.tokens]
        prompt += words(PROMPT - len(prompt), 2)
    found: dict[str, list[skippy.ReuseReport]] = {"cold": [], "disk, page cache warm": [], "disk, dropped": []}
    for _ in range(rounds):
        for how, reports in list(found.items())[:3]:
            if how == "disk, dropped":
                drop_from_page_cache(folder)
            cold = how == "cold"
            rt = open_(path, threads, None if cold else folder)
            rt.generate(words(40, 3), max_tokens=2, cache_prompt=False)  # the model itself is in memory
            reports.append(rt.generate(prompt, max_tokens=2).reuse)
            if how == "disk, dropped":  # what evaluating the question takes where nothing has to be restored
                other = [*prompt[:-QUESTION], *words(QUESTION, 4)]
                found.setdefault("already in the pool", []).append(rt.generate(other, max_tokens=2).reuse)
            if rt.cache.disk is not None:
                rt.cache.disk.close(flush=False)  # the next one finds what this one has found
            rt.close()
    return {
        how: {
            "ttft_ms": statistics.median(report.ttft_ms for report in reports),
            "restore_ms": statistics.median(report.restore_ms for report in reports),
            "evaluated": reports[0].evaluated_tokens,
            "from_disk": reports[0].by_tier["disk"],
        }
        for how, reports in found.items()
    }


# -- 2 ----------------------------------------------------------------------------------------------------


class Decoding:
    """A runtime that decodes, and has a state of 500 tokens at hand that it can queue again and again."""

    def __init__(self, path: Path, threads: int, folder: Path | None) -> None:
        self.rt = open_(path, threads, folder)
        self.rt.generate(words(500, 1), max_tokens=1)
        while self.rt.cache.space.evict_resident("benchmark", weigh=False):
            pass
        (node,) = self.rt.cache.tree.entries("segment")
        self.segment = self.rt.cache.shelf.segment(node)
        self.queued: list[float] = []
        self.states = 0

    def seconds(self, tokens: int, every: int) -> list[float]:
        """Of each token; every so many tokens a state is queued, as when a conversation leaves."""
        seconds, segment = [], self.segment
        stream = self.rt.generate(words(40, 99), max_tokens=tokens + 8, stream=True, cache_prompt=False)
        for _ in range(8):
            next(stream)
        for i in range(tokens):
            began = time.perf_counter()
            if self.rt.cache.disk is not None and i % every == 0:
                self.states += 1
                path = np.array(words(500, 100 + self.states), np.int32)
                began = time.perf_counter()
                self.rt.cache.disk.offer_segment(
                    "d" * 64, path, 0, 0, segment.nbytes, lambda begin: (segment.block.view, segment.checksum)
                )
                self.queued.append(time.perf_counter() - began)
            next(stream)
            seconds.append(time.perf_counter() - began)
        stream.close()
        if self.rt.cache.disk is not None:
            self.rt.cache.disk.flush()
        return seconds


def cost(path: Path, threads: int, rounds: int, folder: Path, every: int, tokens: int = 256) -> dict[str, Any]:
    lanes = {"off": Decoding(path, threads, None), "on": Decoding(path, threads, folder)}
    runs: dict[str, list[list[float]]] = {"off": [], "on": []}
    for i in range(rounds):
        for how in ("off", "on") if i % 2 else ("on", "off"):
            runs[how].append(lanes[how].seconds(tokens, every))
    found: dict[str, Any] = {}
    for percent in (50, 99):
        off, on = ([float(np.percentile(run, percent)) for run in runs[how]] for how in ("off", "on"))
        found[f"p{percent}_off_ms"] = 1e3 * statistics.median(off)
        found[f"p{percent}_on_ms"] = 1e3 * statistics.median(on)
        found[f"p{percent}_ratios"] = [b / a for a, b in zip(off, on, strict=True)]
        both = [float(np.percentile(np.concatenate(runs[how]), percent)) for how in ("off", "on")]
        found[f"p{percent}_of_all_ratio"] = both[1] / both[0]
    disk = lanes["on"].rt.cache.disk
    assert disk is not None
    found["queueing_ms"] = 1e3 * statistics.median(lanes["on"].queued)
    found["megabytes"] = disk.bytes_written / 1e6
    for each in lanes.values():
        each.rt.close()
    return found


# -- 3 ----------------------------------------------------------------------------------------------------


def amplification(path: Path, threads: int, folder: Path) -> dict[str, Any]:
    talk, written = words(200, 5), 0
    for turn in range(12):
        with open_(path, threads, folder) as rt:  # each turn after a restart
            talk += words(34, 10 + turn)
            done = rt.generate(talk, max_tokens=ANSWER)
            talk = [*talk, *done.tokens]
            state = (len(talk) - 1) * rt.capability.bytes_per_token
            disk = rt.cache.disk
        assert disk is not None
        written += disk.bytes_written
    return {
        "turns": 12,
        "files": len(list(folder.glob("*.kv"))),
        "state_bytes": state,
        "bytes_written": written,
        "ratio": written / state,
        "index_bytes": (folder / INDEX).stat().st_size,
    }


# -- 4 ----------------------------------------------------------------------------------------------------


def fill(folder: Path, n: int) -> None:
    """A folder with `n` segments of 64 to 200 tokens and states of 256 bytes, in chains of ten."""
    DiskTier(folder, capacity=2**40, min_free=0).close()
    rng, namespace, state = np.random.default_rng(1), "c" * 64, bytes(256)
    index = Index(folder / INDEX)
    with index.transaction():
        for chain in range(n // 10):
            path = np.empty(0, np.int32)
            for _ in range(10):
                longer = np.concatenate([path, rng.integers(3, 40_000, rng.integers(64, 200)).astype(np.int32)])
                entry = Entry(
                    f"{chain % 5}" + namespace[1:], "segment", len(path), len(longer),
                    digest(f"{chain % 5}" + namespace[1:], path), digest(f"{chain % 5}" + namespace[1:], longer),
                    len(path), 0, len(state), xxhash.xxh3_64_intdigest(state), '{"model":"m.gguf","tenant":""}',
                    longer[len(path) :],
                )  # fmt: skip
                head = pack_head(entry)
                (folder / entry.name).write_bytes(head + state)
                index.add(entry, len(head) + len(state))
                path = longer
    index.close()


def opening(folder: Path, rounds: int) -> dict[str, Any]:
    fill(folder, MANY)
    found: dict[str, list[float]] = {}

    def time_it(name: str, act: Any) -> Any:
        began = time.perf_counter()
        result = act()
        found.setdefault(name, []).append(time.perf_counter() - began)
        return result

    for _ in range(rounds):
        for write in (True, False):
            tier = time_it(
                "open" if write else "open to look",
                lambda write=write: DiskTier(folder, capacity=2**40, min_free=0, write=write),
            )
            assert len(time_it("rows", tier.rows)) == MANY
            time_it("stats", tier.stats)
            tier.close()
    tier = DiskTier(folder, capacity=2**40, min_free=0)
    row = max(tier.rows(), key=lambda row: row.entry.end)
    for _ in range(20):
        time_it("find, a miss", lambda: tier.find(row.entry.namespace, np.arange(2000, dtype=np.int32)))
    time_it("prune to half", lambda: tier.prune(tier.stats()["in_use"] // 2))
    left = len(tier.rows())
    tier.close()
    (folder / INDEX).unlink()
    tier = time_it("index built anew", lambda: DiskTier(folder, capacity=2**40, min_free=0))
    assert len(tier.rows()) == left
    tier.close()
    return {"segments": MANY, "left_after_pruning": left, **{name: statistics.median(s) for name, s in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=128, metavar="N", help="tokens between two states (part 2)")
    parser.add_argument("--folder", type=Path, help="where the folders are made, by default among temporary files")
    parser.add_argument("--only", type=int, choices=(1, 2, 3, 4), help="one part alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path, console = options.model or packaged_model(), Console(width=120)
    results: dict[str, Any] = {"threads": options.threads, "rounds": options.rounds}

    def wanted(part: int) -> bool:
        return options.only in (None, part)

    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        base = Path(made)
        if wanted(1):
            results["resume"] = resume(path, options.threads, options.rounds, base / "resume")
            table = Table(title=f"a prompt of {PROMPT} tokens after a restart, medians of {options.rounds}")
            for column in ("", "TTFT, ms", "restoring, ms", "from disk", "evaluated", "of cold"):
                table.add_column(column, justify="right")
            cold = results["resume"]["cold"]["ttft_ms"]
            for name, each in results["resume"].items():
                table.add_row(
                    name, f"{each['ttft_ms']:.0f}", f"{each['restore_ms']:.1f}", str(each["from_disk"]),
                    str(each["evaluated"]), f"1/{cold / each['ttft_ms']:.1f}",
                )  # fmt: skip
            console.print(table)
        if wanted(2):
            found = results["decode"] = cost(path, options.threads, 2 * options.rounds, base / "decode", options.every)
            table = Table(
                title=f"time per token while {found['megabytes']:.0f} MB are written, {2 * options.rounds} pairs"
            )
            for column in ("", "off, ms", "on, ms", "on / off, median", "lowest", "highest"):
                table.add_column(column, justify="right")
            for name in ("p50", "p99"):
                ratios = found[f"{name}_ratios"]
                table.add_row(
                    name, f"{found[f'{name}_off_ms']:.2f}", f"{found[f'{name}_on_ms']:.2f}",
                    f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}",
                    f"{found[f'{name}_of_all_ratio']:.3f}",
                )  # fmt: skip
            console.print(table)
            console.print(f"queueing one state of 500 tokens: {found['queueing_ms']:.2f} ms")
        if wanted(3):
            found = results["amplification"] = amplification(path, options.threads, base / "growing")
            console.print(
                f"a conversation of {found['turns']} turns: {found['bytes_written'] / 1e6:.1f} MB written in "
                f"{found['files']} files, {found['ratio']:.3f} times the state of its tokens; the index has "
                f"{found['index_bytes'] / 1e3:.0f} kB"
            )
        if wanted(4):
            found = results["opening"] = opening(base / "many", options.rounds)
            table = Table(title=f"a folder of {MANY:,} segments")
            table.add_column("")
            table.add_column("ms", justify="right")
            for name, seconds in found.items():
                if isinstance(seconds, float):
                    table.add_row(name, f"{1e3 * seconds:.1f}")
            console.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
