"""Closes ended leases: a slot is free again when it has been *seen* idle, not before.

A stream's end is not proof. An aborted slot is emptied (the server does that once the
slot is idle, so success proves both); one whose answer ended by itself keeps its cells
as a prefix for the next request.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from kvalet.actors.decisions.recovery import POISON
from kvalet.actors.parking import file_name
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol.commands import Command, SlotSeen
from kvalet.protocol.errors import KvaletError
from kvalet.protocol.events import AnyEvent, LeaseEnded, ServerExited
from kvalet.protocol.ids import Cells, SlotId

RETRY_S = 1.0
LOST = ("lost", "server-lost", POISON)


async def run(
    upstream: UpstreamClient,
    events: trio.MemoryReceiveChannel[AnyEvent],
    tell: Callable[[Command], None],
) -> None:
    """Close every lease that ends, until cancelled or the ledger has failed."""
    async with trio.open_nursery() as nursery:
        closing: set[trio.CancelScope] = set()
        async for event in events:
            if isinstance(event, LeaseEnded) and event.slots and event.reason not in LOST:
                nursery.start_soon(_close_within, closing, upstream, event, tell)
            elif isinstance(event, ServerExited):
                # Its slots are gone with it, and the ledger has closed their leases.
                for scope in tuple(closing):
                    scope.cancel()


async def _close_within(
    closing: set[trio.CancelScope],
    upstream: UpstreamClient,
    ended: LeaseEnded,
    tell: Callable[[Command], None],
) -> None:
    with trio.CancelScope() as scope:
        closing.add(scope)
        try:
            await _close(upstream, ended, tell)
        finally:
            closing.discard(scope)


async def _close(
    upstream: UpstreamClient, ended: LeaseEnded, tell: Callable[[Command], None]
) -> None:
    residue = Cells(0)
    for slot in ended.slots:
        residue = Cells(max(residue, await _settle(upstream, slot, ended)))
    # A save that was under way when the client left has ended by now.
    upstream.forget(file_name(ended.request))
    tell(SlotSeen(request=ended.request, residue=residue if len(ended.slots) == 1 else Cells(0)))


async def _settle(upstream: UpstreamClient, slot: SlotId, ended: LeaseEnded) -> Cells:
    """Wait until ``slot`` is idle; the cells it keeps. Asks again while the server cannot say."""
    log = structlog.get_logger(__name__)
    while True:
        try:
            if ended.aborted or len(ended.slots) > 1:
                await upstream.empty(slot)
                return Cells(0)
            return await upstream.wait_idle(slot)
        except KvaletError as fault:
            # The server's end is the launcher's to report; it closes every lease at once.
            log.warning("slot not seen idle yet", slot=slot, request=ended.request, why=str(fault))
            await trio.sleep(RETRY_S)
