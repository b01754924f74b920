"""kvalet before a server that plays scripts: every byte and every look at a slot has its second."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import httpx
import msgspec
import trio

from kvalet.actors import preemption, slots
from kvalet.actors.app import open_front
from kvalet.actors.config import Config
from kvalet.actors.gate import Gate
from kvalet.actors.journal import open_journal, read_journal
from kvalet.actors.ledger import Ledger
from kvalet.actors.server import Server
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, Nanos
from kvalet.testing import assert_replays
from tests.actors.stage import HEADER, TEXT, Guest, Stage, until

Json = dict[str, Any]
Event = TypeVar("Event")
URL = "http://127.0.0.1:9"
HOURS_S = 50_000.0
PREEMPTED, RESUMED = b": preempted\n\n", b": resumed\n\n"
KEEPALIVE = b": preempt-keepalive\n\n"


@attrs.frozen
class Script:
    """One stream: its headers after ``headers_s``, then pieces, each so long after the last."""

    pieces: tuple[tuple[float, bytes], ...]
    headers_s: float = 0.0


class Played(httpx.AsyncByteStream):
    """A body that waits no longer for a piece than its client's read timeout, as sockets do."""

    def __init__(
        self, script: Script, patience_s: float | None, on_close: Callable[[], None]
    ) -> None:
        self._script = script
        self._patience_s = patience_s
        self._on_close = on_close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for wait_s, piece in self._script.pieces:
            await wait_at_most(wait_s, self._patience_s)
            yield piece

    async def aclose(self) -> None:
        self._on_close()


async def wait_at_most(wait_s: float, patience_s: float | None) -> None:
    """Wait, or raise ReadTimeout once ``patience_s`` is over (None: never)."""
    if patience_s is not None and wait_s > patience_s:
        await trio.sleep(patience_s)
        raise httpx.ReadTimeout("silence")
    await trio.sleep(wait_s)


@attrs.define(eq=False)
class PlayingServer(httpx.AsyncBaseTransport):
    """Plays ``scripts`` to the streams in the order of their coming.

    ``parked`` are the slots that a look finds parked, ``looks_s`` how long the next looks take,
    the last one for good. Its cells are as many as ``cells`` says of a slot.
    """

    scripts: list[Script]
    seats: int = 4
    parked: set[int] = attrs.field(factory=set[int])
    cells: dict[int, int] = attrs.field(factory=dict[int, int])
    looks_s: list[float] = attrs.field(factory=lambda: [0.0])
    busy: set[int] = attrs.field(factory=set[int])
    routes: list[str] = attrs.field(factory=list[str])
    bodies: list[Json] = attrs.field(factory=list[Json])
    looking: int = 0
    most_looking: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        path = request.url.path
        self.routes.append(f"{request.method} {request.url.raw_path.decode()}")
        patience_s: float | None = request.extensions["timeout"]["read"]
        fields: Json = msgspec.json.decode(body) if body else {}
        await trio.lowlevel.checkpoint()
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(fields["content"].encode())})
        if path == "/slots":
            return await self._look(patience_s)
        if path.startswith("/slots/"):
            return httpx.Response(200, json={"id_slot": int(path[7:]), "n_erased": 1})
        assert path == TEXT, f"nobody asks for {path}"
        return await self._play(fields, patience_s)

    async def _look(self, patience_s: float | None) -> httpx.Response:
        wait_s = self.looks_s.pop(0) if len(self.looks_s) > 1 else self.looks_s[0]
        self.looking += 1
        self.most_looking = max(self.most_looking, self.looking)
        try:
            await wait_at_most(wait_s, patience_s)
        finally:
            self.looking -= 1
        return httpx.Response(200, json=[self._state(slot) for slot in range(self.seats)])

    def _state(self, slot: int) -> Json:
        return {
            "id": slot,
            "is_processing": slot in self.busy,
            "is_preempted": slot in self.parked,
            "n_prompt_tokens": self.cells.get(slot, 0),
        }

    async def _play(self, fields: Json, patience_s: float | None) -> httpx.Response:
        script = self.scripts[len(self.bodies)]
        self.bodies.append(fields)
        slot: int = fields["id_slot"]
        self.busy.add(slot)
        await wait_at_most(script.headers_s, patience_s)
        wire = Played(script, patience_s, lambda: self.busy.discard(slot))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=wire)


