"""The tables of the demonstration, for a terminal, and the same as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from skippy.demo.run import Outcome, Row

__all__ = ["as_data", "tables", "verdict"]


def _answer(row: Row) -> str:
    if row.same_answer:
        return "same"
    if row.parting is None:
        return "?"
    kind = "near tie" if row.parting.near_tie else "DIFFERS"  # the gap of the two tokens beside the noise, in logits
    return (
        f"{kind}, token {row.parting.index}: {row.parting.gap:.2f} < {row.parting.noise:.2f}"
        if row.parting.near_tie
        else f"{kind}, token {row.parting.index}: {row.parting.gap:.2f} > {row.parting.noise:.2f}"
    )


def _state(row: Row) -> str:
    if row.rows_checked == 0:
        return "-"
    return "equal" if row.rows_wrong == 0 else f"{row.rows_wrong} of {row.rows_checked} WRONG"


def tables(outcome: Outcome) -> RenderableType:
    """One line per request, then totals and memory."""
    table = Table(title="each request: prompt tokens, time to first token in ms cold and with skippy, and the checks")
    for name in ("request", "prompt", "reused", "pool", "RAM", "evaluated", "cold", "skippy", "ratio"):
        table.add_column(name, justify="left" if name == "request" else "right", no_wrap=True)
    table.add_column("state")
    table.add_column("greedy answer")
    for row in outcome.rows:
        table.add_row(
            row.name,
            str(row.prompt_tokens),
            str(row.cached_tokens),
            str(row.by_tier["resident"]),
            str(row.by_tier["ram"]),
            str(row.evaluated_tokens),
            f"{row.ttft_cold_ms:.0f}",
            f"{row.ttft_ms:.0f}",
            f"{row.ttft_cold_ms / row.ttft_ms:.1f}",
            _state(row),
            _answer(row),
        )
    totals = totals_of(outcome)
    table.add_section()
    table.add_row(
        "all", str(totals["prompt_tokens"]), str(totals["cached_tokens"]), "", "", str(totals["evaluated_tokens"]),
        f"{totals['ttft_cold_ms']:.0f}", f"{totals['ttft_ms']:.0f}",
        f"{totals['ttft_cold_ms'] / totals['ttft_ms']:.1f}", "", f"{totals['same_answers']} the same",
    )  # fmt: skip
    memory = outcome.memory
    held = Table(title="memory")
    held.add_column("what")
    held.add_column("held", justify="right")
    held.add_row("cells of cached paths in the pool", f"{memory['cells']} ({memory['cells_bytes'] / 2**20:.1f} MiB)")
    held.add_row("saved state in RAM", f"{memory['saved_bytes'] / 2**20:.1f} MiB")
    held.add_row(
        "a full copy of each conversation would be",
        f"{memory['conversation_tokens']} tokens ({memory['full_copies_bytes'] / 2**20:.1f} MiB)",
    )
    return Group(table, held)


def totals_of(outcome: Outcome) -> dict[str, float]:
    """Sums over all requests."""
    rows = outcome.rows
    return {
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "cached_tokens": sum(row.cached_tokens for row in rows),
        "evaluated_tokens": sum(row.evaluated_tokens for row in rows),
        "behind_checkpoint": sum(row.behind_checkpoint for row in rows),
        "ttft_cold_ms": sum(row.ttft_cold_ms for row in rows),
        "ttft_ms": sum(row.ttft_ms for row in rows),
        "same_answers": sum(row.same_answer for row in rows),
    }


def verdict(outcome: Outcome) -> str:
    """One sentence on what was checked and found."""
    if outcome.failures:
        return "FAILED: " + "; ".join(outcome.failures)
    checked = sum(row.rows_checked for row in outcome.rows)
    ties = sum(row.parting is not None for row in outcome.rows)
    behind = totals_of(outcome)["behind_checkpoint"]
    again = f" but {behind} that lay between the last checkpoint and the place where a prompt parted" if behind else ""
    return (
        f"All {checked} restored tokens hold, byte for byte, what was evaluated; no token was evaluated again without "
        f"need{again}; {len(outcome.rows) - ties} greedy answers equal a plain cold run, {ties} part from it at a near "
        f"tie."
    )


def as_data(outcome: Outcome) -> dict[str, Any]:
    """All of it as plain data, for JSON."""
    return {
        "ok": not outcome.failures,
        "failures": outcome.failures,
        "requests": [asdict(row) | {"near_tie": row.parting.near_tie if row.parting else None} for row in outcome.rows],
        "totals": totals_of(outcome),
        "memory": outcome.memory,
        "machine": outcome.machine,
        "stats": outcome.stats,
    }
