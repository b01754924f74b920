"""A simulated server behind httpx, in the same program and without a socket."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from urllib.parse import parse_qsl

import httpx
import trio

from kvalet.actors.http import ClientGone, Request
from kvalet.sims.fakeserver.server import SimServer


class SimTransport(httpx.AsyncBaseTransport):
    """Give it to ``httpx.AsyncClient``; requests run in ``nursery``.

    Closing a response is how a client leaves. After a crash open streams break off and
    new connections are refused.
    """

    def __init__(self, server: SimServer, nursery: trio.Nursery) -> None:
        self._server = server
        self._nursery = nursery

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request, answered as soon as its headers are there."""
        body = await request.aread()
        await trio.lowlevel.checkpoint()
        if self._server.crashed.is_set():
            raise httpx.ConnectError("connection refused", request=request)
        reply = _Reply(_read(request, body), self._server)
        self._nursery.start_soon(self._serve, reply)
        try:
            await reply.opened.wait()
        except BaseException:
            reply.leave()
            raise
        if not reply.started:
            raise httpx.RemoteProtocolError("server disconnected", request=request)
        return httpx.Response(
            reply.status, headers=list(reply.headers.items()), stream=reply, request=request
        )

    async def _serve(self, reply: _Reply) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cut, reply)
            with reply.scope:
                await self._server(reply)
            nursery.cancel_scope.cancel()
        reply.abandon()

    async def _cut(self, reply: _Reply) -> None:
        await self._server.crashed.wait()
        reply.abandon()


class _Reply(httpx.AsyncByteStream):
    """An answer in memory: the server writes, the client reads."""

    def __init__(self, request: Request, server: SimServer) -> None:
        self.request = request
        self.started = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.opened = trio.Event()
        self.scope = trio.CancelScope()
        self._server = server
        self._gone = False
        self._whole = False
        self._sink, self._source = trio.open_memory_channel[bytes](math.inf)

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.start_stream(status, {**headers, "content-length": str(len(body))})
        await self.send(body)
        await self.finish()

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        self.status, self.headers, self.started = status, dict(headers), True
        self.opened.set()

    async def send(self, chunk: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        if chunk:
            self._sink.send_nowait(chunk)

    async def finish(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        self._whole = True
        self._sink.close()

    def abandon(self) -> None:
        self._sink.close()
        self.opened.set()

    def is_gone(self) -> bool:
        return self._gone

    def leave(self) -> None:
        self._gone = True
        self._source.close()
        self.scope.cancel()

    def _check(self) -> None:
        if self._gone or self._server.crashed.is_set():
            raise ClientGone("nobody reads this any more")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._source:
            yield chunk
        if not self._whole:
            raise httpx.RemoteProtocolError("peer closed connection: incomplete chunked read")

    async def aclose(self) -> None:
        self.leave()


def _read(request: httpx.Request, body: bytes) -> Request:
    target = request.url.raw_path.decode("ascii")
    return Request(
        method=request.method,
        target=target,
        path=request.url.path,
        query=dict(parse_qsl(request.url.query.decode("ascii"), keep_blank_values=True)),
        headers={name.lower(): value for name, value in request.headers.items()},
        body=body,
        peer="memory",
    )
