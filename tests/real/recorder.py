"""A wire-tap between kvalet and llama-server: passes all on, and shows each request first."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import trio

READ_BYTES = 65_536

OnRequest = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Told the path and the JSON body of a request before the server hears of it."""


@asynccontextmanager
async def tapped(url: str, on_request: OnRequest) -> AsyncGenerator[str]:
    """The address of a tap in front of the server at ``url``."""
    port = urlsplit(url).port
    assert port is not None

    async def serve_one(client: trio.SocketStream) -> None:
        head, body = await read_request(client)
        if not head:
            return
        path = head.split(b" ", 2)[1].decode()
        await on_request(path, json.loads(body) if body else {})
        server = await trio.open_tcp_stream("127.0.0.1", port)
        async with server, trio.open_nursery() as nursery:
            nursery.start_soon(until_closed, client, nursery.cancel_scope)
            await server.send_all(head + body)
            await copy_all(server, client)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, serve_one, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def read_request(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    """One request, its head and its body; empty when the client has left."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = await stream.receive_some(READ_BYTES)
        if not piece:
            return b"", b""
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    while length and len(body) < int(length[1]):
        body += await stream.receive_some(READ_BYTES)
    return head + b"\r\n\r\n", body


async def until_closed(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Hang up on the server as soon as the client has."""
    try:
        while await stream.receive_some(READ_BYTES):
            pass
    except trio.BrokenResourceError:
        pass
    scope.cancel()


async def copy_all(source: trio.SocketStream, target: trio.SocketStream) -> None:
    """Pass the answer on, byte for byte, until the server ends it."""
    try:
        while piece := await source.receive_some(READ_BYTES):
            await target.send_all(piece)
    except trio.BrokenResourceError:
        return
