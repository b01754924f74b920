"""One HTTP request and its answer, as an app sees them; and the writing half of a connection."""

from __future__ import annotations

import math
import re
import socket
import struct
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

import h11
import trio
from attrs import field, frozen
from attrs.validators import gt

from kvalet.protocol import openai_errors
from kvalet.protocol.errors import ClientFault, KvaletError, ServerFault

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Framing is ours: a copied upstream header must not contradict the bytes we write.
_FRAMING = frozenset(
    {"connection", "content-length", "date", "keep-alive", "te", "trailer", "transfer-encoding"}
    | {"proxy-connection", "upgrade"}
)
_BODILESS = frozenset({204, 304})


@frozen(kw_only=True)
class HttpLimits:
    """What one client may cost the door. Sizes in bytes, times in seconds."""

    body_bytes: int = field(default=16 * 1024 * 1024, validator=gt(0))
    """Largest request body; more is answered 413."""
    header_bytes: int = field(default=64 * 1024, validator=gt(0))
    """Largest request line and headers together; more is answered 431."""
    header_deadline_s: float = field(default=10.0, validator=gt(0))
    """From the first byte of a request to the end of its headers; then 408."""
    body_deadline_s: float = field(default=30.0, validator=gt(0))
    """Longest silence inside a request body; then 408."""
    idle_s: float = field(default=75.0, validator=gt(0))
    """Longest wait for the first byte of a request; then the connection is closed."""
    write_deadline_s: float = field(default=60.0, validator=gt(0))
    """A client that accepts no byte for so long counts as gone."""
    connections_max: int = field(default=1024, validator=gt(0))
    """Open connections; a further one is answered 503 and closed."""
    pipelined_bytes: int = field(default=64 * 1024, validator=gt(0))
    """Kept of what a client sends ahead of its answer; one who sends more counts as gone."""


@frozen(kw_only=True)
class Request:
    """One whole request, its body read."""

    method: str
    target: str
    """As it was sent."""
    path: str
    """Percent-decoded, without the query."""
    query: dict[str, str]
    """Decoded; of a repeated name the last value."""
    headers: dict[str, str]
    """Lower-case names; values of a repeated name are joined with a comma."""
    body: bytes
    peer: str
    """``host:port`` of the client."""


class ClientGone(Exception):
    """The client has closed its connection, or the answer on it can no longer be framed."""


def error_body(error: KvaletError) -> bytes:
    """``error`` as JSON in the OpenAI dialect: message, type, code and the fault's own numbers."""
    if isinstance(error, ClientFault | ServerFault):
        return openai_errors.fault_body(error)
    return openai_errors.error_body(str(error), status=error.status_hint, code="internal")


def reason(status: int) -> bytes:
    """The standard phrase of a status, or nothing for a status that has none."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


class Outlet:
    """The writing half of one connection: one write at a time, each with a deadline.

    ``life`` is the scope of the whole connection. A client that takes no byte for
    ``write_deadline_s`` ends it, so whoever writes is cancelled as if the client had left.
    """

    def __init__(self, sock: trio.socket.SocketType, write_deadline_s: float) -> None:
        self.life = trio.CancelScope()
        self.writing = False
        self.torn = False
        self._socket = sock
        self._write_deadline_s = write_deadline_s
        self._waiting = trio.lowlevel.ParkingLot()

    async def write(self, wire_bytes: bytes) -> None:
        """Write all of it, after any write in flight. Raises ClientGone.

        A write cancelled half way tears the connection: nothing may follow on it.
        """
        while self.writing:
            await self._waiting.park()
        if self.torn:
            raise ClientGone("the answer was cut")
        self.writing = True
        sent, size = 0, len(wire_bytes)
        try:
            while sent < size:
                # One scope re-armed: a fresh one for each write costs three times as much.
                self.life.deadline = trio.current_time() + self._write_deadline_s
                sent += await self._socket.send(memoryview(wire_bytes)[sent:])
        except OSError as error:
            self.torn = True
            raise ClientGone(str(error)) from error
        finally:
            self.life.deadline = math.inf
            self.writing = False
            self.torn = self.torn or 0 < sent < size
            if self._waiting:
                self._waiting.unpark()

    def reset_on_close(self) -> None:
        """Make closing send RST, so that the client cannot take the end for a whole answer."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", True, 0))
        except OSError:
            self.torn = True


