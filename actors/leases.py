"""One embedded lease: what its holder says to the ledger, and what it hears back."""

from __future__ import annotations

from typing import Literal, final

import attrs
import trio

from kvalet.actors.ledger import Ledger, Mailbox
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.errors import ClientFault, JournalFault, KvaletError, ServerFault
from kvalet.protocol.ids import Cells, LeaseId, RequestId, SlotId

SURFACE = "embedded"


@final
@attrs.frozen
class Extended:
    """Go on: ``credit`` more cells may be used."""

    credit: int


@final
@attrs.frozen
class Parking:
    """Stop, move the lease's ``cells`` cells out of the pool, then call ``lease.freed``.

    ``save``: keep a copy to restore; otherwise the budget for copies is spent, so drop the
    cells and compute them again later.
    """

    cells: int
    save: bool


@final
@attrs.frozen
class Resumed:
    """Go on in ``slot`` with ``credit`` more cells. ``save``: the copy is to be restored."""

    slot: SlotId
    credit: int
    save: bool


@final
@attrs.frozen
class Ended:
    """The lease is over: ``length`` (its own cap) or ``context-full`` (it fills the pool)."""

    reason: str
    generated: int


class Desk:
    """The ledger as leases reach it. A command is decided at once, so leaving is synchronous.

    A closed desk takes nothing: the journal is shut, and its last word closed every lease.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.is_open = True

    def tell(self, *commands: c.Command) -> None:
        if self.is_open:
            self.ledger.decide(list(commands))

    def close(self, generation: int) -> None:
        self.tell(
            c.ExitSeen(generation=generation, code=0, planned=True, reason="the scheduler ended")
        )
        self.is_open = False


class Line:
    """One lease's line to the ledger, from its arrival until everything is given back."""

    def __init__(self, desk: Desk, mailbox: Mailbox) -> None:
        self.request = mailbox.request
        self.over = False
        self._desk = desk
        self._mailbox = mailbox

    def tell(self, *commands: c.Command) -> None:
        self._desk.tell(*commands)

    async def hear(self) -> e.AnyEvent:
        """The next event. Raises JournalFault or ServerFault when none can come any more."""
        try:
            event = await self._mailbox.events.receive()
        except trio.EndOfChannel:
            raise JournalFault(
                f"no decision can be taken any more: {self._desk.ledger.failure}"
            ) from None
        if isinstance(event, e.LeaseEnded):
            self.over = True
            if event.reason == "server-lost":
                raise ServerFault("the scheduler has ended", status=503, code="scheduler_ended")
        return event

    def leave(self) -> None:
        """The host is done with the lease: its cells are gone, so its slot is idle.

        Told without a look at what is held: the ledger knows, this side may not have heard.
        """
        last: list[c.Command] = [] if self.over else [c.Leave(request=self.request)]
        self.tell(*last, c.SlotSeen(request=self.request))
        self._desk.ledger.close_mailbox(self._mailbox)


