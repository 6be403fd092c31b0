"""What each family of models keeps and reuses: bytes per token and per checkpoint, and a chat of ten turns with edits.

    python benchmarks/families.py [--json FILE]

The two real models come from their packages, the others are tiny, with the architecture of the name and random weights
(their bytes say how state is made up, not how much a large model takes).  The chat is the same for all of them, with
answers that are written beforehand, so that prompts are equal where vocabularies are: ten messages, three of which are
rewritten.  "least" is what had to be evaluated: tokens that no earlier prompt had, at least one each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import skippy
from skippy.commands.options import packaged_model
from skippy.demo.texts import PLAIN_TEMPLATE

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tiny models, which belong to the tests

from tests.tiny_models import FAMILIES, write_model

SYSTEM = "You are the keeper of a lighthouse. You know the sea, the birds and the ships, and answer in one sentence."
QUESTIONS = [
    "How many steps has the tower?", "What did you see last night?", "Which ships come by in winter?",
    "Do the birds sleep here?", "Who brings you bread and oil?", "When was the lamp changed?",
    "Is it ever quiet?", "What do you read in the evening?", "How far can one see the light?", "Will you stay?",
]  # fmt: skip
ANSWER = "It is as it was the day before, and the day before that; the wind turns and the lamp burns on, number {}."
EDITED = {3: "Do the gulls sleep here at all?", 6: "Is it ever loud?", 9: "Will you leave us one day?"}


def chat(rt: skippy.Runtime) -> tuple[int, int, int]:
    """Prompt tokens, evaluated ones, and the least that had to be."""
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    seen: set[tuple[int, ...]] = set()
    prompt_tokens = evaluated = least = 0

    def ask(turn: list[dict[str, str]]) -> None:
        nonlocal prompt_tokens, evaluated, least
        prompt = tuple(rt.render(turn))
        reuse = rt.chat(turn, max_tokens=1).reuse
        known = next((n for n in range(len(prompt) - 1, 0, -1) if prompt[:n] in seen), 0)
        seen.update(prompt[:n] for n in range(1, len(prompt) + 1))
        prompt_tokens += reuse.prompt_tokens
        evaluated += reuse.evaluated_tokens
        least += len(prompt) - known

    for i, question in enumerate(QUESTIONS):
        asked = [*messages, {"role": "user", "content": question}]
        ask(asked)
        if i in EDITED:
            asked = [*messages, {"role": "user", "content": EDITED[i]}]
            ask(asked)
        messages = [*asked, {"role": "assistant", "content": ANSWER.format(i)}]
    return prompt_tokens, evaluated, least


def measure(name: str, path: Path) -> dict[str, Any]:
    cache = skippy.CacheConfig(ram="1GiB", min_tokens=16)
    with skippy.Runtime(path, n_ctx=4096, lanes=1, chat_template=PLAIN_TEMPLATE, cache=cache) as rt:
        prompt, evaluated, least = chat(rt)
        rt.check()
        stats = rt.stats()
        return {
            "name": name,
            "family": stats["model"]["family"],
            "unable": stats["unable"],
            "window": stats["model"]["window"],
            "bytes_per_token": stats["model"]["bytes_per_token"],
            "bytes_per_checkpoint": stats["model"]["bytes_per_checkpoint"],
            "prompt_tokens": prompt,
            "evaluated_tokens": evaluated,
            "least_tokens": least,
            "ram_bytes": stats["ram"]["in_use"],
            "checkpoints": stats["checkpoints"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"SmolLM2-135M": packaged_model(), "Gemma 3 270M": packaged_model("gemma3")}
        models |= {f"tiny {name}": write_model(name, Path(folder) / f"{name}.gguf") for name in FAMILIES}
        for name, path in models.items():
            results.append(measure(name, path))
    table = Table(title="ten turns, three of them rewritten; bytes as llama.cpp saves them")
    for column in (
        "model",
        "family",
        "window",
        "bytes/token",
        "bytes/checkpoint",
        "prompt",
        "evaluated",
        "least",
        "RAM",
    ):
        table.add_column(column, justify="left" if column in ("model", "family") else "right")
    for found in results:
        table.add_row(
            found["name"], found["family"], str(found["window"] or "-"), str(found["bytes_per_token"]),
            str(found["bytes_per_checkpoint"] or "-"), str(found["prompt_tokens"]), str(found["evaluated_tokens"]),
            str(found["least_tokens"]), f"{found['ram_bytes'] / 2**20:.2f} MiB",
        )  # fmt: skip
    Console(width=132).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
