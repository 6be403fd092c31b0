"""The counters of a cache as Prometheus text.  No token and no text is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["prometheus_text"]

Sample = tuple[dict[str, str], float]


def _families(stats: dict[str, Any]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """(name, type, help, samples) of each metric family."""
    tokens, cells, ram = stats["tokens"], stats["cells"], stats["ram"]
    yield "skippy_prompt_tokens_total", "counter", "Tokens of all prompts.", [({}, tokens["prompt"])]
    yield "skippy_evaluated_tokens_total", "counter", "Prompt tokens that were evaluated.", [({}, tokens["evaluated"])]
    yield (
        "skippy_cached_tokens_total", "counter", "Prompt tokens that were brought back, by tier.",
        [({"tier": tier}, tokens[f"cached_{tier}"]) for tier in ("resident", "ram", "disk")],
    )  # fmt: skip
    yield (
        "skippy_requests_total", "counter", "Requests, by the reason of their reuse report.",
        [({"reason": reason}, n) for reason, n in sorted(stats["requests"].items())],
    )  # fmt: skip
    yield (
        "skippy_evictions_total", "counter", "Entries that left, by tier, kind and reason.",
        [
            ({"tier": "resident" if kind == "resident" else "ram", "kind": kind, "reason": reason}, n)
            for (kind, _, reason), n in sorted((key.partition(":"), n) for key, n in stats["evictions"].items())
        ],
    )  # fmt: skip
    yield (
        "skippy_failures_total", "counter", "Native calls that failed and cost time alone, by where.",
        [({"where": where}, n) for where, n in sorted(stats["failures"].items())],
    )  # fmt: skip
    yield "skippy_saves_total", "counter", "Segments and checkpoints that were saved.", [({}, ram["saves"])]
    yield "skippy_restores_total", "counter", "Segments and checkpoints that were restored.", [({}, ram["restores"])]
    yield "skippy_saved_bytes_total", "counter", "Bytes of state that were saved.", [({}, ram["bytes_saved"])]
    yield "skippy_restored_bytes_total", "counter", "Bytes of state that were restored.", [({}, ram["bytes_restored"])]
    yield (
        "skippy_seconds_total", "counter", "Seconds spent, by what on.",
        [
            ({"on": "lookup"}, stats["seconds_looking_up"]),
            ({"on": "restore"}, ram["seconds_restoring"]),
            ({"on": "save"}, ram["seconds_saving"]),
        ],
    )  # fmt: skip
    yield (
        "skippy_cells", "gauge", "Cells of the pool, by state.",
        [({"state": state}, cells[state]) for state in ("capacity", "in_use", "resident", "lost")],
    )  # fmt: skip
    yield (
        "skippy_ram_bytes", "gauge", "Bytes for saved state, by state.",
        [({"state": state}, ram[state]) for state in ("capacity", "in_use", "peak")],
    )  # fmt: skip
    yield (
        "skippy_entries", "gauge", "What is stored, by kind.",
        [
            ({"kind": kind}, stats[name])
            for kind, name in (
                ("resident", "residents"), ("segment", "segments"), ("checkpoint", "checkpoints"), ("logits", "logits")
            )
        ],
    )  # fmt: skip
    yield "skippy_index_bytes", "gauge", "Memory of the tree.", [({}, stats["tree"]["index_bytes"])]


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def prometheus_text(stats: dict[str, Any], **labels: str) -> str:
    """`stats()` in Prometheus' text format (0.0.4); `labels` are put on every sample.  O(counters)."""
    lines: list[str] = []
    for name, kind, text, samples in _families(stats):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [_line(name, {**labels, **own}, value) for own, value in samples]
    return "\n".join(lines) + "\n"
