"""Asks the server for its health, and reports an attached one that is gone."""

from __future__ import annotations

from typing import Final

import httpx
import structlog
import trio

from kvalet.actors.server import Server, open_client
from kvalet.protocol.commands import Command, ExitSeen

FAILURES_MAX: Final = 3
_TIMEOUT_S: Final = 5.0


async def run(
    server: Server,
    reports: trio.MemorySendChannel[Command],
    interval_s: float = 5.0,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> None:
    """Ask ``/health`` every ``interval_s`` until cancelled; closes ``reports``.

    A launched server's end is the launcher's to see. An attached one that fails three times
    in a row is reported as ExitSeen ``unreachable``, and this returns.
    """
    log = structlog.get_logger(__name__)
    failures = 0
    async with (
        reports,
        open_client(
            server.url, server.api_key, timeout_s=_TIMEOUT_S, transport=transport
        ) as client,
    ):
        while failures < FAILURES_MAX or server.pid is not None:
            await trio.sleep(interval_s)
            if await _is_healthy(client):
                failures = 0
            else:
                failures += 1
                log.warning("no answer to /health", url=server.url, failures=failures)
        await reports.send(
            ExitSeen(generation=server.generation, code=0, planned=False, reason="unreachable")
        )


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
