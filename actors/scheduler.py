"""The scheduler alone: a host's own workers lease cells, with no HTTP and no llama-server.

The same ledger, rules and journal as ``serve``, over a pool that the host owns: it decodes
by itself, asks for more cells before it uses them, and moves them out when it is told to.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import attrs
import trio

from kvalet.actors.decisions.preemption import POLICIES
from kvalet.actors.decisions.state import House
from kvalet.actors.decisions.status import status
from kvalet.actors.journal import open_journal
from kvalet.actors.leases import SURFACE, Desk, Lease, Line, arrive, check_request
from kvalet.actors.ledger import Ledger
from kvalet.protocol import commands as c
from kvalet.protocol.commands import DEFAULTS
from kvalet.protocol.errors import ConfigFault, ServerFault
from kvalet.protocol.ids import Cells, Nanos
from kvalet.protocol.journal import SCHEMA, Header

LAST_WORDS_S = 1.0
"""How long a scheduler that is cancelled waits for its leases to end by themselves."""


@final
@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """A pool of ``cells`` cells shared by ``slots`` slots, and the rules it is lent out by.

    ``journal`` is the file that every decision is appended to. ``headroom`` cells are never
    lent (None: one per slot). The other fields mean what they mean in ``Config``; sizes are
    cells. Raises ConfigFault, which names all that is wrong.
    """

    cells: int
    slots: int
    journal: Path
    headroom: int | None = None
    policy: str = DEFAULTS.policy
    block_min: int = DEFAULTS.block_min
    first_block: int = DEFAULTS.first_block
    quantum: int = DEFAULTS.quantum
    resume_max: int = DEFAULTS.resume_max
    promote_after: int = DEFAULTS.promote_after
    queue_max: int = DEFAULTS.queue_max
    park_ram_bytes: int | None = None

    def __attrs_post_init__(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("cells", "slots", "block_min", "first_block", "quantum", "resume_max")
        }
        sizes |= {"promote_after": self.promote_after, "queue_max": self.queue_max}
        problems = [f"{name} must be positive, not {n}" for name, n in sizes.items() if n < 1]
        if not 0 <= self.kept_free < self.cells:
            problems.append(f"headroom {self.kept_free} must lie below cells, {self.cells}")
        if self.policy not in POLICIES:
            problems.append(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if problems:
            raise ConfigFault(problems)

    @property
    def kept_free(self) -> Cells:
        """The headroom in force."""
        return Cells(self.slots if self.headroom is None else self.headroom)

    def settings(self) -> c.Settings:
        """What the ledger is told."""
        return c.Settings(
            policy=self.policy,
            block_min=self.block_min,
            first_block=self.first_block,
            quantum=self.quantum,
            resume_max=self.resume_max,
            promote_after=self.promote_after,
            queue_max=self.queue_max,
            park_ram_bytes=self.park_ram_bytes,
        )


@final
class SchedulerHandle:
    """A running scheduler: lease cells from it, and look at it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @asynccontextmanager
    async def lease(
        self, *, prompt: int, cap: int | None = None, pausable: bool = True
    ) -> AsyncGenerator[Lease]:
        """Wait for a slot and cells, hold them for the length of the block, give all back.

        ``prompt`` is the exact number of cells that the prompt takes, ``cap`` the most tokens
        that may follow. A lease that is not ``pausable`` is never asked to park; everything
        that it may use is charged at once. However the block is left, the host's cells must
        be out of use then: the slot goes to the next one.

            async with handle.lease(prompt=120, cap=900) as lease:
                generated = 0
                while model.goes_on():
                    if generated == lease.room:
                        match await lease.extend(generated):
                            case kvalet.Parking():
                                lease.freed(saved_bytes=await model.move_out())
                                resumed = await lease.wait_resumed()
                                await model.move_in(resumed.slot)
                            case kvalet.Ended():
                                return
                    await model.decode_one()
                    generated += 1
                lease.finish(generated)

        Raises ClientFault, with the figures needed and available, for what can never be
        lent; ServerFault once the scheduler has ended; JournalFault when the disk refuses.
        """
        check_request(prompt, cap)
        if not self._desk.is_open:
            raise ServerFault("the scheduler has ended", status=503, code="scheduler_ended")
        line = Line(self._desk, self._desk.ledger.open_mailbox())
        try:
            yield Lease(line, prompt, cap, await arrive(line, prompt, cap, pausable))
        finally:
            line.leave()

    @property
    def house(self) -> House:
        """The whole state, as one immutable value."""
        return self._desk.ledger.house

    def status(self) -> dict[str, Any]:
        """The status document, as ``GET /kvalet/status`` has it. Ages are seconds."""
        ledger = self._desk.ledger
        return {
            "version": version("kvalet"),
            **status(ledger.house, ledger.now_ns()),
            "journal": {"path": str(ledger.journal.path), "seq": ledger.journal.seq},
        }


async def run_scheduler(
    config: SchedulerConfig,
    *,
    task_status: trio.TaskStatus[SchedulerHandle] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Lend out the cells of a pool until cancelled. Start it in a nursery you own.

        handle = await nursery.start(
            kvalet.run_scheduler, kvalet.SchedulerConfig(cells=8192, slots=4, journal=path)
        )

    When cancelled it waits a second for leases to be given back; what is held even then is
    closed in the journal and hears ServerFault. Raises JournalFault or EnvironmentFault when
    the journal cannot be used.
    """
    journal, house, torn = open_journal(config.journal, header_of(config))
    try:
        ledger = Ledger(journal, house, wall_clock)
        desk = Desk(ledger)
        generation = house.server.generation + 1
        ledger.decide(opening(config, generation, torn))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run_sync)
            # Leases are decided at once; this only hears a disk that fails in the background.
            nursery.start_soon(ledger.run)
            try:
                task_status.started(SchedulerHandle(desk))
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(LAST_WORDS_S):
                    await ledger.wait_for(lambda house: not house.leases)
                desk.close(generation)
    finally:
        journal.close()


def wall_clock() -> Nanos:
    """Nanoseconds since 1970."""
    return Nanos(time.time_ns())


def header_of(config: SchedulerConfig) -> Header:
    """Line 1 of the journal."""
    plain = attrs.asdict(config)
    return Header(
        schema=SCHEMA,
        versions={"kvalet": version("kvalet"), "trio": version("trio")},
        config={**plain, "journal": str(config.journal)},
    )


def opening(config: SchedulerConfig, generation: int, torn_bytes: int) -> list[c.Command]:
    """The commands that open the pool: the host itself is the server that is ready."""
    return [
        c.OpenHouse(settings=config.settings(), torn_bytes=torn_bytes),
        c.ReadySeen(
            generation=generation,
            url="",
            build=SURFACE,
            model="",
            cells=Cells(config.cells),
            slots=config.slots,
            headroom=config.kept_free,
        ),
        c.ProbeSeen(generation=generation, method="save", detail="the host moves its own cells"),
    ]