class Exchange:
    """One request and its answer: one ``respond``, or ``start_stream``, ``send``… and ``finish``.

    The app's scope is cancelled as soon as the client leaves (closes, half-closes, resets, or
    accepts no byte for the write deadline), until the last write of the answer has begun: from
    then on the app runs to its own end. Several tasks may write; each write goes out whole.
    """

    def __init__(
        self,
        request: Request,
        *,
        wire: h11.Connection,
        outlet: Outlet,
        draining: trio.Event,
    ) -> None:
        self.request = request
        self.started = False
        """Headers have gone out, or may have."""
        self.ending = False
        """The last write has begun: the client may leave, and a comment comes too late."""
        self.complete = False
        """The whole answer has been written."""
        self.bytes_sent = 0
        """Bytes of the answer's body that were written, framing not counted."""
        self._wire = wire
        self._outlet = outlet
        self._draining = draining
        self._gone = trio.Event()
        self._silent = request.method == "HEAD"
        self._chunked = wire.their_http_version != b"1.0"

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send the whole answer. Raises ClientGone, and ValueError for a header that would not
        stay one header. Framing headers are ours: given ones are dropped."""
        head = self._open(status, headers, content_length=len(body))
        self.ending = True
        if not self._silent:
            head += self._wire.send(h11.Data(data=body)) or b""
        self._wire.send(h11.EndOfMessage())
        await self._outlet.write(head)
        self.bytes_sent = 0 if self._silent else len(body)
        self.complete = True

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the headers of a streamed answer now. Raises as ``respond`` does."""
        await self._outlet.write(self._open(status, headers, content_length=None))

    async def send(self, chunk: bytes) -> None:
        """Send one chunk at once; waits for a write in flight. Raises ClientGone."""
        assert self.started, "start_stream comes first"
        assert not self.ending, "nothing comes after finish"
        if not chunk or self._silent:
            return  # an empty chunk would be the terminator
        await self._outlet.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)
        self.bytes_sent += len(chunk)

    async def try_send_comment(self, chunk: bytes) -> bool:
        """Send ``chunk`` unless another write is in flight or the answer is ending.

        Says whether it was sent. Raises ClientGone.
        """
        if self.ending or self._outlet.writing:
            return False
        await self.send(chunk)
        return True

    async def finish(self) -> None:
        """End a streamed answer so that the client knows it is whole. Raises ClientGone."""
        assert self.started, "start_stream comes first"
        assert not self.ending, "an answer ends once"
        self.ending = True
        terminator = self._wire.send(h11.EndOfMessage())
        if terminator:
            await self._outlet.write(terminator)
        elif self._outlet.torn:
            raise ClientGone("the answer was cut")
        self.complete = True

    def abandon(self) -> None:
        """Give the answer up: the connection closes with no terminator when the app returns."""
        self._outlet.torn = True
        # Where the close itself is the terminator, only a reset tells the client otherwise.
        if self.started and not self._chunked:
            self._outlet.reset_on_close()

    async def wait_gone(self) -> None:
        """Return as soon as the client has closed or half-closed, also while nothing is sent."""
        await self._gone.wait()

    def is_gone(self) -> bool:
        """Whether the client has left; ``wait_gone``'s twin."""
        return self._gone.is_set()

    def leave(self) -> None:
        """The door saw the client leave: cancel the app, unless its last write has begun."""
        self._gone.set()
        if not self.ending:
            self._outlet.life.cancel()

    def _open(
        self, status: int, headers: Mapping[str, str], *, content_length: int | None
    ) -> bytes:
        assert not self.started, "a request is answered once"
        fields = [("date", formatdate(usegmt=True)), *checked_headers(headers)]
        self._silent = self._silent or status in _BODILESS
        if content_length is not None and status not in _BODILESS:
            fields.append(("content-length", str(content_length)))
        if self._draining.is_set():
            fields.append(("connection", "close"))
        answer = h11.Response(status_code=status, reason=reason(status), headers=fields)
        self.started = True
        return self._wire.send(answer) or b""


def checked_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """``headers`` less the framing ones. Raises ValueError for one that would split the answer."""
    fields: list[tuple[str, str]] = []
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a header name: {name!r}")
        if _CONTROL.search(value):
            raise ValueError(f"a control character in header {name!r}")
        value.encode("latin-1")
        if name.lower() not in _FRAMING:
            fields.append((name, value.strip(" \t")))
    return fields
