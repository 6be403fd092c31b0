"""The report as one page of HTML that needs nothing else."""

from __future__ import annotations

import html
from typing import Any

from skippy.bench.plots import evaluated_of, hit_rates_of, memory_of, ttft_of
from skippy.bench.table import text_of

__all__ = ["page_of"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
body { color: #111; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #999; padding-top: 1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ccc; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td.absent { text-align: left; white-space: normal } tr.ours td { font-weight: 600 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
.plots { margin-top: 1rem }
figure { margin: 0 } figcaption { font-size: .9rem } svg { width: 100%; height: auto }
dt { font-weight: 600 } dd { margin: 0 0 .4rem }
"""


def page_of(figures: dict[str, Any]) -> str:
    """HTML with a table and plots for each workload, the machine, and what a reader must know."""
    workloads = figures["workloads"]
    machine = {**figures["machine"], **figures["settings"]}
    parts = [
        f"<h1>skippy bench: {_e(figures['machine']['model'])}</h1>",
        f"<p>{len(workloads)} workloads, {figures['rounds']} rounds; {_turns(figures['in_turns'])}. "
        "Times are percentiles over all requests of all rounds; lower is better everywhere but for tokens/s. "
        "Plots show medians over rounds.</p>",
        _arms(figures["arms"]),
        _notes(figures),
    ]
    for workload in workloads:
        parts.append(_section(figures, workload))
    rows = "".join(f"<tr><td>{_e(key)}</td><td>{_e(value)}</td></tr>" for key, value in machine.items())
    parts.append(f"<h2>Measured on</h2><div class=wide><table>{rows}</table></div>")
    parts.append(f"<p>Made by <code>{_e(figures['command'])}</code></p>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>skippy bench</title><style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _turns(in_turns: bool) -> str:
    if in_turns:
        return "each request goes to each arm in changing order, and one process at a time runs"
    return "the arms play one after the other in changing order, because memory does not hold all of them at once"


def _e(value: Any) -> str:
    return html.escape(str(value))


def _arms(arms: dict[str, Any]) -> str:
    lines = []
    for name, arm in arms.items():
        missing = f" <em>Not there: {_e(arm['unavailable'])}.</em>" if arm["unavailable"] else ""
        lines.append(f"<dt>{_e(name)}</dt><dd>{_e(arm['about'])}.{missing}</dd>")
    return f"<dl>{''.join(lines)}</dl>"


def _notes(figures: dict[str, Any]) -> str:
    problems = figures["problems"]
    if not all("skippy" in workload["arms"] for workload in figures["workloads"]):
        return "<p>Skippy as it comes was not among the arms.</p>"
    if not problems:
        return (
            "<p>On every workload skippy evaluated no more tokens than any other arm, and its median time to first "
            "token was the lowest.</p>"
        )
    return "<p>Where skippy is not the best:</p><ul>" + "".join(f"<li>{_e(each)}</li>" for each in problems) + "</ul>"


def _section(figures: dict[str, Any], workload: dict[str, Any]) -> str:
    name = workload["name"]
    head, *rows = text_of(workload)
    table = "<tr>" + "".join(f"<th>{_e(cell)}</th>" for cell in head) + "</tr>"
    for row in rows:
        cells = "".join(f"<td>{_e(cell)}</td>" for cell in row)
        if not any(row[2:]):  # why it was not there, which would make one column as wide as a page
            cells = f"<td>{_e(row[0])}</td><td class=absent colspan={len(row) - 1}>{_e(row[1])}</td>"
        table += f"<tr{' class=ours' if row[0] == 'skippy' else ''}>{cells}</tr>"
    pictures = [
        ("Time to first token over the requests", ttft_of(figures, name)),
        ("Prompt tokens evaluated for each request", evaluated_of(figures, name)),
        ("Memory of the process over the requests", memory_of(figures, name)),
    ]
    rates = workload.get("hit_rates")
    if rates:
        by_policy = {policy: {int(k): v for k, v in found.items()} for policy, found in rates["policies"].items()}
        pictures.append(
            ("What saved state of so many tokens finds again, by replay", hit_rates_of(by_policy, rates["no_limit"]))
        )
    plots = "".join(f"<figure>{svg}<figcaption>{_e(text)}</figcaption></figure>" for text, svg in pictures)
    return (
        f"<h2>{_e(name)}: {_e(workload['about'])}</h2><p>{workload['requests']} requests, "
        f"{workload['prompt_tokens']:,} prompt tokens, {workload['least']:,} of them new.</p>"
        f"<div class=wide><table>{table}</table></div><div class=plots>{plots}</div>"
    )
