"""On what and with what it was measured."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import llama_cpp

import skippy
from skippy._binding import BUILD, VERSION
from skippy.model import Model

__all__ = ["machine"]


def machine(path: Path, model: Model) -> dict[str, Any]:
    """The processor, the versions, and the model, which is the file at `path`."""
    processor = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        processor = found[1] if found else processor
    except OSError:
        pass
    return {
        "model": model.description or path.stem,  # without its weights a model does not describe itself
        "file": path.name,
        "processor": processor,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "skippy": skippy.__version__,
        "llama_cpp_python": VERSION,
        "llama_cpp": BUILD,
        "llama_cpp_features": llama_cpp.llama_print_system_info().decode(errors="replace").strip(),
    }
