"""A folder on a file system that is really full: a tmpfs of two MiB in a mount namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MOUNT = 'mount -t tmpfs -o size=2m none "$1" && exec "$2" -c "$3" "$1" "$4"'

TIER = """
import json, sys
from pathlib import Path
from tests.disk_folder import open_tier, path_of, put, reach, read
from skippy.store import DiskTier

folder = Path(sys.argv[1]) / "kv"
tier = open_tier(folder)
for i in range(12):
    put(tier, path_of(100, i), per_token=3000)  # 300 kB each
said = tier.stats()
tier.close()
again = open_tier(folder)
found = [i for i in range(12) if reach(again, path_of(100, i)) == 100]
for i in found:
    read(again, again.find("a" * 64, path_of(100, i)), path_of(100, i), per_token=3000)
wrong = again.verify()
names = sorted(path.name for path in folder.iterdir())
again.erase()
put(again, path_of(100, 99), per_token=3000)
print(json.dumps({
    "off": said["off"], "saves": said["counts"].get("saves", 0), "found": found, "wrong": wrong, "names": names,
    "after_erasing": reach(again, path_of(100, 99)), "off_after": again.off,
}))
again.close()
"""

RUNTIME = """
import json, sys
from pathlib import Path
import skippy

def answers(disk):
    config = skippy.CacheConfig(min_tokens=16, ram="400kB", disk=disk, disk_min_free=0)
    with skippy.Runtime(sys.argv[2], n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1, lanes=1, cache=config) as rt:
        found = []
        for i in range(70):
            prompt = [10 + (7 * i + j * j) % 300 for j in range(200)]
            found.append(rt.generate(prompt, max_tokens=4).tokens)
            rt.check()
        return found, rt.stats()["disk"] if disk else None

full, disk = answers(Path(sys.argv[1]) / "kv")
print(json.dumps({"same": full == answers(None)[0], "off": disk["off"], "counts": disk["counts"]}))
"""


def on_a_full_disk(folder: Path, script: str, argument: str = "") -> dict[str, Any]:
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("mount namespaces are Linux's")
    folder.mkdir()
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh"]
    done = subprocess.run(
        [*command, str(folder), sys.executable, script, argument], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_what_was_written_before_it_was_full_is_there(tmp_path: Path) -> None:
    said = on_a_full_disk(tmp_path / "small", TIER)
    assert "No space left" in said["off"]
    assert 1 <= said["saves"] < 12
    assert said["found"] == list(range(said["saves"]))
    assert said["wrong"] == []
    assert [
        name for name in said["names"] if not name.endswith(".kv") and "index" not in name and "lock" not in name
    ] == []
    assert (said["after_erasing"], said["off_after"]) == (100, None)


def test_requests_go_on(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    said = on_a_full_disk(tmp_path / "small", RUNTIME, str(tiny("llama")))
    assert said["same"]
    assert said["counts"]["saves"] >= 1
    assert said["off"] or said["counts"]["too_full"] >= 1  # the free space is looked at before anything is written
