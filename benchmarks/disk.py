"""The disk tier: resuming after a restart, what it costs a running decode, what it writes, and opening a large folder.

    python benchmarks/disk.py [--model PATH] [--threads N] [--rounds 3] [--folder FOLDER] [--json FILE]

1. A prompt of 2,000 tokens, of which all but the last question was evaluated before a restart: time to first token
   cold, from disk with the files in the page cache, and with them dropped from it (posix_fadvise; the index stays).
2. Seconds per token of a running decode while states of 500 tokens are queued and written, against the same with the
   tier off, in pairs: p50 and p99.  Each such state is one that a conversation leaves behind.
3. A conversation of 12 turns: bytes written over bytes of the state of its new tokens.
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
        for how, reports in found.items():
            if how == "disk, dropped":
                drop_from_page_cache(folder)
            cold = how == "cold"
            rt = open_(path, threads, None if cold else folder)
            rt.generate(words(40, 3), max_tokens=2, cache_prompt=False)  # the model itself is in memory
            reports.append(rt.generate(prompt, max_tokens=2).reuse)
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


def decode(path: Path, threads: int, folder: Path | None, tokens: int = 192) -> dict[str, Any]:
    """Seconds of each token, and of each time that a state was queued."""
    with open_(path, threads, folder, n_ctx=8192) as rt:
        for seed in range(6):
            rt.generate(words(500, seed), max_tokens=1)
        while rt.cache.space.evict_resident("benchmark", weigh=False):
            pass
        tree, shelf = rt.cache.tree, rt.cache.shelf
        states = [(node, tree.tokens(node), shelf.segment(node)) for node in tree.entries("segment")]
        seconds, queued = [], []
        stream = rt.generate(words(40, 99), max_tokens=tokens + 16, stream=True)
        for _ in range(16):
            next(stream)
        for i in range(tokens):
            began = time.perf_counter()
            if rt.cache.spill is not None and i % 32 == 0 and states:
                node, tokens_of, segment = states.pop()
                rt.cache.spill.leaving(node.namespace, tokens_of, segment)
                queued.append(time.perf_counter() - began)
            next(stream)
            seconds.append(time.perf_counter() - began)
        stream.close()
        written = 0 if rt.cache.disk is None else rt.cache.disk.bytes_written
        return {"seconds": seconds, "queued": queued, "written": written}


def cost(path: Path, threads: int, rounds: int, folder: Path) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for i in range(rounds):
        for how in ("off", "on") if i % 2 else ("on", "off"):
            runs[how].append(decode(path, threads, None if how == "off" else folder / str(i)))
    found: dict[str, Any] = {}
    for percent in (50, 99):
        off, on = ([float(np.percentile(run["seconds"], percent)) for run in runs[how]] for how in ("off", "on"))
        found[f"p{percent}_off_ms"] = 1e3 * statistics.median(off)
        found[f"p{percent}_on_ms"] = 1e3 * statistics.median(on)
        found[f"p{percent}_ratios"] = [b / a for a, b in zip(off, on, strict=True)]
    found["queueing_ms"] = 1e3 * statistics.median(each for run in runs["on"] for each in run["queued"])
    found["megabytes"] = runs["on"][0]["written"] / 1e6
    return found


# -- 3 ----------------------------------------------------------------------------------------------------


def amplification(path: Path, threads: int, folder: Path) -> dict[str, Any]:
    with open_(path, threads, folder) as rt:
        talk = words(200, 5)
        for turn in range(12):
            done = rt.generate(talk, max_tokens=ANSWER)
            talk = [*talk, *done.tokens, *words(34, 10 + turn)]
        state = (len(talk) - 34 - 1) * rt.capability.bytes_per_token
        disk = rt.cache.disk
        assert disk is not None
    files = sorted(folder.glob("*.kv"))
    index = (folder / INDEX).stat().st_size
    return {
        "turns": 12,
        "files": len(files),
        "state_bytes": state,
        "bytes_written": disk.bytes_written,
        "ratio": disk.bytes_written / state,
        "index_bytes": index,
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
            found = results["decode"] = cost(path, options.threads, 2 * options.rounds, base)
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
