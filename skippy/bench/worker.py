"""One arm in a process of its own: reads requests as lines of JSON, writes what they took.

    python -m skippy.bench.worker SETTINGS

The first line out says that the model is loaded; then a line for each request, and the process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from skippy.bench.memory import memory_kib, peak_kib
from skippy.bench.tiers import leave_pool, leave_ram, open_runtime
from skippy.config import CacheConfig

__all__ = ["LlamaCpp", "Player", "Skippy", "main"]


class Player(Protocol):
    """What answers requests."""

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The answer's `tokens`, `ttft_ms`, `total_ms`, `evaluated` prompt tokens and what else is known.

        `decode_ms` is the part of `ttft_ms` that llama.cpp took to evaluate them: whatever decides what is evaluated,
        and gets it there, is the rest.
        """

    def between(self) -> None:
        """Something that is not measured, after each request."""

    def close(self) -> None:
        """The end."""


class LlamaCpp:
    """llama_cpp.Llama: as it is, emptied before each request, or with its RAM cache."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import llama_cpp
        from llama_cpp.llama_cache import LlamaRAMCache

        player = self

        class Watched(llama_cpp.Llama):
            """Notes what is evaluated, and when a token is chosen."""

            def eval(self, tokens: Any) -> None:
                player.evaluated += len(tokens)
                began = time.perf_counter()
                super().eval(tokens)
                if not player.tokens:
                    llama_cpp.llama_synchronize(self.ctx)
                    player.decoding += time.perf_counter() - began

            def sample(self, *args: Any, **kwargs: Any) -> int:
                token = int(super().sample(*args, **kwargs))
                if not player.tokens:
                    player.at_first = time.perf_counter(), player.evaluated
                player.tokens.append(token)
                return token

        self.tokens: list[int] = []
        self.evaluated = 0
        self.decoding = 0.0  # seconds, up to the first token
        self.at_first = (0.0, 0)
        self.llama = Watched(
            model,
            n_ctx=settings["n_ctx"],
            n_batch=settings["n_batch"],
            n_ubatch=settings["n_batch"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            n_gpu_layers=settings["n_gpu_layers"],
            flash_attn=settings["flash_attn"] == "on",
            verbose=False,
        )
        self.cold = settings.get("cold", False)
        self.cache: LlamaRAMCache | None = None
        if settings.get("ram_cache"):
            self.cache = LlamaRAMCache(capacity_bytes=settings["ram_bytes"])
            self.llama.set_cache(self.cache)

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """See Player."""
        self.tokens, self.evaluated, self.decoding = [], 0, 0.0
        if self.cold:
            self.llama.reset()  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        for _ in self.llama.create_completion(prompt, max_tokens=max_tokens, temperature=0.0, stream=True):
            pass
        total = time.perf_counter() - began
        first, evaluated = self.at_first
        return {
            "tokens": self.tokens[:max_tokens],  # it ends no character in the middle
            "ttft_ms": 1e3 * (first - began),
            "decode_ms": 1e3 * self.decoding,
            "total_ms": 1e3 * total,
            "evaluated": evaluated,
            "held_bytes": None if self.cache is None else self.cache.cache_size,
        }

    def between(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Free the model."""
        self.llama.close()


class Skippy:
    """skippy.Runtime, with one lane."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        config = {
            "ram": settings["ram_bytes"] if settings.get("ram") is None else settings["ram"],
            "payload": settings.get("payload", "auto"),
            "disk": settings["folder"] if settings.get("disk") else None,
            "disk_bytes": settings["disk_bytes"],
        }
        self.rt = open_runtime(settings, CacheConfig.model_validate(config))
        self.decoding = 0.0  # seconds, of prompts
        self._watch()
        self.leaves_ram = settings.get("leaves_ram", False)
        self.leaves_pool = settings.get("leaves_pool", False) or self.leaves_ram

    def _watch(self) -> None:
        """Note how long llama.cpp takes to evaluate prompts."""
        engine = self.rt.engine
        call = engine._call

        def timed(items: list[Any]) -> int:
            in_prompt = items[0].request.in_prompt
            began = time.perf_counter()
            code = call(items)
            if in_prompt:
                engine.context.sequences.synchronize()
                self.decoding += time.perf_counter() - began
            return code

        engine._call = timed  # type: ignore[method-assign]

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """See Player."""
        self.decoding = 0.0
        cache = self.rt.cache
        before = cache.seconds_looking_up, cache.store.seconds_saving
        began = time.perf_counter()
        answer = self.rt.generate(prompt, max_tokens=max_tokens)
        total = time.perf_counter() - began
        reuse = answer.reuse
        looking_up = 1e3 * (cache.seconds_looking_up - before[0])
        return {
            "tokens": answer.tokens,
            "ttft_ms": reuse.ttft_ms,
            "decode_ms": 1e3 * self.decoding,
            "total_ms": 1e3 * total,
            "evaluated": reuse.evaluated_tokens,
            "by_tier": reuse.by_tier,
            "lookup_ms": looking_up,
            "restore_ms": max(0.0, reuse.restore_ms - looking_up),
            "save_ms": 1e3 * (cache.store.seconds_saving - before[1]),
            "held_bytes": self._held(),
        }

    def _held(self) -> int:
        cache = self.rt.cache
        disk = cache.disk.stats()["in_use"] if cache.disk is not None else 0
        return int(cache.tree.cells * self.rt.capability.bytes_per_token + cache.store.arena.used + disk)

    def between(self) -> None:
        """Let what the arm is to be without leave: the pool, and RAM."""
        if self.leaves_pool:
            leave_pool(self.rt)
        if self.leaves_ram:
            leave_ram(self.rt)

    def close(self) -> None:
        """Write what is to be kept, and end."""
        self.rt.close()


PLAYERS: dict[str, Callable[[str, dict[str, Any]], Player]] = {"llama_cpp": LlamaCpp, "skippy": Skippy}


def main(argument: str) -> None:
    """Answer what comes on stdin, on what was stdout; whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(argument)
    player = PLAYERS[settings["kind"]](settings["model"], settings)

    def say(data: dict[str, Any]) -> None:
        out.write(json.dumps(data) + "\n")
        out.flush()

    player.ask(settings["warm_up"], 2)  # the first batch of a context pays for its buffers
    player.between()
    say({"ready": True, "memory_kib": memory_kib()})
    for line in sys.stdin:
        request = json.loads(line)
        answer = player.ask(request["prompt"], request["max_tokens"])
        answer |= {"memory_kib": memory_kib(), "peak_kib": peak_kib()}
        say(answer)
        player.between()
    player.close()


if __name__ == "__main__":
    main(sys.argv[1])
