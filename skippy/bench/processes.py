"""The processes of the arms, as who plays them sees them: started, asked, ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from skippy.bench.arms import Arm
from skippy.bench.memory import memory_kib, peak_kib
from skippy.errors import SkippyError

__all__ = ["ArmFailed", "Process", "started"]

_PATIENCE = 600  # seconds for a model to load, or for a process to end
_SLOTS = 16  # at most: each has a context of its own


class ArmFailed(SkippyError):
    """The process of an arm ended, or said what it should not."""


def _last_words(errors: IO[bytes]) -> str:
    """The last line that a process has written."""
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else "it said nothing"


class Process(Protocol):
    """An arm that is running."""

    loaded_kib: int

    def pause(self) -> None:
        """Let it stand still, with all its threads, until `resume`; where the system cannot, nothing happens."""

    def resume(self) -> None:
        """Let it go on."""

    def ask(self, prompt: tuple[int, ...], max_tokens: int, chat: int = 0) -> dict[str, Any]:
        """What the request of conversation number `chat` took, as `skippy.bench.worker` says."""

    def close(self) -> None:
        """End it, and wait until it has ended."""


# What stands still would stay for ever if this process were killed.  Linux ends it then, if it asks for that (1 is
# PR_SET_PDEATHSIG, 9 SIGKILL); exec keeps what was asked.
_ASK = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_TIED = [sys.executable, "-I", "-S", "-c", _ASK] if sys.platform == "linux" else []


class _Child:
    """A process that can stand still."""

    _process: subprocess.Popen[bytes]

    def _send(self, name: str) -> bool:
        """Whether there is such a signal, and a process to get it."""
        number = getattr(signal, name, None)
        if number is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def pause(self) -> None:
        """See Process.  Waits until it stands, or has ended."""
        if self._send("SIGSTOP"):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """See Process."""
        self._send("SIGCONT")


class Worker(_Child):
    """A Python process that runs `skippy.bench.worker`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [*_TIED, sys.executable, "-m", "skippy.bench.worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self.loaded_kib = int(self._read()["memory_kib"])
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        data = json.loads(line)
        assert isinstance(data, dict)
        return data

    def _ended(self) -> ArmFailed:
        return ArmFailed(f"its process ended with {self._process.wait()}: {_last_words(self._errors)}")

    def ask(self, prompt: tuple[int, ...], max_tokens: int, chat: int = 0) -> dict[str, Any]:
        """See Process."""
        del chat  # who answers finds out by itself
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and reading says why
            self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode() + b"\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """See Process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        failed = self._ended() if self._process.wait() else None
        self._process.stdout.close()
        self._errors.close()
        if failed is not None and sys.exc_info()[0] is None:  # else what came before says more
            raise failed


class Server(_Child):
    """llama-server, asked over HTTP on this machine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        slots = self._slots = settings["slots"]
        self._url = f"http://127.0.0.1:{port}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        command = [
            *_TIED, settings["program"], "--model", settings["model"], "--host", "127.0.0.1", "--port", str(port),
            "--ctx-size", str(settings["n_ctx"] * slots), "--parallel", str(slots),
            "--batch-size", str(settings["n_batch"]), "--ubatch-size", str(settings["n_batch"]),
            "--threads", str(settings["threads"]), "--threads-batch", str(settings["threads"]),
            "--n-gpu-layers", str(settings["n_gpu_layers"]), "--flash-attn", settings["flash_attn"],
            "--cache-ram", str(settings["ram_bytes"] // 2**20), "--no-webui",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._errors, stderr=subprocess.STDOUT
        )
        try:
            self._wait()
            self.ask(tuple(settings["warm_up"]), 2)
            self.loaded_kib = memory_kib(self._process.pid)
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ArmFailed(f"llama-server ended with {self._process.returncode}: {_last_words(self._errors)}")
            health = f"{self._url}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise ArmFailed(f"llama-server did not load the model within {_PATIENCE} s")

    def ask(self, prompt: tuple[int, ...], max_tokens: int, chat: int = 0) -> dict[str, Any]:
        """See Process."""
        body = {
            "prompt": list(prompt), "n_predict": max_tokens, "temperature": 0.0, "cache_prompt": True, "stream": True,
            "return_tokens": True, "top_k": 1, "id_slot": chat % self._slots,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        tokens: list[int] = []
        began, first = time.perf_counter(), 0.0
        timings: dict[str, Any] = {}
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                for line in answer:
                    if not line.startswith(b"data: "):
                        continue
                    data = json.loads(line[6:])
                    if data.get("tokens") and not first:
                        first = time.perf_counter()
                    tokens += data.get("tokens") or []
                    timings = data.get("timings") or timings
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ArmFailed(f"llama-server did not answer: {error}") from error
        total = time.perf_counter() - began
        if "prompt_n" not in timings:
            raise ArmFailed("llama-server did not say how many tokens it evaluated")
        pid = self._process.pid
        return {
            "tokens": tokens,
            "ttft_ms": 1e3 * ((first or began + total) - began),
            "total_ms": 1e3 * total,
            "evaluated": int(timings["prompt_n"]),
            "held_bytes": None,
            "memory_kib": memory_kib(pid),
            "peak_kib": peak_kib(pid),
        }

    def close(self) -> None:
        """See Process."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


@contextlib.contextmanager
def started(arm: Arm, settings: dict[str, Any], *, conversations: int, folder: Path) -> Iterator[Process]:
    """The process of an arm, with its model loaded and warm; it has ended when the block ends.  ArmFailed."""
    settings = {**settings, **arm.settings, "kind": arm.kind, "folder": str(folder)}
    if arm.kind == "llama-server":
        settings["slots"] = settings["slots"] or min(conversations, _SLOTS)
    process: Process = Server(settings) if arm.kind == "llama-server" else Worker(settings)
    try:
        yield process
    finally:
        process.resume()
        process.close()
