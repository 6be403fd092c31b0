"""Who takes part: what one would use today, and skippy with each of its tiers by itself."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ARMS", "DEFAULT", "Arm", "choose"]


@dataclass(frozen=True)
class Arm:
    """One way to answer: `kind` says what runs in its process, `settings` how.

    `unavailable` says why it cannot take part, or is None.
    """

    name: str
    about: str
    kind: Literal["llama_cpp", "skippy", "llama-server"]
    settings: dict[str, Any] = field(default_factory=dict)
    unavailable: str | None = None


ARMS = {
    arm.name: arm
    for arm in (
        Arm("cold", "llama_cpp.Llama, emptied before each request", "llama_cpp", {"cold": True}),
        Arm("llama-cpp", "llama_cpp.Llama as it is: one sequence, its common head reused", "llama_cpp"),
        Arm("ram-cache", "llama_cpp.Llama with LlamaRAMCache", "llama_cpp", {"ram_cache": True}),
        Arm("server-1", "llama-server with one slot and its RAM cache", "llama-server", {"slots": 1}),
        Arm(
            "server-n",
            "llama-server with a slot for each chat, named with each request, and its RAM cache",
            "llama-server",
            {"slots": 0},
        ),
        Arm("skippy", "skippy as it comes: pool and RAM, and a folder", "skippy", {"disk": True}),
        Arm("skippy-pool", "skippy with the pool alone", "skippy", {"payload": "resident-kv", "ram": 0}),
        Arm("skippy-ram", "skippy with saved state in RAM alone", "skippy", {"leaves_pool": True}),
        Arm("skippy-disk", "skippy with saved state on disk alone", "skippy", {"disk": True, "leaves_ram": True}),
    )
}

DEFAULT = tuple(ARMS)


def choose(names: list[str], server: str | None) -> list[Arm]:
    """The arms of these names; those of llama-server where it is found, by default on PATH.

    ValueError, naming the known ones, for another name, and where no arm is cold: the others are compared with it.
    """
    found = shutil.which(server or "llama-server")
    arms = []
    for name in names:
        if name not in ARMS:
            raise ValueError(f"{name!r} is no arm, expected some of {', '.join(ARMS)}")
        arm = ARMS[name]
        if arm.kind == "llama-server":
            why = None
            if found is None:
                why = (
                    f"{server} is no program" if server else "llama-server is not on PATH, and --llama-server not given"
                )
            arm = Arm(arm.name, arm.about, arm.kind, {**arm.settings, "program": found}, why)
        arms.append(arm)
    if "cold" not in names:
        arms.insert(0, ARMS["cold"])
    return arms
