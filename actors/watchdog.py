"""Asks the server for its health, and reports one that gives no sign of life."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import httpx
import structlog
import trio

from kvalet.actors.server import Server, open_client
from kvalet.protocol.commands import Command, ExitSeen, HangSeen

FAILURES_MAX: Final = 3


async def run(
    server: Server,
    reports: trio.MemorySendChannel[Command],
    interval_s: float = 5.0,
    *,
    heard_at: Callable[[], float] = lambda: -math.inf,
    transport: httpx.AsyncBaseTransport | None = None,
) -> None:
    """Ask ``/health`` every ``interval_s``, and wait as long for an answer; closes ``reports``.

    After three failures in a row it reports and returns: an attached server as ExitSeen
    ``unreachable``, a launched one as HangSeen (its end is the launcher's to see), unless it
    was heard since on some stream: ``heard_at()`` says when, in seconds of trio's clock.
    """
    log = structlog.get_logger(__name__)
    failures, since = 0, trio.current_time()
    async with (
        reports,
        open_client(
            server.url, server.api_key, timeout_s=interval_s, transport=transport
        ) as client,
    ):
        while failures < FAILURES_MAX:
            await trio.sleep(interval_s)
            asked = trio.current_time()
            if await _is_healthy(client):
                failures = 0
                continue
            failures = failures + 1 if failures and heard_at() <= since else 1
            since = asked if failures == 1 else since
            log.warning("no answer to /health", url=server.url, failures=failures)
        silent_s = trio.current_time() - since
        await reports.send(_verdict(server, silent_s))


def _verdict(server: Server, silent_s: float) -> Command:
    if server.pid is None:
        return ExitSeen(generation=server.generation, code=0, planned=False, reason="unreachable")
    return HangSeen(generation=server.generation, silent_s=silent_s)


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
