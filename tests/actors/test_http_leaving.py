"""Clients that leave or stall, writers that meet, and doors that close."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
import trio
import trio.testing
from attrs import evolve

from kvalet.actors.http import App, ClientGone, Exchange, HttpLimits, serve_http

QUICK = HttpLimits(idle_s=5, write_deadline_s=0.2, pipelined_bytes=2_000)
GET = b"GET / HTTP/1.1\r\nHost: door\r\n\r\n"
MIB = 1024 * 1024
SOON_S = 1.0
"""Enough for a busy machine; no deadline of the door's would end these visits at all."""


async def open_door(
    nursery: trio.Nursery,
    app: App,
    limits: HttpLimits = QUICK,
    draining: trio.Event | None = None,
) -> int:
    """Serve ``app`` until the test ends; the port."""
    serve = partial(serve_http, app, ("127.0.0.1", 0), limits, draining=draining)
    ((_, port),) = await nursery.start(serve)
    return int(port)


Call = Callable[..., Awaitable[trio.SocketStream]]


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    """``call(port, wire=GET)`` connects with a small receive buffer, and asks."""
    streams: list[trio.SocketStream] = []

    async def connect(port: int, wire: bytes = GET) -> trio.SocketStream:
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await sock.connect(("127.0.0.1", port))
        streams.append(trio.SocketStream(sock))
        await streams[-1].send_all(wire)
        return streams[-1]

    yield connect
    for stream in streams:
        await trio.aclose_forcefully(stream)


async def leave(stream: trio.SocketStream, how: str) -> None:
    if how == "half-close":
        await stream.send_eof()
        return
    if how == "reset":
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


async def read_until(stream: trio.SocketStream, end: bytes) -> bytes:
    heard = b""
    with trio.fail_after(5):
        while end not in heard:
            chunk = await stream.receive_some()
            assert chunk, heard
            heard += chunk
    return heard


async def read_all(stream: trio.SocketStream) -> bytes:
    heard = bytearray()
    with trio.fail_after(5):
        async for chunk in stream:
            heard += chunk
    return bytes(heard)


def chunks_of(body: bytes) -> list[bytes]:
    """The chunks of a whole chunked body."""
    chunks: list[bytes] = []
    while not body.startswith(b"0\r\n\r\n"):
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        assert body[len(chunks[-1]) :].startswith(b"\r\n")
        body = body[len(chunks[-1]) + 2 :]
    return chunks


