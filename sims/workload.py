"""A small world that keeps the decision core busy; what it told the core is a recording.

It plays the shells' part: legs end at their credit, cells move in and out in their time,
slots are seen idle a little later, some clients leave. The same seed gives the same commands.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial

import attrs

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.state import HOLDING, House
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, SlotId

Recording = list[tuple[Nanos, c.Command]]

CELLS_PER_SLOT = 240
CHATS_PER_SLOT = 1.5
"""More people than seats, and more to say than cells: all the lines are in use."""
LEAVERS = 0.03
BYTES_PER_CELL = 18_000

MS = 1_000_000
TOKEN_NS = 10 * MS
MOVE_NS = 40 * MS
IDLE_NS = 5 * MS
COUNT_NS = 2 * MS
READING_NS = 5_000 * MS


@attrs.define
class _Chat:
    """One chat; ``target`` tokens are what its model would say, ``generated`` what it said."""

    request: RequestId
    prompt: int
    target: int
    generated: int = 0
    credit: int = 0

    @property
    def cells(self) -> Cells:
        return Cells(self.prompt + self.generated)


class _World:
    def __init__(self, slots: int, seed: int) -> None:
        self.recording: Recording = []
        self._slots = slots
        self._random = random.Random(seed)
        self._house = House()
        self._chats: dict[RequestId, _Chat] = {}
        self._now = 0
        self._number = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []

    def open(self) -> None:
        """Start the server and let the first people in."""
        self._tell(c.OpenHouse(settings=c.Settings()))
        self._tell(
            c.ReadySeen(
                generation=1,
                url="http://127.0.0.1:1",
                build="b1",
                model="m",
                cells=Cells(self._slots * CELLS_PER_SLOT),
                slots=self._slots,
                headroom=Cells(self._slots),
            )
        )
        self._tell(c.ProbeSeen(generation=1, method="save"))
        for _ in range(round(self._slots * CHATS_PER_SLOT)):
            self._later(self._random.randrange(1_000 * MS), self._welcome)
        self._later(READING_NS, self._read_slots)

    def step(self) -> None:
        """Do what is due next."""
        self._now, _, act = heapq.heappop(self._agenda)
        act()

    def _later(self, delay_ns: int, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (self._now + delay_ns, self._number, act))

    def _tell_later(self, delay_ns: int, command: c.Command) -> None:
        self._later(delay_ns, partial(self._tell, command))

    def _tell(self, command: c.Command) -> None:
        at_ns = Nanos(self._now)
        self.recording.append((at_ns, command))
        events, self._house = take(self._house, command, at_ns)
        for event in events:
            self._hear(event)

    def _welcome(self) -> None:
        draw = self._random
        request = RequestId(f"r{self._house.totals.requests + 1}")
        chat = _Chat(request, prompt=draw.randint(10, 200), target=draw.randint(20, 500))
        self._chats[request] = chat
        cap = chat.target + draw.randint(0, 200) if draw.random() < 0.5 else None
        self._tell(c.Arrive(request=request, surface="openai.chat", streaming=True, cap=cap))
        self._tell_later(COUNT_NS, c.PromptCounted(request=request, prompt=Cells(chat.prompt)))
        if draw.random() < LEAVERS:
            self._later(draw.randrange(chat.target) * TOKEN_NS, partial(self._leave, chat))

    def _leave(self, chat: _Chat) -> None:
        if chat.request in self._chats:
            self._tell(c.Leave(request=chat.request))

    def _read_slots(self) -> None:
        held = [lease for lease in self._house.leases.values() if lease.state in HOLDING]
        reading = tuple((slot, lease.cells, True) for lease in held for slot in lease.slots)
        self._tell(c.PressureRead(slots=reading))
        self._later(READING_NS, self._read_slots)

    def _hear(self, event: e.AnyEvent) -> None:
        match event:
            case e.LeaseGranted() | e.LeaseExtended():
                self._erase(event.erase)
                self._begin_leg(event.request, event.credit, 0)
            case e.LeaseResumed():
                chat = self._chats[event.request]
                self._erase(event.erase)
                whole = Cells(chat.cells - 1)
                self._tell_later(
                    MOVE_NS, c.CacheSeen(request=event.request, expected=whole, reused=whole)
                )
                self._begin_leg(event.request, event.credit, MOVE_NS)
            case e.LeaseParking():
                freed = c.CellsFreed(
                    request=event.request,
                    method="save",
                    cells=event.cells,
                    saved_bytes=event.cells * BYTES_PER_CELL,
                )
                self._tell_later(MOVE_NS, freed)
            case e.LeaseRefused():
                self._replace(event.request)
            case e.LeaseEnded():
                self._replace(event.request)
                if event.slots:
                    residue = Cells(0 if event.aborted else event.cells)
                    self._tell_later(IDLE_NS, c.SlotSeen(request=event.request, residue=residue))
            case _:
                pass

    def _erase(self, slots: tuple[SlotId, ...]) -> None:
        for slot in slots:
            self._tell_later(COUNT_NS, c.SlotErased(slot=slot, cells=Cells(0)))

    def _begin_leg(self, request: RequestId, credit: int, delay_ns: int) -> None:
        chat = self._chats[request]
        chat.credit = min(credit, chat.target - chat.generated)
        self._later(delay_ns + chat.credit * TOKEN_NS, partial(self._end_leg, chat))

    def _end_leg(self, chat: _Chat) -> None:
        if chat.request not in self._chats:
            return
        chat.generated += chat.credit
        request, cells, generated = chat.request, chat.cells, chat.generated
        if generated < chat.target:
            self._tell(c.CreditSpent(request=request, cells=cells, generated=generated))
        else:
            self._tell(
                c.AnswerEnded(request=request, reason="stop", cells=cells, generated=generated)
            )

    def _replace(self, request: RequestId) -> None:
        """Somebody is gone; the next one comes when their place has been swept."""
        del self._chats[request]
        self._later(2 * IDLE_NS, self._welcome)


def record(slots: int, commands: int, seed: int = 1) -> Recording:
    """The first ``commands`` commands, with their times, of a busy world with ``slots`` slots."""
    world = _World(slots, seed)
    world.open()
    while len(world.recording) < commands:
        world.step()
    return world.recording[:commands]
