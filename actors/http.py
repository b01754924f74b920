"""The HTTP/1.1 door: connections, limits and draining; what to answer is the app's business.

A half-close (the client shuts only its sending side) counts as leaving: nothing tells it from a
client that died, and a slot must not stay with one that did.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import parse_qsl, unquote

import h11
import trio
from attrs import define, field

from kvalet.actors.http_exchange import (
    ClientGone,
    Exchange,
    HttpLimits,
    Outlet,
    Request,
    error_body,
    reason,
)
from kvalet.protocol.errors import (
    ClientFault,
    EnvironmentFault,
    KvaletError,
    ServerFault,
    first_fault,
)

__all__ = ["App", "ClientGone", "Exchange", "HttpLimits", "Request", "error_body", "serve_http"]

App = Callable[[Exchange], Awaitable[None]]
"""Answers one request.

It raises a KvaletError before it has started to have it answered as JSON. Any other exception is
a bug: it is answered 500 if that is still possible, and ends ``serve_http``.
"""

_READ_BYTES = 64 * 1024
_LINGER_S = 2.0
_JSON = {"content-type": "application/json"}
_HOST = re.compile(rb"(?:[0-9A-Za-z._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_QUERY_FIELDS_MAX = 256


async def serve_http(
    app: App,
    where: tuple[str, int] | list[trio.SocketListener],
    limits: HttpLimits | None = None,
    *,
    draining: trio.Event | None = None,
    task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` on ``where`` (a host and port, or listeners, which are then ours to close).

    Starts with the list of bound ``(host, port)``. Once ``draining`` is set nothing new is
    accepted, idle connections close at once, running exchanges go on, and the call returns when
    the last has ended; cancel it to stop sooner. Raises EnvironmentFault if it cannot listen.
    """
    draining = trio.Event() if draining is None else draining
    listeners = await _listen(*where) if isinstance(where, tuple) else where
    door = _Door(app=app, limits=limits or HttpLimits(), draining=draining)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            serve = partial(trio.serve_listeners, handler_nursery=connections)
            await accepting.start(serve, door.admit, listeners)
            task_status.started([listener.socket.getsockname()[:2] for listener in listeners])
            await draining.wait()
            accepting.cancel_scope.cancel()
        for waiting in door.idle:
            waiting.cancel()


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise EnvironmentFault(f"cannot listen on {host}:{port}: {error}") from error


@define(eq=False, kw_only=True)
class _Door:
    """What all connections share."""

    app: App
    limits: HttpLimits
    draining: trio.Event
    idle: set[trio.CancelScope] = field(factory=set[trio.CancelScope])
    """Scopes of the connections that wait for the first byte of a request."""
    open_count: int = 0

    async def admit(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end, or refuse it while there are too many."""
        # The refused ones linger too, so they need a bound of their own.
        if self.open_count >= 2 * self.limits.connections_max:
            return
        self.open_count += 1
        try:
            await _Connection(self, stream).run(
                refused=self.open_count > self.limits.connections_max
            )
        finally:
            self.open_count -= 1


class _Connection:
    """One client's connection: requests in a row, each with a watch for the client leaving."""

    def __init__(self, door: _Door, stream: trio.SocketStream) -> None:
        self._door = door
        self._limits = door.limits
        self._stream = stream
        self._outlet = Outlet(stream.socket, door.limits.write_deadline_s)
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=door.limits.header_bytes)
        self._peer = _peer_name(stream.socket)

    async def run(self, *, refused: bool) -> None:
        """Serve requests until either side is done."""
        try:
            with self._outlet.life:
                _notice_dead_peers(self._stream.socket, self._limits.write_deadline_s)
                if refused:
                    busy = ServerFault("too many connections", status=503, code="overloaded")
                    await self._refuse(busy)
                    return
                while await self._serve_one():
                    self._wire.start_next_cycle()
        except* ClientGone:
            pass

    async def _serve_one(self) -> bool:
        """Read a request and have it answered. Says whether another may follow."""
        try:
            head = await self._read_head()
            if head is None:
                return False
            _check_framing(head, self._limits)
            body = await self._read_body(head)
            request = _request(head, body, self._peer)
        except h11.RemoteProtocolError as error:
            await self._refuse(ClientFault(str(error), status=error.error_status_hint))
            return False
        except ClientFault as fault:
            await self._refuse(fault)
            return False
        exchange = Exchange(
            request, wire=self._wire, outlet=self._outlet, draining=self._door.draining
        )
        await self._run_app(exchange)
        done = self._wire.our_state is h11.DONE and self._wire.their_state is h11.DONE
        return exchange.complete and done and not exchange.is_gone()

    async def _receive(self) -> None:
        try:
            received = await self._stream.receive_some(_READ_BYTES)
        except trio.BrokenResourceError as error:
            raise ClientGone(str(error)) from error
        if not received:
            raise ClientGone("closed by the client")
        self._wire.receive_data(received)

    async def _wait_first_byte(self) -> bool:
        if self._door.draining.is_set():
            return False
        if self._wire.trailing_data[0]:
            return True
        with trio.move_on_after(self._limits.idle_s) as waiting:
            self._door.idle.add(waiting)
            try:
                await self._receive()
            finally:
                self._door.idle.discard(waiting)
        return not waiting.cancelled_caught

    async def _read_head(self) -> h11.Request | None:
        if not await self._wait_first_byte():
            return None
        try:
            with trio.fail_after(self._limits.header_deadline_s):
                while not isinstance(event := self._wire.next_event(), h11.Request):
                    await self._receive()
                return event
        except trio.TooSlowError:
            raise ClientFault("the headers took too long", status=408, code="timeout") from None

    async def _read_body(self, head: h11.Request) -> bytes:
        too_large = ClientFault(
            f"the body is over {self._limits.body_bytes} bytes", status=413, code="too_large"
        )
        if any(
            name == b"content-length" and int(value) > self._limits.body_bytes
            for name, value in head.headers
        ):
            raise too_large
        if self._wire.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, reason=reason(100), headers=[])
            await self._outlet.write(self._wire.send(go_on) or b"")
        body = bytearray()
        while not isinstance(event := self._wire.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._limits.body_bytes:
                    raise too_large
            else:
                await self._receive_in_time()
        return bytes(body)

    async def _receive_in_time(self) -> None:
        try:
            with trio.fail_after(self._limits.body_deadline_s):
                await self._receive()
        except trio.TooSlowError:
            raise ClientFault("the body stopped coming", status=408, code="timeout") from None

    async def _run_app(self, exchange: Exchange) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, exchange)
                await self._answer(exchange)
                nursery.cancel_scope.cancel()
        finally:
            if not exchange.complete:
                exchange.abandon()

    async def _answer(self, exchange: Exchange) -> None:
        fault: KvaletError | None = None
        try:
            await self._door.app(exchange)
            assert exchange.started or exchange.is_gone(), "the app returned without an answer"
        except* ClientGone:
            pass
        except* KvaletError as faults:
            fault = first_fault(faults)
        except* Exception:
            with trio.move_on_after(_LINGER_S, shield=True):
                await self._answer_fault(exchange, KvaletError("internal error"))
            raise
        if fault is not None:
            await self._answer_fault(exchange, fault)

    async def _answer_fault(self, exchange: Exchange, fault: KvaletError) -> None:
        if exchange.started:
            return
        try:
            await exchange.respond(fault.status_hint, _JSON, error_body(fault))
        except ClientGone:
            exchange.abandon()

    async def _watch(self, exchange: Exchange) -> None:
        """Read on while the app works: only a reader sees the client leave."""
        ahead = len(self._wire.trailing_data[0])
        while ahead <= self._limits.pipelined_bytes:
            try:
                received = await self._stream.receive_some(_READ_BYTES)
            except trio.BrokenResourceError:
                break
            if not received:
                break
            ahead += len(received)
            self._wire.receive_data(received)
            if exchange.ending:
                # The client has its answer already, and this is its next request.
                return
        exchange.leave()

    async def _refuse(self, fault: ClientFault | ServerFault) -> None:
        """Answer a request that never reaches the app, and close."""
        body = error_body(fault)
        status = fault.status_hint
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, reason(status))
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        with trio.move_on_after(_LINGER_S):
            await self._outlet.write(head + body)
            await self._drain_input()

    async def _drain_input(self) -> None:
        # Closing with unread input sends a reset, which can eat the answer before it is read.
        dropped = 0
        try:
            await self._stream.send_eof()
            while dropped < 4 * self._limits.body_bytes:
                received = await self._stream.receive_some(_READ_BYTES)
                if not received:
                    return
                dropped += len(received)
        except trio.BrokenResourceError:
            return