class Visit:
    """An app that notes when its client was served and when it was cancelled."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.serving = trio.Event()
        self.left = trio.Event()
        self.exchange: Exchange | None = None

    async def __call__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        try:
            if self.stage != "queued":
                await exchange.start_stream(200, {})
            self.serving.set()
            while self.stage in ("streaming", "stalled"):
                await exchange.send(b"x" * (64 if self.stage == "streaming" else MIB))
                if self.stage == "streaming":
                    await trio.sleep(0.002)
            await trio.sleep_forever()
        finally:
            self.left.set()

    async def wait_left(self, within_s: float = SOON_S) -> None:
        with trio.fail_after(within_s):
            await self.left.wait()


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("stage", ["queued", "silent", "streaming"])
async def test_a_client_who_leaves_is_noticed_at_once(
    nursery: trio.Nursery, call: Call, stage: str, how: str
) -> None:
    visit = Visit(stage)
    port = await open_door(nursery, visit)
    stream = await call(port)
    await visit.serving.wait()
    await leave(stream, how)
    await visit.wait_left()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_stalled_client_who_leaves_is_noticed_at_once(
    nursery: trio.Nursery, call: Call, how: str
) -> None:
    visit = Visit("stalled")
    port = await open_door(nursery, visit, evolve(QUICK, write_deadline_s=30))
    stream = await call(port)
    await visit.serving.wait()
    await leave(stream, how)
    await visit.wait_left()


@pytest.mark.parametrize("together", [True, False])
async def test_pipelined_bytes_do_not_hide_that_the_client_left(
    nursery: trio.Nursery, call: Call, together: bool
) -> None:
    visit = Visit("silent")
    port = await open_door(nursery, visit)
    stream = await call(port, GET * 2 if together else GET)
    await visit.serving.wait()
    for _ in range(0 if together else 3):
        await stream.send_all(GET)
    await leave(stream, "close")
    await visit.wait_left()


async def test_a_client_who_sends_too_far_ahead_is_cut_off(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    visit = Visit("silent")
    port = await open_door(nursery, visit)
    stream = await call(port)
    await visit.serving.wait()
    await stream.send_all(GET * 100)
    await visit.wait_left()


async def test_a_client_who_accepts_nothing_is_cut_off_and_nothing_piles_up(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    visit = Visit("stalled")
    port = await open_door(nursery, visit)
    stream = await call(port)
    await visit.serving.wait()
    started_s = trio.current_time()
    await visit.wait_left(2)
    assert trio.current_time() - started_s > 0.15
    assert visit.exchange is not None
    assert visit.exchange.bytes_sent <= 8 * MIB
    assert not visit.exchange.complete
    await stream.aclose()


async def test_a_slow_client_who_accepts_a_little_is_kept(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    size = 4 * MIB

    async def pour(exchange: Exchange) -> None:
        await exchange.respond(200, {}, b"x" * size)

    port = await open_door(nursery, pour, evolve(QUICK, write_deadline_s=0.5))
    stream = await call(port, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    heard, pauses = 0, 0
    with trio.fail_after(10):
        while chunk := await stream.receive_some(512 * 1024):
            heard += len(chunk)
            if heard > pauses * 256 * 1024 and pauses < 10:
                pauses += 1
                await trio.sleep(0.08)
    assert heard > size


async def test_an_answered_app_is_not_cancelled_by_its_client_hanging_up(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    ended = trio.Event()

    async def tidy_up(exchange: Exchange) -> None:
        await exchange.respond(200, {}, b"bye")
        await exchange.wait_gone()
        await trio.lowlevel.checkpoint()
        ended.set()

    port = await open_door(nursery, tidy_up)
    stream = await call(port)
    await read_until(stream, b"bye")
    await leave(stream, "close")
    with trio.fail_after(1):
        await ended.wait()


async def test_an_app_may_wait_for_its_client_to_leave_and_return(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    returned = trio.Event()

    async def wait(exchange: Exchange) -> None:
        await exchange.wait_gone()
        assert exchange.is_gone()
        returned.set()

    port = await open_door(nursery, wait)
    await leave(await call(port), "close")
    with trio.fail_after(1):
        await returned.wait()
    await leave(await call(port), "close")


async def test_two_writers_take_turns_and_a_comment_gives_way(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    tried: list[bool] = []
    met = trio.Event()

    async def both(exchange: Exchange) -> None:
        await exchange.start_stream(200, {})
        tried.append(await exchange.try_send_comment(b": first\n\n"))
        async with trio.open_nursery() as writers:
            writers.start_soon(exchange.send, b"a" * 6 * MIB)
            writers.start_soon(exchange.send, b"b" * 6 * MIB)
            await trio.testing.wait_all_tasks_blocked(0.01)
            tried.append(await exchange.try_send_comment(b": second\n\n"))
            met.set()
        await exchange.finish()
        tried.append(await exchange.try_send_comment(b": third\n\n"))

    port = await open_door(nursery, both, evolve(QUICK, write_deadline_s=5, idle_s=0.2))
    stream = await call(port)
    heard = await read_until(stream, b": first")
    await met.wait()
    heard += await read_all(stream)
    first, *rest = chunks_of(heard.partition(b"\r\n\r\n")[2])
    assert first == b": first\n\n"
    assert sorted((chunk[:1], len(chunk), len(set(chunk))) for chunk in rest) == [
        (b"a", 6 * MIB, 1),
        (b"b", 6 * MIB, 1),
    ]
    assert tried == [True, False, False]


async def test_nothing_follows_a_chunk_that_was_cut(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    refused = trio.Event()

    async def cut(exchange: Exchange) -> None:
        await exchange.start_stream(200, {})
        with trio.move_on_after(0.1):
            await exchange.send(b"x" * 32 * MIB)
        with pytest.raises(ClientGone):
            await exchange.send(b"more")
        with pytest.raises(ClientGone):
            await exchange.finish()
        refused.set()

    port = await open_door(nursery, cut, evolve(QUICK, write_deadline_s=5))
    stream = await call(port)
    with trio.fail_after(2):
        await refused.wait()
    heard = await read_all(stream)
    assert heard.endswith(b"xxx")
    assert len(heard) < 32 * MIB


async def test_an_abandoned_stream_ends_without_its_terminator(
    nursery: trio.Nursery,
    call: Call,
) -> None:
    async def give_up(exchange: Exchange) -> None:
        await exchange.start_stream(200, {})
        await exchange.send(b"some")
        exchange.abandon()
        with pytest.raises(ClientGone):
            await exchange.send(b"more")

    port = await open_door(nursery, give_up)
    assert (await read_all(await call(port))).endswith(b"\r\n\r\n4\r\nsome\r\n")
    old = await call(port, b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(trio.BrokenResourceError):
        await read_all(old)


async def test_a_draining_door_finishes_streams_and_closes_idle_connections(call: Call) -> None:
    draining, release = trio.Event(), trio.Event()

    async def long_answer(exchange: Exchange) -> None:
        await exchange.start_stream(200, {})
        await release.wait()
        await exchange.send(b"end")
        await exchange.finish()

    async with trio.open_nursery() as nursery:
        port = await open_door(nursery, long_answer, draining=draining)
        running, idle = await call(port), await call(port, b"")
        heard = await read_until(running, b"\r\n\r\n")
        draining.set()
        with trio.fail_after(1):
            assert await read_all(idle) == b""
        with pytest.raises(OSError, match="all attempts"):
            await trio.open_tcp_stream("127.0.0.1", port)
        release.set()
        with trio.fail_after(1):
            heard += await read_all(running)
    assert heard.endswith(b"3\r\nend\r\n0\r\n\r\n")


async def test_an_answer_begun_while_draining_closes_its_connection(call: Call) -> None:
    draining, asked = trio.Event(), trio.Event()

    async def wait_then_answer(exchange: Exchange) -> None:
        asked.set()
        await draining.wait()
        await exchange.respond(200, {}, b"bye")

    async with trio.open_nursery() as nursery:
        port = await open_door(nursery, wait_then_answer, draining=draining)
        stream = await call(port)
        await asked.wait()
        draining.set()
        assert b"connection: close\r\n" in (await read_all(stream)).lower()


async def test_a_drain_that_is_cancelled_cuts_what_is_left(call: Call) -> None:
    draining = trio.Event()
    visit = Visit("silent")
    async with trio.open_nursery() as nursery:
        port = await open_door(nursery, visit, draining=draining)
        stream = await call(port)
        await visit.serving.wait()
        draining.set()
        nursery.cancel_scope.cancel()
    assert visit.left.is_set()
    assert not (await read_all(stream)).endswith(b"0\r\n\r\n")


async def test_a_large_next_request_may_come_before_the_app_has_returned(call: Call) -> None:
    heard, release = trio.Event(), trio.Event()

    async def answer_and_linger(exchange: Exchange) -> None:
        await exchange.respond(200, {}, b"done")
        heard.set()
        await release.wait()

    size = 10 * QUICK.pipelined_bytes
    following = b"POST /next HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size
    async with trio.open_nursery() as nursery:
        port = await open_door(nursery, answer_and_linger)
        stream = await call(port)
        first = await read_until(stream, b"done")
        await heard.wait()
        async with trio.open_nursery() as sending:
            sending.start_soon(stream.send_all, following + b"[" * size)
            await trio.testing.wait_all_tasks_blocked(0.05)
            release.set()
            second = await read_until(stream, b"done")
        nursery.cancel_scope.cancel()
    assert first[:12] == second[:12] == b"HTTP/1.1 200"
