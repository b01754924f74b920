"""A little world for the decision core: chats decode a token a tick, real cells are counted.

It plays the shells' part honestly (legs end at their credit, parks and erases take ticks,
slots are seen idle later), counts what is really resident in a pool that behaves like
llama-server's, and checks the promises after every command.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.state import House
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId, Seq, SlotId
from kvalet.protocol.journal import Decision
from tests.decisions import promises

TICK_NS = 1_000_000
OVER = ("done", "gone")
LOST = ("lost", "server-lost")


@dataclass
class Chat:
    """What the world knows of one chat; ``target`` tokens are what its model would say.

    ``leave_on`` is the kind of event at whose very moment its client leaves.
    """

    request: RequestId
    prompt: int
    target: int
    cap: int | None
    seats: int = 1
    generated: int = 0
    state: str = "arrived"
    credit: int = 0
    leg_start: int = 0
    legs: int = 0
    slots: tuple[SlotId, ...] = ()
    erasing: int = 0
    outcome: str = ""
    parked_ticks: int = 0
    leave_on: type[e.AnyEvent] | None = None

    @property
    def cells(self) -> int:
        """Cells it really occupies while it holds its slots."""
        return self.seats * (self.prompt + self.generated)


@dataclass
class World:
    """Drives ``take`` with commands and plays the events back onto its chats.

    With a ``seed`` the delays are drawn, legs are stuck now and then and some restored
    cells are missed; without one everything takes a tick or two and goes well.
    """

    cells: int = 2048
    slots: int = 4
    headroom: int = 4
    settings: c.Settings = field(default_factory=c.Settings)
    seed: int | None = None
    house: House = field(default_factory=House)
    chats: dict[RequestId, Chat] = field(default_factory=dict[RequestId, Chat])
    log: list[e.AnyEvent] = field(default_factory=list[e.AnyEvent])
    decisions: list[Decision] = field(default_factory=list[Decision])
    resident: dict[SlotId, int] = field(default_factory=dict[SlotId, int])
    winding_down: set[SlotId] = field(default_factory=set[SlotId])
    purges: int = 0
    now: int = 0
    generation: int = 0
    laws: promises.Laws = field(default_factory=promises.Laws)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._unheard: deque[e.AnyEvent] = deque()
        self._hearing = False

    # -- commands ----------------------------------------------------------------------

    def open(self, method: str = "save") -> World:
        """A process takes the journal over and a server comes up."""
        self.tell(c.OpenHouse(settings=self.settings))
        self.launch(method)
        return self

    def launch(self, method: str = "save") -> None:
        """A fresh server becomes ready."""
        self.generation += 1
        self.resident = {}
        self.tell(c.LaunchPlanned(generation=self.generation, argv=("llama-server",)))
        self.tell(c.SpawnSeen(generation=self.generation, pid=1, url="http://127.0.0.1:1"))
        self.tell(
            c.ReadySeen(
                generation=self.generation,
                url="http://127.0.0.1:1",
                build="b1",
                model="m",
                cells=Cells(self.cells),
                slots=self.slots,
                headroom=Cells(self.headroom),
            )
        )
        self.tell(c.ProbeSeen(generation=self.generation, method=method))

    def crash(self) -> None:
        """The server dies: every lease is closed before anything else is decided."""
        self.tell(c.ExitSeen(generation=self.generation, code=-9, planned=False))
        assert promises.is_empty(self.house)
        self._later.clear()
        self.resident, self.winding_down = {}, set()

    def reopen(self) -> None:
        """kvalet itself dies and starts again over its journal."""
        self._later.clear()
        self.resident, self.winding_down = {}, set()
        self.generation = 0
        self.tell(c.OpenHouse(settings=self.settings))
        assert promises.is_empty(self.house)
        self.launch()

    def tell(self, command: c.Command) -> list[e.AnyEvent]:
        """Decide one command, check every promise, play its events back."""
        at = Nanos(self.now * TICK_NS)
        before = self.house
        events, self.house = take(before, command, at)
        seq = Seq(len(self.decisions) + 1)
        self.decisions.append(Decision(seq=seq, at_ns=at, command=command, events=events))
        assert fold(before, events, at) == self.house
        if not events:
            assert self.house is before
        promises.check_house(self.house)
        promises.check_victims(before, events)
        self.laws.after(before, events, self.house)
        self.log.extend(events)
        self._play(events)
        return events

    def arrive(
        self,
        prompt: int,
        target: int,
        cap: int | None = None,
        *,
        pausable: bool = True,
        seats: int = 1,
        park_every: int = 0,
        leave_on: type[e.AnyEvent] | None = None,
    ) -> Chat:
        """A request comes in; its prompt is counted at once, or a little later with a seed."""
        name = RequestId(f"r{len(self.chats) + 1}")
        chat = Chat(name, prompt, target, cap, seats, leave_on=leave_on)
        self.chats[name] = chat
        self.tell(
            c.Arrive(
                request=name,
                surface="openai.chat",
                streaming=True,
                cap=cap,
                pausable=pausable,
                seats=seats,
                park_every=park_every,
            )
        )
        counted = c.PromptCounted(request=name, prompt=Cells(prompt))
        if self.seed is None:
            self.tell(counted)
        else:
            self._in(self._rng.randrange(3), lambda: self._tell_of(chat, counted))
        return chat

    def leave(self, chat: Chat) -> None:
        """The chat's client goes away."""
        if chat.state not in OVER:
            chat.state, chat.outcome = "gone", "left"
            self.tell(c.Leave(request=chat.request))

    # -- time --------------------------------------------------------------------------

    def tick(self) -> None:
        """One decode step of all running chats, then what has come due."""
        self.now += 1
        for chat in list(self.chats.values()):
            chat.parked_ticks += chat.state == "parked"
            if chat.state == "running":
                self._decode(chat)
        self._weigh()
        due = [act for at, act in self._later if at <= self.now]
        self._later = [entry for entry in self._later if entry[0] > self.now]
        for act in due:
            act()

    def run(self, ticks_max: int = 100_000) -> World:
        """Tick until every chat is over and every slot is seen idle."""
        while self._later or any(chat.state not in OVER for chat in self.chats.values()):
            self.tick()
            assert self.now < ticks_max, self._standstill()
        return self

    def _standstill(self) -> str:
        chats = [(x.request, x.state, x.generated) for x in self.chats.values()]
        return f"nothing moves: {chats}, waiting {self.house.waiting}"

    def _in(self, ticks: int, act: Callable[[], None]) -> None:
        self._later.append((self.now + ticks, act))

    def _soon(self, ticks: int) -> int:
        return ticks if self.seed is None else self._rng.randrange(1, 4)

    def _tell_of(self, chat: Chat, command: c.Command) -> None:
        if chat.state not in OVER:
            self.tell(command)

    # -- decoding ----------------------------------------------------------------------

    def _decode(self, chat: Chat) -> None:
        chat.generated += 1
        chat.credit -= chat.seats
        self.resident[chat.slots[0]] = chat.cells
        if chat.generated >= min(chat.target, chat.cap or chat.target):
            self._finish(chat, "stop")
        elif chat.credit < chat.seats:
            self._spend(chat)

    def _spend(self, chat: Chat) -> None:
        stuck = self.seed is not None and self._rng.random() < 0.05
        if stuck:
            chat.generated = chat.leg_start
        chat.state = "waiting"
        self.tell(
            c.CreditSpent(
                request=chat.request,
                cells=Cells(chat.cells),
                generated=chat.generated,
                stuck=stuck,
            )
        )

    def _finish(self, chat: Chat, reason: str) -> None:
        chat.state, chat.outcome = "done", "finished"
        self.tell(
            c.AnswerEnded(
                request=chat.request,
                reason=reason,
                cells=Cells(chat.cells),
                generated=chat.generated,
            )
        )

    def _weigh(self) -> None:
        """Nothing overflows: whoever holds a slot fits, and the server purges idle ones."""
        working = self.winding_down | set(self.house.holders)
        held = sum(self.resident.get(slot, 0) for slot in working)
        assert held <= self.cells - self.headroom, "the pool overflows"
        for slot in sorted(set(self.resident) - working):
            if sum(self.resident.values()) > self.cells:
                self.purges += 1
                del self.resident[slot]

    # -- what the shells do on events --------------------------------------------------

    def _play(self, events: list[e.AnyEvent]) -> None:
        self._unheard.extend(events)
        if self._hearing:
            return
        self._hearing = True
        while self._unheard:
            event = self._unheard.popleft()
            self._hear(event)
            chat = self.chats.get(getattr(event, "request", RequestId("")))
            if chat is not None and chat.leave_on is type(event):
                self.leave(chat)
        self._hearing = False

    def _hear(self, event: e.AnyEvent) -> None:
        match event:
            case e.LeaseGranted() | e.LeaseExtended() | e.LeaseResumed():
                self._start_leg(self.chats[event.request], event)
            case e.LeaseParking():
                self._park(self.chats[event.request], event)
            case e.LeaseParked():
                self._become(self.chats[event.request], "parked")
            case e.LeaseRefused():
                chat = self.chats[event.request]
                chat.state, chat.outcome = "done", event.code
            case e.LeaseEnded():
                self._end(self.chats[event.request], event)
            case _:
                pass

    @staticmethod
    def _become(chat: Chat, state: str) -> None:
        if chat.state not in OVER:
            chat.state = state

    def _start_leg(
        self, chat: Chat, event: e.LeaseGranted | e.LeaseExtended | e.LeaseResumed
    ) -> None:
        if chat.state in OVER:
            return
        if not isinstance(event, e.LeaseExtended):
            chat.slots = event.slots
            for slot in event.slots:
                assert slot not in self.winding_down, "a slot is given away before it is idle"
                self.resident.pop(slot, None)
        chat.credit, chat.leg_start = event.credit, chat.generated
        chat.legs += 1
        chat.erasing = len(event.erase)
        chat.state = "erasing"
        for slot in event.erase:
            self._in(self._soon(1), partial(self._erase, chat, slot))
        if not event.erase:
            self._go(chat)
        if isinstance(event, e.LeaseResumed):
            self._in(1, lambda: self._compare(chat))

    def _erase(self, chat: Chat, slot: SlotId) -> None:
        if chat.state in OVER:
            return
        assert slot not in self.house.holders, "an erase hits a slot that has a holder"
        self.tell(c.SlotErased(slot=slot, cells=Cells(self.resident.pop(slot, 0))))
        chat.erasing -= 1
        if not chat.erasing:
            self._go(chat)

    def _go(self, chat: Chat) -> None:
        chat.state = "running"
        self.resident[chat.slots[0]] = chat.cells

    def _compare(self, chat: Chat) -> None:
        expected = chat.cells - 1
        reused = expected
        if self.seed is not None and self._rng.random() < 0.2:
            reused = self._rng.randrange(expected + 1)
        self._tell_of(
            chat,
            c.CacheSeen(request=chat.request, expected=Cells(expected), reused=Cells(reused)),
        )

    def _park(self, chat: Chat, event: e.LeaseParking) -> None:
        self._become(chat, "parking")

        def free() -> None:
            if chat.state in OVER:
                return
            self.resident.pop(chat.slots[0], None)
            self.tell(
                c.CellsFreed(
                    request=chat.request,
                    method="save" if event.save else "recompute",
                    cells=event.cells,
                    saved_bytes=event.cells * 100 if event.save else 0,
                )
            )

        self._in(self._soon(2), free)

    def _end(self, chat: Chat, event: e.LeaseEnded) -> None:
        chat.outcome = chat.outcome or event.reason
        if chat.state != "gone":
            chat.state = "done"
        if not event.slots or event.reason in LOST:
            return
        residue = Cells(0 if event.aborted or chat.seats > 1 else event.cells)

        self.winding_down |= set(event.slots)

        def seen() -> None:
            self.winding_down -= set(event.slots)
            self.resident.pop(event.slots[0], None)
            if residue:
                self.resident[event.slots[0]] = residue
            self.tell(c.SlotSeen(request=event.request, residue=residue))

        self._in(self._soon(1), seen)
