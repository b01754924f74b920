"""The way to the server: which one is there now, and when any was last heard."""

from __future__ import annotations

import attrs
import trio

from kvalet.actors.decisions.exact import Wish
from kvalet.actors.prefixes import Prefixes
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol.errors import ServerLost


@attrs.define
class Gate:
    """The server as everybody reaches it; ``upstream`` is None while there is none.

    ``heard_at`` is when it last sent a datum on any stream, in seconds of trio's clock;
    ``wish`` is what its launch wished of exact concurrency.
    """

    upstream: UpstreamClient | None = None
    prefixes: Prefixes = attrs.field(factory=Prefixes)
    heard_at: float = 0.0
    wish: Wish = "off"

    def open(self, upstream: UpstreamClient) -> None:
        """Another server is there; nothing lies in its slots yet."""
        self.upstream = upstream
        self.prefixes = Prefixes()
        self.hear()

    def close(self) -> None:
        """The server is gone."""
        self.upstream = None

    def reach(self) -> UpstreamClient:
        """The server of this moment. Raises ServerLost when there is none."""
        if self.upstream is None:
            raise ServerLost("llama-server is gone")
        return self.upstream

    def hear(self) -> None:
        """It sent something on some stream."""
        self.heard_at = trio.current_time()
