"""Programs that play the processes of a benchmark's arms, and what the system says of a process."""

from __future__ import annotations

import sys
from pathlib import Path

_SERVER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
left = [{answers}]
if "broken" in arguments["--model"]:
    sys.exit("no such model")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        if not left[0]:
            print("out of memory", flush=True)
            os._exit(1)
        left[0] -= 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        pieces = [
            {{"content": "", "tokens": []}},
            {{"content": "a", "tokens": [asked["prompt"][-1]]}},
            {{"content": "b", "tokens": [asked["n_predict"], asked["id_slot"]]}},
            {{"content": "", "tokens": [], "timings": {{"prompt_n": int(arguments["--ctx-size"])}}}},
        ]
        if asked["prompt"] == [666]:
            pieces.pop()
        for piece in pieces:
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\\n\\n")
            self.wfile.flush()


HTTPServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()
"""

_WORKER = """#!{python}
import sys
print('{{"ready": true, "memory_kib": 1}}', flush=True)
sys.stdin.readline()
print('{{"tokens": [1]}}', flush=True)
sys.exit("killed")
"""


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def llama_server(folder: Path, *, answers: int = -1) -> Path:
    """A llama-server that answers with the last token of the prompt, `n_predict` and `id_slot`; dies after `answers`.

    It says that it evaluated as many tokens as its context has, nothing of that for the prompt 666, and loads no model
    that is "broken".
    """
    return _write(folder / "llama-server", _SERVER.format(python=sys.executable, answers=answers))


def mortal_worker(folder: Path) -> Path:
    """In place of Python: a worker that answers once, and ends as one that was killed."""
    return _write(folder / "python", _WORKER.format(python=sys.executable))


def stat_of(process: Path) -> list[str]:
    """What /proc says of a process, `process` being its folder: state (T: stopped, Z: ended), parent, ...  OSError."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def has_ended(process: Path) -> bool:
    """Whether it is gone, or waits for nothing but its parent to notice."""
    try:
        return stat_of(process)[0] == "Z"
    except OSError:
        return True
