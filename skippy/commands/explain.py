"""`skippy explain`: where prompts part from each other, told from their tokens alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from jinja2.exceptions import TemplateError
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from skippy._radix import RadixTree
from skippy.commands.options import AsJson, CommandError
from skippy.config import CacheConfig
from skippy.history import PartingHistory
from skippy.model import Model
from skippy.template import ChatTemplate

__all__ = ["Finding", "explain", "explain_prompts", "read_prompt"]

Tokens = npt.NDArray[np.int32]

_AROUND = 8  # tokens shown before and after the place where prompts part
_TAIL = 512  # tokens that are compared after it, as the cache does


@dataclass(frozen=True)
class Finding:
    """What a cache that has seen the earlier prompts would do with this one.

    prompt_tokens == cached_tokens + evaluated_tokens.  From token `diverged_at` on an earlier prompt reads
    `stored_text` and this one `prompt_text`: eight tokens before and after that index, None where nothing parts.
    `hint` is "volatile_prefix" once three prompts have parted at one index, `hint_at`, and then went on alike.
    """

    name: str
    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    reason: str
    diverged_at: int | None = None
    stored_text: str | None = None
    prompt_text: str | None = None
    hint: str | None = None
    hint_at: int | None = None


def explain_prompts(
    prompts: Iterable[tuple[str, Tokens]], show: Callable[[Tokens], str], *, min_tokens: int
) -> list[Finding]:
    """What a cache without limits, for a model with dense attention, would reuse for each of `prompts`, in order.

    `prompts` are names and token ids, int32 [n], n >= 1; `show` turns tokens into text.  O(tokens of all).
    """
    tree, history = RadixTree(), PartingHistory()
    findings = []
    for name, tokens in prompts:
        n = len(tokens)
        at = tree.match("", tokens).matched
        stored = tree.following("", tokens, _TAIL) if 0 < at < n else tokens[:0]
        parted = len(stored) > 0
        if parted:
            history.note("", at, stored, tokens[at:][:_TAIL])
        volatile = history.volatile_index("", at)
        usable = at >= max(1, min_tokens)
        cached = min(at, n - 1) if usable else 0
        before = tokens[max(0, at - _AROUND) : at]
        findings.append(
            Finding(
                name=name,
                prompt_tokens=n,
                matched_tokens=at,
                cached_tokens=cached,
                evaluated_tokens=n - cached,
                reason=("partial" if parted else "hit") if usable else "below_min_tokens" if at else "never_seen",
                diverged_at=at if parted else None,
                stored_text=show(np.concatenate([before, stored[:_AROUND]])) if parted else None,
                prompt_text=show(np.concatenate([before, tokens[at : at + _AROUND]])) if parted else None,
                hint=None if volatile is None else "volatile_prefix",
                hint_at=volatile,
            )
        )
        if n >= min_tokens:
            node = tree.insert("", tokens)
            if tree.get(node, "resident") is None:
                tree.put(node, "resident", name)
            else:
                tree.touch(node)
    return findings


def read_prompt(path: Path) -> str | tuple[list[Mapping[str, Any]], list[Any] | None]:
    """A prompt's text, or a chat: its messages and tools.  CommandError where the file is neither."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"{path}: no UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        data = json.loads(text)
    except ValueError as error:
        if path.suffix == ".json":
            raise CommandError(f"{path}: {error}, expected a list of messages") from None
        return text
    tools = data.get("tools") if isinstance(data, dict) else None
    messages = data.get("messages") if isinstance(data, dict) else data
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return messages, tools
    if path.suffix == ".json":
        raise CommandError(f'{path}: expected a list of messages with "role" and "content", or {{"messages": [...]}}')
    return text  # a prompt that happens to be JSON


def tokens_of(model: Model, path: Path) -> Tokens:
    """The tokens that the model is asked with.  CommandError for a chat that its template does not take."""
    prompt = read_prompt(path)
    if isinstance(prompt, str):
        ids = model.tokenize(prompt)
    else:
        template = ChatTemplate(model)
        try:
            text = template.render(*prompt)
        except (TemplateError, ValueError) as error:
            raise CommandError(f"{path}: the model's chat template refuses it: {error}") from None
        ids = model.tokenize(text, add_bos=not template.begins_with_bos(text))
    if not ids:
        raise CommandError(f"{path}: the prompt has no tokens")
    return np.array(ids, np.int32)


def _totals(findings: list[Finding]) -> dict[str, int]:
    return {
        name: sum(getattr(finding, name) for finding in findings)
        for name in ("prompt_tokens", "cached_tokens", "evaluated_tokens")
    }


def pictures(findings: list[Finding]) -> RenderableType:
    """A table with a line per prompt, and below it the texts where prompts part."""
    table = Table("prompt")
    for name in ("tokens", "reused", "evaluated", "parts at"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for found in findings:
        table.add_row(
            Text(found.name), str(found.prompt_tokens), str(found.cached_tokens), str(found.evaluated_tokens),
            "-" if found.diverged_at is None else str(found.diverged_at), found.reason,
        )  # fmt: skip
    table.add_section()
    table.add_row("all", *(str(total) for total in _totals(findings).values()))
    parts: list[RenderableType] = [table]
    told: set[int] = set()
    for found in findings:
        if found.diverged_at is not None:
            parts.append(Text(f"{found.name} parts from an earlier prompt at token {found.diverged_at}:", "bold"))
            parts.append(Text(f"  earlier  {found.stored_text!r}\n  here     {found.prompt_text!r}"))
        if found.hint_at is not None and found.hint_at not in told:
            told.add(found.hint_at)
            parts.append(
                Text(
                    f"  {found.hint}: three prompts or more part at token {found.hint_at} and then go on alike; "
                    "something there changes with every request, so move it behind what stays the same",
                    "yellow",
                )
            )
    return Group(*parts)


def explain(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF model; only its vocabulary is read.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help='Prompts: text, or JSON with a list of chat messages or {"messages": [...]}.'
        ),
    ],
    min_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Shorter prefixes are not reused; by default as configured.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where prompts part from each other, and what a cache that has seen the earlier ones would reuse.

    The prompts are taken in the order given.  Nothing is evaluated; the figures are those of a model with dense
    attention and a cache that has room for all of them.
    """  # fmt: skip
    loaded = Model(model, vocab_only=True)
    try:
        prompts = [(str(path), tokens_of(loaded, path)) for path in files]
        least = CacheConfig().min_tokens if min_tokens is None else min_tokens
        findings = explain_prompts(
            prompts, lambda tokens: loaded.detokenize(tokens.tolist(), special=True), min_tokens=least
        )
    finally:
        loaded.close()
    if as_json:
        data = {"min_tokens": least, "prompts": [asdict(found) for found in findings], "totals": _totals(findings)}
        typer.echo(json.dumps(data))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:  # a name is not folded where a program may look for it
            console.width = 80 + max(len(found.name) for found in findings)
        console.print(pictures(findings), soft_wrap=True)
