"""A small program that answers as a llama-server does, for tests of how one is launched."""

from __future__ import annotations

import stat
import sys
from functools import partial
from pathlib import Path
from typing import Final

import trio

from kvalet.actors import launcher
from kvalet.actors.blueprint import LaunchConfig
from kvalet.actors.server import Server
from kvalet.protocol.commands import Command, LaunchPlanned

FILES: Final = Path(__file__).resolve().parents[1] / "data"
MTP: Final = FILES / "gguf_headers" / "qwen36-27b-mtp.gguf"

STAND_IN: Final = '''#!{python}
"""Answers as a llama-server does, and ends where an argument is one of REFUSED."""
import http.server, json, os, sys

REFUSED = {refused!r}
EXACT = {exact!r}
ROWS = "--preempt-ram N  MiB for parked sequences (default: 0 - disabled)" if EXACT else ""
if "--help" in sys.argv:
    print(open({help!r}).read() + ROWS)
elif "--version" in sys.argv:
    print("version: 11434 (abc)")
elif "--list-devices" not in sys.argv:
    if any(word in REFUSED for word in sys.argv):
        sys.exit("E llama_model_load: error loading model: unable to allocate CUDA0 buffer")
    exact = os.environ.get("LLAMA_EXACT_CONCURRENCY") == "1"
    if exact and EXACT == "refused":
        sys.exit("E srv load_model: exact concurrency: needs a batch of at least 514 tokens")
    props = dict(total_slots=4, model_path="m.gguf")
    if EXACT in ("known", "refused"):
        props["exact_concurrency"] = exact

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            key = "Bearer " + os.environ["LLAMA_API_KEY"]
            known = self.path == "/health" or self.headers["Authorization"] == key
            body = json.dumps(props).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *words):
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
'''


def stand_in(folder: Path, *refused: str, exact: str = "") -> Path:
    """An executable that answers as a llama-server, but for launches with ``refused`` words.

    With ``exact`` it parks by itself: ``ignored`` knows nothing of exact concurrency, ``known``
    runs it, ``refused`` names it and ends.
    """
    path = folder / "llama-server"
    path.write_text(
        STAND_IN.format(
            python=sys.executable,
            refused=refused,
            exact=exact,
            help=str(FILES / "help_b11434.txt"),
        )
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


async def launched(
    config: LaunchConfig, env: dict[str, str] | None = None
) -> tuple[list[LaunchPlanned], list[Command]]:
    """Launch and stop again: what was tried, and everything that was reported."""
    send, receive = trio.open_memory_channel[Command](100)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            server: Server = await nursery.start(partial(launcher.run, config, send, env=env))
        assert server.pid
        nursery.cancel_scope.cancel()
    said = [command async for command in receive]
    return [one for one in said if isinstance(one, LaunchPlanned)], said
