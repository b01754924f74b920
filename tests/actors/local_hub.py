"""A model hub on this machine, for tests: it tells what it was given and remembers who asked."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

import attrs

from kvalet.actors.decisions.plan.shape import ModelShape

ODD: Final = ModelShape(
    arch="new-comer",
    layers=6,
    context=32768,
    heads=(4,) * 6,
    kv_heads=(1,) * 6,
    key_length=64,
    value_length=64,
    window=512,
    repositories=("first/model", "second/model"),
)
PERIOD_3: Final = b'{"text_config": {"sliding_window_pattern": 3}}'
Answer = tuple[int, bytes, Mapping[str, str]]


@attrs.define
class Hub:
    """A hub on this machine: ``answers`` by path, every request remembered."""

    answers: dict[str, Answer] = attrs.field(factory=dict[str, Answer])
    asked: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])
    """Paths, and the authorization that came along."""
    url: str = ""

    def tells(
        self, repository: str, body: bytes, status: int = 200, headers: Mapping[str, str] = {}
    ) -> None:
        self.answers[f"/{repository}/resolve/main/config.json"] = (status, body, headers)

    @property
    def paths(self) -> list[str]:
        return [path.removesuffix("/resolve/main/config.json") for path, _ in self.asked]


class Door(BaseHTTPRequestHandler):
    """Serves one Hub."""

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def do_GET(self) -> None:
        self.hub.asked.append((self.path, self.headers.get("authorization", "")))
        status, body, headers = self.hub.answers.get(self.path, (404, b"nothing", {}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing to say on a test's stderr."""


@contextmanager
def serving() -> Generator[Hub]:
    """A hub that is open until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Door, hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=partial(server.serve_forever, 0.02))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
