"""Over the death of a server: is there one, will another come, and counting on whichever lives."""

from __future__ import annotations

from typing import Final

import trio

from kvalet.actors.client import Client
from kvalet.actors.decisions.state import DOWN, House
from kvalet.actors.gate import Gate
from kvalet.actors.ledger import Ledger
from kvalet.actors.upstream import UpstreamClient
from kvalet.actors.wires import Wires
from kvalet.protocol import notices
from kvalet.protocol.errors import ServerFault, ServerLost
from kvalet.protocol.openai import ParsedRequest, Partial

DEATH_S: Final = 5.0
"""How long a broken exchange waits for the news that its server is dead."""


def is_settled(house: House, gate: Gate) -> bool:
    """Whether a server is there, or none will come."""
    return house.server.state in DOWN or (house.ready and gate.upstream is not None)


def reach_ready(ledger: Ledger, gate: Gate) -> UpstreamClient:
    """The server that takes work now. Raises ServerFault 503 with the reason when none does."""
    house = ledger.house
    if ledger.failure is not None:
        raise ServerFault(ledger.failure, status=503, code="journal_failed")
    if gate.upstream is None or not house.ready:
        reason = f": {house.server.reason}" if house.server.reason else ""
        raise ServerFault(
            f"llama-server is {house.server.state}{reason}",
            status=503,
            code="server_unavailable",
        )
    return gate.upstream


def may_carry_over(house: House) -> bool:
    """Whether a server that dies is followed by another."""
    return house.settings.restarts_max > 0


async def wait_left(ledger: Ledger, generation: int) -> bool:
    """Whether the ledger hears within a few seconds that this server is gone."""
    with trio.move_on_after(DEATH_S) as patience:
        await ledger.wait_for(
            lambda house: (
                house.server.generation != generation
                or house.server.state in (*DOWN, "restarting", "hung")
            )
        )
    return not patience.cancelled_caught


async def wait_settled(ledger: Ledger, gate: Gate) -> None:
    """Return once a server is there, or it is known that none will come."""
    await ledger.wait_for(lambda house: is_settled(house, gate))


async def count_tokens(
    wires: Wires, client: Client, request: ParsedRequest, partial: Partial
) -> list[int]:
    """The tokens of prompt and answer so far, counted by the next server if this one dies."""
    ledger, gate = wires.ledger, wires.gate
    while True:
        generation = ledger.house.server.generation
        try:
            return await gate.reach().count(request, partial)
        except ServerLost:
            if not may_carry_over(ledger.house) or not await wait_left(ledger, generation):
                raise
        await client.comment(notices.SERVER_RESTARTING)
        await wait_settled(ledger, gate)
        reach_ready(ledger, gate)
        await client.comment(notices.SERVER_RESUMED)


def check_thought(partial: Partial, cells: int, prompt: int) -> None:
    """Raise ServerFault where a thought broken off adds nothing to the ``prompt`` it continues."""
    if partial.reasoning and not partial.content and cells <= prompt:
        raise ServerFault(
            "this model's template cannot continue a thought that was broken off",
            code="not_continuable",
        )
