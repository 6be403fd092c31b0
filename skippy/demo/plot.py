"""The picture of the demonstration: time to first token per request, cold and with reuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skippy.demo.run import Row

__all__ = ["plot_ttft"]


def plot_ttft(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG with two bars per request, on a logarithmic scale of milliseconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    x = range(len(rows))
    axes.bar([i - 0.2 for i in x], [row.ttft_cold_ms for row in rows], 0.4, label="cold", color="#9aa5b1")
    axes.bar(
        [i + 0.2 for i in x], [row.ttft_ms for row in rows], 0.4, label="with skippy", color="#1f4e79", hatch="//",
        edgecolor="white",
    )  # fmt: skip
    for i, row in enumerate(rows):
        axes.annotate(
            f"{row.evaluated_tokens}", (i + 0.2, row.ttft_ms), ha="center", va="bottom", fontsize=8, color="#1f4e79"
        )
    axes.set_yscale("log")
    axes.set_ylabel("time to first token (ms, logarithmic)")
    axes.set_xticks(list(x), [row.name for row in rows], rotation=40, ha="right")
    axes.set_xlabel("request, in order; the number on a bar is how many prompt tokens were evaluated")
    axes.set_title(title, loc="left")
    axes.grid(axis="y", which="both", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
