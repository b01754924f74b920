"""Everything between the HTTP door and a scripted server, in one process on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import attrs
import h11
import msgspec
import trio

from kvalet.actors import slots
from kvalet.actors.app import open_front
from kvalet.actors.config import Config
from kvalet.actors.decisions.state import House, recount
from kvalet.actors.front import Front
from kvalet.actors.gate import Gate
from kvalet.actors.http_exchange import ClientGone, Exchange, Outlet, Request, error_body
from kvalet.actors.journal import open_journal
from kvalet.actors.ledger import Ledger
from kvalet.actors.server import Server
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol import commands as c
from kvalet.protocol.errors import KvaletError, first_fault
from kvalet.protocol.ids import Cells, Nanos
from kvalet.protocol.journal import SCHEMA, Header
from kvalet.testing import assert_replays
from tests.actors.scripted import SEAT, Json, ScriptedServer, Slot

HEADER = Header(schema=SCHEMA, versions={}, config={})
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PATIENCE_S = 200_000.0
HEADROOM = 4


class Paper(Outlet):
    """Takes what is written. While ``reads`` is unset its client takes half a write only."""

    def __init__(self) -> None:
        self.life = trio.CancelScope()
        self.writing = False
        self.torn = False
        self.wire = bytearray()
        self.reads = trio.Event()
        self.reads.set()
        self._waiting = trio.lowlevel.ParkingLot()

    async def write(self, wire_bytes: bytes) -> None:
        while self.writing:
            await self._waiting.park()
        if self.torn:
            raise ClientGone("the answer was cut")
        self.writing = True
        half = 0
        try:
            await trio.lowlevel.checkpoint()
            if not self.reads.is_set():
                half = len(wire_bytes) // 2
                self.wire += wire_bytes[:half]
                self.torn = True
                await self.reads.wait()
                self.torn = False
            self.wire += wire_bytes[half:]
        finally:
            self.writing = False
            if self._waiting:
                self._waiting.unpark()

    def reset_on_close(self) -> None:
        self.torn = True


@attrs.define(eq=False)
class Guest:
    """One client: what it was sent, split into what a client sees."""

    exchange: Exchange
    paper: Paper
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    done: bool = False

    @property
    def status(self) -> int:
        return int(self.paper.wire[9:12] or b"0")

    @property
    def body(self) -> bytes:
        head, _, rest = bytes(self.paper.wire).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            number = int(size, 16)
            if number and len(rest) < number + 2:
                return body + rest[:number]
            body, rest = body + rest[:number], rest[number + 2 :]
        return body

    @property
    def whole(self) -> bool:
        """Whether the answer was framed to its end."""
        return self.exchange.complete

    @property
    def events(self) -> list[bytes]:
        """Blocks between blank lines."""
        return [block for block in self.body.split(b"\n\n") if block]

    @property
    def comments(self) -> list[bytes]:
        return [block for block in self.events if block.startswith(b":")]

    @property
    def chunks(self) -> list[Json]:
        blocks = [block for block in self.events if block.startswith(b"data: {")]
        return [msgspec.json.decode(block[6:]) for block in blocks]

    @property
    def errors(self) -> list[Json]:
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]

    @property
    def ended_well(self) -> bool:
        return self.events[-1:] == [b"data: [DONE]"]

    def spoken(self, name: str) -> str:
        """All texts of one name, put together."""
        if not self.body:
            return ""
        if b"text/event-stream" not in self.paper.wire.partition(b"\r\n\r\n")[0]:
            return str(msgspec.json.decode(self.body)["choices"][0]["message"].get(name, ""))
        said: list[str] = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", []):
                piece = choice.get("delta", choice)
                said.append(piece.get(name) or "")
        return "".join(said)

    @property
    def content(self) -> str:
        return self.spoken("content") or self.spoken("text")

    def check_ended_once(self) -> None:
        """One terminal outcome: a whole answer, or one error, and nothing after it."""
        assert self.done
        if self.status != 200:
            return
        assert len(self.errors) + self.events.count(b"data: [DONE]") == 1, self.events[-4:]
        if self.errors:
            assert b'"error"' in self.events[-1], self.events[-4:]
        else:
            assert self.ended_well
        assert self.whole


@attrs.define(eq=False)
class Stage:
    """The ledger, the front and the server, and who visits them."""

    nursery: trio.Nursery
    server: ScriptedServer
    ledger: Ledger
    upstream: UpstreamClient
    front: Front
    guests: list[Guest] = attrs.field(factory=list[Guest])

    def invite(
        self,
        fields: Json | None = None,
        *,
        path: str = CHAT,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        target: str = "",
    ) -> Guest:
        """Begin one request in a task of its own."""
        if body is None:
            body = msgspec.json.encode(fields) if fields is not None else b""
        raw, _, query = path.partition("?")
        request = Request(
            method=method,
            target=target or path,
            path=raw,
            query=dict(parse_qsl(query)),
            headers=headers or {},
            body=body,
            peer="test",
        )
        wire = h11.Connection(h11.SERVER)
        wire.receive_data(f"{method} / HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        while wire.next_event() is not h11.NEED_DATA and wire.their_state is not h11.DONE:
            pass
        paper = Paper()
        exchange = Exchange(request, wire=wire, outlet=paper, draining=trio.Event())
        guest = Guest(exchange, paper)
        self.guests.append(guest)
        self.nursery.start_soon(self._serve, guest)
        return guest

    async def _serve(self, guest: Guest) -> None:
        fault: KvaletError | None = None
        with guest.scope:
            try:
                await self.front(guest.exchange)
            except* ClientGone:
                pass
            except* KvaletError as group:
                fault = first_fault(group)
            if fault is not None:
                assert not guest.exchange.started, f"{fault!r} in a stream that has begun"
                await guest.exchange.respond(fault.status_hint, {}, error_body(fault))
        guest.done = True

    async def all_gone(self) -> None:
        """Return when every guest's task is over and every lease is given back."""
        with trio.fail_after(PATIENCE_S):
            await until(lambda: all(guest.done for guest in self.guests))
            await self.ledger.wait_for(lambda house: not house.leases)
            await until(lambda: not any(slot.busy for slot in self.server.slots))

    def check_empty(self) -> None:
        """Nothing of anybody is left."""
        house = self.ledger.house
        assert recount(house) == house
        assert (house.granted_total, house.saved_bytes, house.coming) == (0, 0, 0)
        assert (house.queue, house.waiting, house.parked, house.holders) == ((), (), (), {})
        assert house.erasing == {}
        assert self.mailboxes == 0
        assert list(self.server.slot_dir.iterdir()) == []
        assert self.server.broken_rules == [], self.server.broken_rules

    @property
    def mailboxes(self) -> int:
        return len(self.ledger._mailboxes)  # pyright: ignore[reportPrivateUsage]

    @property
    def house(self) -> House:
        return self.ledger.house


