"""A floor imports only from floors below it, or from its own: the order of DESIGN, written down once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "skippy"

FLOORS = [
    {"errors", "_binding", "settings", "sizes", "policy", "logs", "steps", "exits"},
    {
        "_radix",
        "_llama",
        "config",
        "identity",
        "arena",
        "layout",
        "capability",
        "speeds",
        "worth",
        "history",
        "report",
        "text",
        "metrics",
    },
    {"store", "pool", "segments", "probe", "model", "plan", "lease", "stops", "starts"},
    {"usage", "leaving", "room", "shelf", "space", "spill", "restorer", "recorder", "cache", "sampling", "template"},
    {
        "request",
        "engine",
        "holding",
        "aio",
        "session",
        "runtime",
        "prefix_cache",
        "llama_turns",
        "llama_calls",
        "llama_context",
    },
    {"llama", "llama_lane", "llama_cache", "demo", "bench", "commands", "cli", "__init__"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The parts of skippy that a file imports when it runs; imports for types alone do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "skippy":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("skippy.")}
    return found


def test_every_file_has_its_floor() -> None:
    assert {part_of(path) for path in PACKAGE.rglob("*.py")} <= set(FLOOR_OF)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_from_below(path: Path) -> None:
    own = FLOOR_OF[part_of(path)]
    above = {name for name in imported(path) if FLOOR_OF.get(name, -1) > own}
    assert not above, f"{path.name} is on floor {own} and imports {above}"


def test_the_tree_knows_nothing_of_llama_cpp_and_the_link_nothing_of_the_tree() -> None:
    sources = {path.name: path.read_text() for path in PACKAGE.glob("*.p[yx]*")}
    for name, text in sources.items():
        if name.startswith("_radix"):
            assert "llama" not in text
        if name.startswith("_llama"):
            assert "radix" not in text
