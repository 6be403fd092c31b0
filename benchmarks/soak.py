"""An hour's traffic in miniature: many requests over many conversations, four lanes, far too small a pool.

    python benchmarks/soak.py [--requests 5000] [--conversations 200] [--family llama] [--seconds 900] [--json FILE]

On a tiny model with random weights, because what is looked at is the machinery: nothing fails, llama.cpp never says
"failed to find a memory slot", the process does not grow once its caps are full, and a sample of the answers equals
cold runs (where they part, at a proven near tie).  The pool is a tenth of what the conversations need, and so is RAM
for saved state: that is full after a tenth of the requests, and what is remembered of paths that have left before half
of them; in the last third the process may not grow by more than 4 MiB.  Leaves with 1 if anything of it does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import skippy
from skippy.demo.evidence import ColdRuns

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tiny models, which belong to the tests

from tests.tiny_models import write_model

SYSTEM, TURN, ANSWER = 120, 24, 8


class Words(logging.Handler):
    """Notes what llama.cpp's log must not say."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "failed to find a memory slot" in text:
            self.found.append(text)


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heard = Words()
    logger = logging.getLogger("skippy.llama")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(heard)
    per_conversation = options.requests // options.conversations
    need = SYSTEM + options.conversations * per_conversation * (TURN + ANSWER)
    longest = SYSTEM + (per_conversation + 1) * (TURN + ANSWER)
    n_ctx = max(-(-need // 10 // 256) * 256, 4 * -(-longest // 256) * 256)
    outcomes: Counter[str] = Counter()
    sample: list[tuple[np.ndarray, list[int]]] = []
    memory: list[int] = []
    lock = threading.Lock()
    asked = iter(range(options.requests))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(options.family, Path(folder) / "model.gguf")
        cache = skippy.CacheConfig(min_tokens=16, ram=need * 600 // 10)
        with skippy.Runtime(path, n_ctx=n_ctx, n_batch=256, lanes=4, n_threads=1, cache=cache) as rt:
            rng = np.random.default_rng(0)
            system = rng.integers(5, 384, SYSTEM).tolist()
            histories = [array("i", system) for _ in range(options.conversations)]
            busy: set[int] = set()

            def work(seed: int) -> None:
                own = np.random.default_rng(seed)
                while time.monotonic() - began < options.seconds:
                    with lock:
                        number = next(asked, None)
                        if number is None:
                            return
                        free = [i for i in range(options.conversations) if i not in busy]
                        conversation = int(own.choice(free))
                        busy.add(conversation)
                        if number % max(1, options.requests // 20) == 0:
                            memory.append(resident_kib())
                    history = histories[conversation]
                    prompt = [*history, *own.integers(5, 384, TURN).tolist()]
                    try:
                        kind = own.random()
                        if kind < 0.05:  # given up in the middle
                            stream = rt.generate(prompt, max_tokens=ANSWER, stream=True)
                            next(stream)
                            stream.close()
                            outcomes["closed"] += 1
                        else:
                            answer = rt.generate(prompt, max_tokens=ANSWER)
                            outcomes[answer.reuse.reason] += 1
                            if kind < 0.9:  # else the turn is rewritten next time
                                histories[conversation] = array("i", [*prompt, *answer.tokens])
                            if len(histories[conversation]) > longest:
                                histories[conversation] = array("i", system)
                            if number % 50 == 0:
                                with lock:
                                    sample.append((np.array(prompt, np.int32), answer.tokens))
                    except Exception as error:  # noqa: BLE001 - each is counted, and none may be
                        outcomes[f"{type(error).__name__}: {error}"] += 1
                    finally:
                        with lock:
                            busy.discard(conversation)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.monotonic() - began
            rt.check()
            stats = rt.stats()
            cold = ColdRuns(rt.model, n_ctx=n_ctx, n_batch=256, n_threads=1, flash_attn="on")
            partings = [
                parting
                for prompt, tokens in sample
                if (parting := cold.parting(prompt, cold.answer(prompt, ANSWER).tokens, tokens)) is not None
            ]
            rt.clear()
            left = rt.stats()["cells"]["in_use"]
    grown = {
        share: max(memory[i:]) - memory[i] if len(memory) > i else 0
        for share, i in (("tenth", 2), ("half", 10), ("two_thirds", 13))
    }
    tokens = stats["tokens"]
    result: dict[str, Any] = {
        "requests": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "seconds": seconds,
        "n_ctx": n_ctx,
        "needed_cells": need,
        "prompt_tokens": tokens["prompt"],
        "reused_percent": 100 * tokens["cached"] / max(1, tokens["prompt"]),
        "evictions": stats["evictions"],
        "failures": stats["failures"],
        "no_slot": len(heard.found),
        "memory_kib": memory,
        "memory_grown_kib_after_a": grown,
        "peak_memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "sample": len(sample),
        "sample_near_ties": sum(parting.near_tie for parting in partings),
        "sample_wrong": sum(not parting.near_tie for parting in partings),
        "cells_left_after_clear": left,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if sum(outcomes.values()) != options.requests or len(memory) < 20:
        sys.exit("not all requests were made: give more --seconds, and at least 20 --requests over 8 --conversations")
    known = set(skippy.report.REASONS) | {"closed"}
    wrong = {outcome: n for outcome, n in outcomes.items() if outcome not in known}
    if wrong or heard.found or result["failures"] or result["sample_wrong"] or left or grown["two_thirds"] > 4096:
        sys.exit(1)


if __name__ == "__main__":
    main()