async def until(condition: Callable[[], bool], every_s: float = 0.05) -> None:
    """Look again and again: what is waited for has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(every_s)


def chat(text: str = "hi", **more: Any) -> Json:
    return {"messages": [{"role": "user", "content": text}], "stream": True, **more}


def text_of(text: str = "once", **more: Any) -> Json:
    return {"prompt": text + SEAT, "stream": True, **more}


@asynccontextmanager
async def stage(
    directory: Path,
    *,
    cells: int = 400,
    seats: int = 3,
    method: str = "save",
    debug: bool = False,
    keys: tuple[str, ...] = (),
    ready: bool = True,
    **settings: Any,
) -> AsyncGenerator[Stage]:
    """A pool of ``cells`` cells, ``HEADROOM`` of them kept free, in small blocks."""
    saved = directory / "saved"
    saved.mkdir(parents=True)
    sizes: dict[str, Any] = {"block_min": 4, "first_block": 8, "quantum": 8, **settings}
    journal, house, _ = open_journal(directory / "journal.jsonl", HEADER)
    ledger = Ledger(journal, house, lambda: Nanos(int(trio.current_time() * 1e9)))
    async with trio.open_nursery() as nursery:
        server = ScriptedServer(nursery, saved, cells, [Slot() for _ in range(seats)])
        upstream = UpstreamClient(
            Server(url="http://127.0.0.1:9", api_key="upstream-key", slot_dir=saved), server
        )
        gate = Gate(upstream)
        config = Config(attach="http://127.0.0.1:9", debug=debug)
        it = Stage(
            nursery, server, ledger, upstream, open_front(config, keys, ledger, gate, trio.Event())
        )
        async with upstream:
            nursery.start_soon(ledger.run)
            nursery.start_soon(slots.run, upstream, ledger.tap(65_536), ledger.tell)
            ledger.decide([c.OpenHouse(settings=c.Settings(**sizes))])
            if ready:
                ledger.decide(opening(cells, seats, method))
            yield it
            nursery.cancel_scope.cancel()
    journal.close()
    assert_replays(directory / "journal.jsonl")


def opening(cells: int, seats: int, method: str) -> list[c.Command]:
    return [
        c.ReadySeen(
            generation=1,
            url="http://127.0.0.1:9",
            build="b1",
            model="m",
            cells=Cells(cells),
            slots=seats,
            headroom=Cells(HEADROOM),
        ),
        c.ProbeSeen(generation=1, method=method),
    ]
