"""The pictures of the report, as SVG: readable without colour, each line with a mark and a dash of its own."""

from __future__ import annotations

import io
from typing import Any

__all__ = ["evaluated_of", "hit_rates_of", "memory_of", "ttft_of"]

# Okabe and Ito's colours, in an order in which their greys differ; skippy alone has a full line.
_STYLES: dict[str, tuple[str, Any, str]] = {
    "cold": ("#000000", ":", "x"),
    "llama-cpp": ("#E69F00", "--", "s"),
    "ram-cache": ("#D55E00", "--", "D"),
    "server-1": ("#CC79A7", "-.", "^"),
    "server-n": ("#009E73", "-.", "v"),
    "skippy": ("#0072B2", "-", "o"),
    "skippy-pool": ("#56B4E9", (0, (1, 1)), "P"),
    "skippy-ram": ("#4477AA", (0, (3, 1, 1, 1)), "X"),
    "skippy-disk": ("#88CCEE", (0, (6, 2)), "*"),
}


def _style(name: str) -> dict[str, Any]:
    colour, line, mark = _STYLES.get(name, ("#666666", "-", "."))
    strong = name == "skippy"
    return {
        "color": colour, "linestyle": line, "marker": mark, "linewidth": 2.2 if strong else 1.3,
        "markersize": 6 if strong else 4.5, "markerfacecolor": colour if strong else "white",
        "zorder": 3 if strong else 2,
    }  # fmt: skip


def _svg(draw: Any, *, width: float = 6.4, height: float = 3.9) -> str:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "skippy", "font.size": 10, "font.family": "sans-serif"}
    ):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        draw(axes)
        axes.grid(axis="y", which="major", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _series(figures: dict[str, Any], workload: str, value: str) -> dict[str, list[float]]:
    """For each arm the median over rounds of a value, by request."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in figures["requests"]:
        if row["workload"] == workload and row.get(value) is not None:
            found.setdefault(row["arm"], {}).setdefault(row["index"], []).append(float(row[value]))
    order = [name for name in figures["arms"] if name in found]
    return {name: [sorted(v)[(len(v) - 1) // 2] for _, v in sorted(found[name].items())] for name in order}


def ttft_of(figures: dict[str, Any], workload: str) -> str:
    """Time to first token over the requests, an arm a line, on a logarithmic scale."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def draw(axes: Any) -> None:
        for name, values in _series(figures, workload, "ttft_ms").items():
            axes.plot(range(1, len(values) + 1), values, label=name, **_style(name))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("request")
        axes.set_ylabel("time to first token, ms (log)")
        _whole_numbers(axes)

    return _svg(draw)


def evaluated_of(figures: dict[str, Any], workload: str) -> str:
    """Prompt tokens that were evaluated over the requests, an arm a line, and the least possible."""

    def draw(axes: Any) -> None:
        for name, values in _series(figures, workload, "evaluated").items():
            axes.plot(range(1, len(values) + 1), values, label=name, **_style(name))
        least = _series(figures, workload, "least").get("cold", [])
        axes.plot(range(1, len(least) + 1), least, label="least possible", color="#000000", linewidth=0.9, zorder=1)
        axes.set_xlabel("request")
        axes.set_ylabel("prompt tokens evaluated")
        axes.set_ylim(bottom=0)
        _whole_numbers(axes)

    return _svg(draw)


def memory_of(figures: dict[str, Any], workload: str) -> str:
    """Resident memory of each arm's process over the requests."""

    def draw(axes: Any) -> None:
        for name, values in _series(figures, workload, "memory_kib").items():
            axes.plot(range(1, len(values) + 1), [each / 1024 for each in values], label=name, **_style(name))
        axes.set_xlabel("request")
        axes.set_ylabel("memory of the process, MiB")
        axes.set_ylim(bottom=0)
        _whole_numbers(axes)

    return _svg(draw)


def hit_rates_of(rates: dict[str, dict[int, float]], limit: float) -> str:
    """The share of prompt tokens that is found, over the budget in tokens, a policy a line."""

    def draw(axes: Any) -> None:
        marks = {"worth": ("#0072B2", "-", "o"), "lru": ("#E69F00", "--", "s")}
        for name, found in rates.items():
            colour, line, mark = marks[name]
            axes.plot(list(found), [100 * rate for rate in found.values()], label=name, color=colour, linestyle=line,
                      marker=mark, linewidth=1.8)  # fmt: skip
        axes.axhline(100 * limit, color="#000000", linewidth=0.9, label="no limit")
        axes.set_xlabel("budget, tokens")
        axes.set_ylabel("prompt tokens found, %")
        axes.set_ylim(0, 100)

    return _svg(draw)


def _whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