def said(text: str) -> bytes:
    """One token."""
    return _event({"text": text, "finish_reason": None}, {})


def ended(tokens: int) -> bytes:
    """The end of an answer of so many tokens."""
    timings = {"cache_n": 0, "prompt_n": 1, "predicted_n": tokens}
    return _event({"text": "", "finish_reason": "stop"}, {"timings": timings}) + b"data: [DONE]\n\n"


def _event(choice: Json, more: Json) -> bytes:
    name = {"id": "cmpl-1", "created": 1, "object": "text_completion"}
    chunk = {"choices": [{"index": 0, **choice}], **name, **more}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def steady(tokens: int, every_s: float) -> Script:
    """A healthy answer."""
    return Script((*((every_s, said("x")) for _ in range(tokens)), (0.0, ended(tokens))))


def kept_alive(seconds: float) -> tuple[tuple[float, bytes], ...]:
    """A park of so many seconds on a build that gives notices."""
    lasting = tuple((2.0, KEEPALIVE) for _ in range(math.floor(seconds / 2)))
    return ((0.0, PREEMPTED), *lasting, (0.0, RESUMED))


@asynccontextmanager
async def house(
    folder: Path, server: PlayingServer, *, notices: bool, first_token_s: float = 1200.0
) -> AsyncGenerator[Stage]:
    """kvalet before ``server``, which parks by itself and gives ``notices`` of it or none."""
    path = folder / "journal.jsonl"
    journal, empty, _ = open_journal(path, HEADER)
    ledger = Ledger(journal, empty, lambda: Nanos(round(trio.current_time() * 1e9)))
    upstream = UpstreamClient(Server(url=URL, api_key="k", slot_dir=folder), server)
    config = Config(attach=URL, first_token_s=first_token_s)
    front = open_front(config, (), ledger, Gate(upstream), trio.Event())
    async with upstream, trio.open_nursery() as nursery:
        nursery.start_soon(ledger.run)
        nursery.start_soon(slots.run, upstream, ledger.tap(65_536), ledger.tell)
        nursery.start_soon(preemption.run, upstream, ledger.tell, lambda: True)
        settings = c.Settings(first_token_s=first_token_s)
        ready = c.ReadySeen(
            generation=1,
            url=URL,
            build="b1",
            model="m",
            cells=Cells(8192),
            slots=server.seats,
            headroom=Cells(0),
            parks=True,
            notices=notices,
        )
        probed = c.ProbeSeen(generation=1, method="server")
        ledger.decide([c.OpenHouse(settings=settings), ready, probed])
        yield Stage(nursery, cast(Any, server), ledger, upstream, front)
        nursery.cancel_scope.cancel()
    journal.close()
    assert_replays(path)


async def visit(it: Stage, server: PlayingServer, text: str = "once") -> Guest:
    """A guest whose stream has begun: the next one gets the next script and the next slot."""
    begun = len(server.bodies)
    guest = it.invite({"prompt": text, "stream": True}, path=TEXT)
    await until(lambda: len(server.bodies) > begun, 0.001)
    return guest


async def over(*guests: Guest) -> None:
    """Return when these guests' answers have ended."""
    with trio.fail_after(100_000):
        await until(lambda: all(guest.done for guest in guests), 1.0)


def decided(it: Stage, kind: type[Event]) -> list[tuple[float, Event]]:
    """Every event of one kind in the journal, with the second of its decision."""
    return [
        (decision.at_ns / 1e9, event)
        for decision in read_journal(it.ledger.journal.path)
        for event in decision.events
        if isinstance(event, kind)
    ]


def stalls(it: Stage) -> list[tuple[float, e.StreamStalled]]:
    """Every stall in the journal."""
    return decided(it, e.StreamStalled)


def told(guest: Guest) -> list[bytes]:
    """What a client heard of parks, keep-alives left out."""
    return [one for one in guest.comments if one not in (b": preempt-keepalive", b":")]
