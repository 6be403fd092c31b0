"""Which llama-cpp-python, and through it which llama.cpp, is loaded; refuses one that was never tested.

Nothing here calls llama.cpp beyond asking for its version.  `skippy._llama` resolves its functions
through `address`, so that the library used is the very one that llama-cpp-python has loaded.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re

__all__ = ["BUILD", "SUPPORTED", "VERSION", "address", "require_supported"]

#: llama-cpp-python from the first version (included) to the second (excluded).
SUPPORTED = ("0.3.36", "0.3.37")

VERSION = importlib.metadata.version("llama-cpp-python")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numeric parts of a version: "0.3.36+cu124" -> (0, 3, 36)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def require_supported(version: str = VERSION, supported: tuple[str, str] = SUPPORTED) -> None:
    """Raise ImportError, with both versions in the message, unless `version` lies within `supported`."""
    if not _numbers(supported[0]) <= _numbers(version) < _numbers(supported[1]):
        raise ImportError(
            f"skippy is built and tested against llama-cpp-python from {supported[0]} to below {supported[1]}, "
            f"but {version} is installed; state calls of other versions differ in silence"
        )


require_supported()

from llama_cpp import llama_cpp as _wrapper  # noqa: E402 - only after the version is known to be good

_library = _wrapper._lib


def address(name: str) -> int:
    """Address of the function `name` in the loaded libllama; ImportError, naming both versions, if it is not there."""
    try:
        found = ctypes.cast(getattr(_library, name), ctypes.c_void_p).value
    except AttributeError:
        found = None
    if not found:
        raise ImportError(
            f"the llama.cpp loaded by llama-cpp-python {VERSION} has no function {name!r}; "
            f"skippy needs llama-cpp-python from {SUPPORTED[0]} to below {SUPPORTED[1]}"
        )
    return found


def _text(name: str) -> str:
    function = ctypes.CFUNCTYPE(ctypes.c_char_p)(address(name))
    return (function() or b"").decode()


#: Version and commit of the loaded llama.cpp, e.g. "0.5.0-1a2b3c4"; part of every namespace.
BUILD = f"{_text('llama_version')}-{_text('ggml_commit')}"

#: Size and field offsets of the batch structure as the wrapper declares it; `_llama` compares its own.
BATCH_LAYOUT = (
    ctypes.sizeof(_wrapper.llama_batch),
    tuple((name, getattr(_wrapper.llama_batch, name).offset) for name, *_ in _wrapper.llama_batch._fields_),
)