def _check_framing(head: h11.Request, limits: HttpLimits) -> None:
    """Refuse what h11 lets pass: two ways to frame a body, an odd Host, headers just too large."""
    names = [name for name, _ in head.headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        raise ClientFault("both Content-Length and Transfer-Encoding")
    if any(name == b"host" and not _HOST.fullmatch(value) for name, value in head.headers):
        raise ClientFault("not a host name in Host")
    if not head.http_version.startswith(b"1."):
        raise ClientFault("only HTTP/1.1 and 1.0 are spoken here", status=505)
    size = len(head.method) + len(head.target)
    size += sum(len(name) + len(value) + len(b": \r\n") for name, value in head.headers)
    if size > limits.header_bytes:
        raise ClientFault("the headers are too large", status=431, code="too_large")


def _request(head: h11.Request, body: bytes, peer: str) -> Request:
    target = head.target.decode("ascii")
    path, query = _split_target(target)
    headers: dict[str, str] = {}
    for name_bytes, value_bytes in head.headers:
        name, value = name_bytes.decode("ascii"), value_bytes.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Request(
        method=head.method.decode("ascii"),
        target=target,
        path=path,
        query=query,
        headers=headers,
        body=body,
        peer=peer,
    )


def _split_target(target: str) -> tuple[str, dict[str, str]]:
    raw, _, query = target.partition("?")
    if raw.lower().startswith(("http://", "https://")):
        raw = "/" + raw.split("/", 3)[3] if raw.count("/") > 2 else "/"
    try:
        path = unquote(raw, errors="strict")
        fields = parse_qsl(query, keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX)
    except ValueError as error:
        raise ClientFault("the request target cannot be decoded") from error
    if not (path.startswith("/") or path == "*") or not path.isprintable():
        raise ClientFault("not a request target")
    return path, dict(fields)


def _peer_name(sock: trio.socket.SocketType) -> str:
    try:
        match sock.getpeername():
            case (str(host), int(port), *_):
                return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            case _:
                return "local"
    except OSError:
        return "unknown"


def _notice_dead_peers(sock: trio.socket.SocketType, deadline_s: float) -> None:
    """Let the kernel end a connection whose client vanished without a word.

    What we write meanwhile fits the socket's buffer, so no write deadline would ever see it.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            probe_s = max(1, int(deadline_s / 4))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(deadline_s * 1000))
    except OSError as error:
        raise ClientGone(str(error)) from error
