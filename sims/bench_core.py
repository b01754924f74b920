"""How fast kvalet decides, and how fast it writes down what it decided. No server, no HTTP."""

from __future__ import annotations

import time
from pathlib import Path

import trio

from kvalet.actors.app import wall_clock
from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import open_journal
from kvalet.actors.ledger import Ledger
from kvalet.protocol.errors import JournalFault
from kvalet.protocol.journal import SCHEMA, Header
from kvalet.sims.figures import Figure, middle
from kvalet.sims.workload import Recording, record

SLOTS = (4, 64)
JOURNAL_SLOTS = 16
BATCHES = (1, 64)
"""Commands that share a write: one when the house is calm, many when it is not."""

COMMANDS_PER_S_MIN = 100_000.0
EVENTS_PER_MIN_MIN = 1_000_000.0


def measure_core(commands: int, repeats: int) -> list[Figure]:
    """Commands per second through ``take``, for few and for many slots."""
    figures: list[Figure] = []
    for slots in SLOTS:
        recording = record(slots, commands)
        rates = [commands / redecide(recording) for _ in range(repeats)]
        figures.append(
            Figure(
                part="core",
                name=f"decisions, {slots} slots",
                value=middle(rates),
                unit="commands/s",
                target=COMMANDS_PER_S_MIN,
                note=f"{commands} recorded commands, median of {repeats}",
            )
        )
    return figures


def redecide(recording: Recording) -> float:
    """Seconds that it takes to decide ``recording`` again."""
    house = House()
    started = time.perf_counter()
    for at_ns, command in recording:
        _, house = take(house, command, at_ns)
    return time.perf_counter() - started


async def measure_journal(commands: int, repeats: int, directory: Path) -> list[Figure]:
    """Events per minute that are decided, appended and synced, in files below ``directory``."""
    recording = record(JOURNAL_SLOTS, commands)
    figures: list[Figure] = []
    for batch in BATCHES:
        rates: list[float] = []
        size = events = 0
        for number in range(repeats):
            path = directory / f"batch-{batch}-{number}.jsonl"
            elapsed_s, events, size = await write_down(recording, batch, path)
            rates.append(60 * events / elapsed_s)
            await trio.Path(path).unlink()
        figures.append(
            Figure(
                part="journal",
                name=f"decided and stored, {batch} at a time",
                value=middle(rates),
                unit="events/min",
                target=EVENTS_PER_MIN_MIN,
                note=f"{events} events, {size // max(1, events)} bytes each, median of {repeats}",
            )
        )
    return figures


async def write_down(recording: Recording, batch: int, path: Path) -> tuple[float, int, int]:
    """Decide ``recording`` into a new journal at ``path``, ``batch`` commands a write.

    Returns seconds up to the last sync, events and bytes.
    """
    commands = [command for _, command in recording]
    journal, house, _ = open_journal(path, Header(schema=SCHEMA, versions={}, config={}))
    ledger = Ledger(journal, house, wall_clock)
    heard = ledger.tap(len(commands) * 8)
    try:
        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run_sync)
            for first in range(0, len(commands), batch):
                ledger.decide(commands[first : first + batch])
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        journal.close()
        elapsed_s = time.perf_counter() - started
    finally:
        journal.close()
    if ledger.failure is not None:
        raise JournalFault(ledger.failure)
    return elapsed_s, heard.statistics().current_buffer_used, journal.size
