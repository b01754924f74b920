"""Reads the pressure: what is really resident in the slots. It never picks a victim."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol.commands import Command, PressureRead
from kvalet.protocol.errors import KvaletError
from kvalet.protocol.ids import Cells, SlotId

INTERVAL_S = 5.0
"""Far above the one second in which the server notices closed connections."""
LOOK_MAX_S = 30.0
"""A look without an answer is given up far before a silent park's deadline, and made again."""


async def run(
    upstream: UpstreamClient,
    tell: Callable[[Command], None],
    is_busy: Callable[[], bool],
    interval_s: float = INTERVAL_S,
) -> None:
    """Read ``/slots`` every ``interval_s`` while anything runs; report readings that changed."""
    log = structlog.get_logger(__name__)
    last = PressureRead(slots=())
    while True:
        await trio.sleep(interval_s)
        if not is_busy() and not any(busy for _, _, busy in last.slots):
            continue
        try:
            states = await upstream.slots(LOOK_MAX_S)
        except KvaletError as fault:
            log.warning("no reading of the slots", why=str(fault))
            continue
        reading = PressureRead(
            slots=tuple(
                (SlotId(state.id), Cells(state.resident), state.is_processing) for state in states
            ),
            parked=tuple(SlotId(state.id) for state in states if state.is_parked),
        )
        if reading != last:
            last = reading
            tell(reading)
