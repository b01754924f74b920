"""A little world for the decision core: chats decode a token a tick, the pool is counted.

It plays the shells' part honestly (legs end at their credit, parks take ticks, slots are
seen idle later) and checks the promises after every command.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.evolve import fold
from kvalet.actors.decisions.state import HOLDING, PARKED, House, recount
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos, RequestId


@dataclass
class Chat:
    """What the world knows of one chat; ``target`` tokens are what its model would say."""

    request: RequestId
    prompt: int
    target: int
    cap: int | None
    generated: int = 0
    state: str = "arrived"
    credit: int = 0
    ticks: int = 0
    outcome: str = ""
    parked_ticks: int = 0


@dataclass
class World:
    """Drives ``take`` with commands and plays the events back onto its chats."""

    cells: int = 2048
    slots: int = 4
    headroom: int = 4
    settings: c.Settings = field(default_factory=c.Settings)
    seed: int = 0
    house: House = field(default_factory=House)
    chats: dict[str, Chat] = field(default_factory=dict[str, Chat])
    log: list[e.AnyEvent] = field(default_factory=list[e.AnyEvent])
    commands: list[tuple[int, c.Command]] = field(default_factory=list[tuple[int, c.Command]])
    now: int = 0
    later: list[tuple[int, c.Command]] = field(default_factory=list[tuple[int, c.Command]])

    def open(self, method: str = "save") -> World:
        self.tell(c.OpenHouse(settings=self.settings))
        self.tell(
            c.ReadySeen(
                generation=1,
                url="http://127.0.0.1:1",
                build="b1",
                model="m",
                cells=Cells(self.cells),
                slots=self.slots,
                headroom=Cells(self.headroom),
            )
        )
        self.tell(c.ProbeSeen(generation=1, method=method))
        return self

    def tell(self, command: c.Command) -> list[e.AnyEvent]:
        at = Nanos(self.now * 1_000_000)
        self.commands.append((at, command))
        before = self.house
        events, self.house = take(before, command, at)
        assert fold(before, events, at) == self.house
        self.check()
        self.log.extend(events)
        for event in events:
            self._hear(event)
        return events

    def check(self) -> None:
        house = self.house
        assert recount(house) == house
        assert 0 <= house.granted_total <= max(0, house.limit)
        assert house.residue_total >= 0
        seen: set[int] = set()
        for lease in house.leases.values():
            assert lease.granted >= 0
            if lease.state in HOLDING:
                assert not seen & set(lease.slots), "a slot has one holder"
                seen |= set(lease.slots)
                if lease.pausable:
                    assert lease.cells <= lease.granted or lease.state == "closing"
        totals = house.totals
        parked = sum(lease.state == PARKED for lease in house.leases.values())
        assert totals.parks == totals.resumes + parked + totals.ended_parked

    def arrive(self, prompt: int, target: int, cap: int | None = None, **more: object) -> Chat:
        name = RequestId(f"r{len(self.chats) + 1}")
        chat = Chat(name, prompt, target, cap)
        self.chats[name] = chat
        self.tell(
            c.Arrive(request=name, surface="openai.chat", streaming=True, cap=cap, **more)  # type: ignore[arg-type]
        )
        if name in self.house.leases:
            self.tell(c.PromptCounted(request=name, prompt=Cells(prompt)))
        return chat

    def leave(self, chat: Chat) -> None:
        chat.state, chat.outcome = "gone", chat.outcome or "left"
        self.tell(c.Leave(request=chat.request))

    def tick(self) -> None:
        """One decode step of all running chats, then what has come due."""
        self.now += 1
        for chat in list(self.chats.values()):
            chat.parked_ticks += chat.state == "parked"
            if chat.state == "running":
                self._decode(chat)
        due, self.later = (
            [x for x in self.later if x[0] <= self.now],
            [x for x in self.later if x[0] > self.now],
        )
        for _, command in due:
            self.tell(command)

    def _decode(self, chat: Chat) -> None:
        chat.ticks += 1
        chat.generated += 1
        chat.credit -= 1
        cells = Cells(chat.prompt + chat.generated)
        if chat.generated >= min(chat.target, chat.cap or chat.target):
            chat.state, chat.outcome = "done", "finished"
            self.tell(
                c.AnswerEnded(
                    request=chat.request, reason="stop", cells=cells, generated=chat.generated
                )
            )
        elif chat.credit <= 0:
            chat.state = "waiting"
            self.tell(c.CreditSpent(request=chat.request, cells=cells, generated=chat.generated))

    def _hear(self, event: e.AnyEvent) -> None:
        match event:
            case e.LeaseGranted() | e.LeaseExtended() | e.LeaseResumed():
                chat = self.chats[event.request]
                chat.state, chat.credit = "running", event.credit
            case e.LeaseParking():
                chat = self.chats[event.request]
                chat.state = "parking"
                freed = c.CellsFreed(
                    request=event.request,
                    method="save" if event.save else "recompute",
                    cells=event.cells,
                    saved_bytes=event.cells * 100 if event.save else 0,
                )
                self.later.append((self.now + 2, freed))
            case e.LeaseParked():
                self.chats[event.request].state = "parked"
            case e.LeaseRefused():
                self.chats[event.request].outcome = event.code
                self.chats[event.request].state = "done"
            case e.LeaseEnded():
                chat = self.chats[event.request]
                chat.outcome = chat.outcome or event.reason
                chat.state = "done"
                if event.slots and event.reason not in ("lost", "server-lost"):
                    seen = c.SlotSeen(
                        request=event.request,
                        residue=Cells(0 if event.aborted else event.cells),
                    )
                    self.later.append((self.now + 1, seen))
            case _:
                pass

    def run(self, ticks_max: int = 100_000) -> None:
        while any(chat.state not in ("done", "gone") for chat in self.chats.values()) or self.later:
            self.tick()
            assert self.now < ticks_max, self.stuck()

    def stuck(self) -> str:
        return f"nothing moves: {[(x.request, x.state, x.generated) for x in self.chats.values()]}"

    def random_leavers(self, rng: random.Random, chance: float) -> None:
        for chat in self.chats.values():
            if chat.state not in ("done", "gone") and rng.random() < chance:
                self.leave(chat)