@final
class Lease:
    """A slot and a credit of cells, held for the length of ``SchedulerHandle.lease``'s block.

    Use it from one task at a time. ``prompt`` and ``generated`` are the cells in use as last
    reported; those and ``credit`` more are the lease's own. A call that the lease's ``state``
    does not allow raises ClientFault (``wrong_state``).
    """

    def __init__(self, line: Line, prompt: int, cap: int | None, event: e.LeaseGranted) -> None:
        self.request: RequestId = line.request
        self.lease: LeaseId = event.lease
        self.slot: SlotId = event.slots[0]
        self.prompt = prompt
        self.cap = cap
        self.generated = 0
        self.granted: int = event.granted
        self.state: Literal["running", "parking", "parked", "ended"] = "running"
        self._line = line
        self._asked = False

    @property
    def cells(self) -> int:
        """Cells in use: prompt and generated."""
        return self.prompt + self.generated

    @property
    def room(self) -> int:
        """Tokens that may be generated in all before ``extend`` must be asked."""
        return self.granted - self.prompt if self.state == "running" else self.generated

    @property
    def credit(self) -> int:
        """Cells that may still be used, seen from the last report."""
        return self.room - self.generated

    async def extend(self, generated: int) -> Extended | Parking | Ended:
        """Ask for more cells, having ``generated`` tokens so far. Call it at the credit's end.

        Waits until there is an answer. A wait that is cancelled leaves the question standing:
        call again, with the same figure, to hear the answer; or leave the block.
        """
        self._require("running")
        if self._asked and generated != self.generated:
            raise ClientFault(
                f"{self.request} waits for cells at {self.generated} tokens, not at {generated}",
                code="wrong_state",
            )
        self._count(generated)
        if not self._asked:
            if self.cap is not None and generated >= self.cap:
                self.finish(generated, "length")
                return Ended("length", generated)
            self._asked = True
            self._line.tell(
                c.CreditSpent(request=self.request, cells=Cells(self.cells), generated=generated)
            )
        answer = await self._hear_answer()
        self._asked = False
        return answer

    async def _hear_answer(self) -> Extended | Parking | Ended:
        while True:
            match await self._line.hear():
                case e.LeaseExtended(granted=granted):
                    self.granted = granted
                    return Extended(self.credit)
                case e.LeaseParking(cells=cells, save=save):
                    self.state = "parking"
                    return Parking(cells, save)
                case e.LeaseEnded(reason=reason):
                    self.state = "ended"
                    return Ended(reason, self.generated)
                case _:
                    pass

    def freed(self, saved_bytes: int = 0) -> None:
        """After ``Parking``: the cells are out of the pool, the slot is empty.

        ``saved_bytes`` is what the copy takes; 0 means dropped, to be computed again.
        """
        self._require("parking")
        self.state = "parked"
        self.granted = 0
        self._line.tell(
            c.CellsFreed(
                request=self.request,
                method="save" if saved_bytes > 0 else "recompute",
                cells=Cells(self.cells),
                saved_bytes=max(0, saved_bytes),
            )
        )

    async def wait_resumed(self) -> Resumed:
        """After ``freed``: wait for a slot and room for the cells that were moved out."""
        self._require("parked")
        event = await self._line.hear()
        while not isinstance(event, e.LeaseResumed):
            event = await self._line.hear()
        self.state = "running"
        self.slot = event.slots[0]
        self.granted = event.granted
        save = event.method == "save"
        reused = Cells(self.cells if save else 0)
        self._line.tell(
            c.CacheSeen(request=self.request, expected=Cells(self.cells), reused=reused)
        )
        return Resumed(self.slot, self.credit, save)

    def finish(self, generated: int, reason: str = "stop") -> None:
        """The answer is complete; leave the block once its cells are no longer in use.

        A ``reason`` other than stop, length, tool_calls or finished is counted as a failure.
        """
        self._require("running")
        self._count(generated)
        self.state = "ended"
        self._line.over = True
        self._line.tell(
            c.AnswerEnded(
                request=self.request, reason=reason, cells=Cells(self.cells), generated=generated
            )
        )

    def _require(self, state: str) -> None:
        if self.state != state:
            raise ClientFault(
                f"{self.request} is {self.state}; this call is for a lease that is {state}",
                code="wrong_state",
            )

    def _count(self, generated: int) -> None:
        cells = self.prompt + generated
        if not self.generated <= generated or cells > self.granted:
            raise ClientFault(
                f"{self.request} says {generated} tokens after {self.generated}: "
                f"{cells} cells, where it was granted {self.granted}",
                code="overrun",
                fields={"cells": cells, "granted": self.granted},
            )
        self.generated = generated


def check_request(prompt: int, cap: int | None) -> None:
    """Raises ClientFault for figures that mean nothing."""
    if prompt < 0:
        raise ClientFault(f"prompt must not be negative, not {prompt}")
    if cap is not None and cap < 1:
        raise ClientFault(f"cap must be positive, not {cap}")


async def arrive(line: Line, prompt: int, cap: int | None, pausable: bool) -> e.LeaseGranted:
    """Take a place and wait for the grant. Raises what the ledger refuses with."""
    line.tell(
        c.Arrive(request=line.request, surface=SURFACE, streaming=True, cap=cap, pausable=pausable),
        c.PromptCounted(request=line.request, prompt=Cells(prompt)),
    )
    while True:
        match await line.hear():
            case e.LeaseGranted() as granted:
                return granted
            case e.LeaseRefused() as refused:
                line.over = True
                raise refusal(refused)
            case _:
                pass


def refusal(event: e.LeaseRefused) -> KvaletError:
    """The fault behind a refusal, with both figures."""
    needed, limit = event.needed, event.limit
    fields = {"needed": int(needed), "limit": int(limit)}
    match event.code:
        case "prompt_too_large":
            return ClientFault(
                f"the prompt needs {needed} cells, but the pool can lend {limit}",
                code=event.code,
                fields=fields,
            )
        case "queue_full":
            return ClientFault(
                f"{limit} leases are waited for already; this would be number {needed}",
                status=429,
                code=event.code,
                fields=fields,
            )
        case _:
            return ServerFault("the scheduler is not ready", status=503, code=event.code)
