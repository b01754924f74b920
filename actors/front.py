"""The front: which request goes where. Framing is ``http``'s business, streams ``relay``'s."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import msgspec
import trio

from kvalet.actors.carry import is_settled, reach_ready, wait_settled
from kvalet.actors.client import JSON_HEADERS, SSE_HEADERS
from kvalet.actors.control import Control
from kvalet.actors.decisions.status import status
from kvalet.actors.gate import Gate
from kvalet.actors.http_exchange import Exchange, Request
from kvalet.actors.journal import READ_BYTES
from kvalet.actors.ledger import Ledger
from kvalet.actors.relay import Relay
from kvalet.actors.wires import Wires
from kvalet.protocol import notices
from kvalet.protocol.errors import ClientFault, ServerFault
from kvalet.protocol.journal import Reader
from kvalet.protocol.openai import fault_event, parse_request

SURFACES = {
    "/v1/chat/completions": "openai.chat",
    "/chat/completions": "openai.chat",
    "/v1/completions": "openai.completions",
}
# POST routes of llama-server that read only and take no slot.
READ_ONLY_POSTS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/messages/count_tokens",
        "/chat/completions/input_tokens",
        "/v1/chat/completions/input_tokens",
    }
)
PUBLIC = frozenset({"/health", "/v1/health"})
EVENT_PING_S = 10.0
DIGITS_MAX = 18
PATH_SAFE = "/!$&'()*+,;=@~"
READS = ("GET", "HEAD")
Answerer = Callable[[Exchange], Awaitable[None]]
PASSED_HEADERS = ("content-type",)


@attrs.frozen(kw_only=True)
class FrontConfig:
    """What the front needs to know. ``keys``: accepted API keys, none means open;
    ``debug`` lets a request wish for parks."""

    version: str
    mode: str
    keys: tuple[str, ...]
    debug: bool
    warnings: tuple[tuple[str, str], ...]
    keepalive_s: float
    first_token_s: float
    stall_s: float


class Front:
    """Routes one exchange at a time; ``__call__`` is the app that the HTTP door serves."""

    def __init__(
        self,
        config: FrontConfig,
        ledger: Ledger,
        gate: Gate,
        draining: trio.Event,
        control: Control,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._gate = gate
        self._draining = draining
        self._own: dict[str, tuple[Answerer, tuple[str, ...]]] = {
            "/health": (self._health, READS),
            "/v1/health": (self._health, READS),
            "/kvalet/status": (self._status, READS),
            "/kvalet/events": (self._events, READS),
            "/kvalet/load": (control.load, ("POST",)),
            "/kvalet/unload": (control.unload, ("POST",)),
            "/kvalet/settings/exact-concurrency": (control.exact, (*READS, "PUT")),
        }

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request. Raises KvaletError for the door to answer."""
        request = exchange.request
        path = request.path.rstrip("/") or "/"
        if path not in PUBLIC and not self._may_enter(request.headers):
            raise ClientFault("Invalid API Key", status=401, code="invalid_api_key")
        if path in SURFACES:
            require(request.method, "POST")
            await self._relay(exchange, SURFACES[path])
        elif path in self._own:
            answerer, methods = self._own[path]
            require(request.method, *methods)
            await answerer(exchange)
        elif request.method in READS or path in READ_ONLY_POSTS:
            await self._pass_through(exchange)
        else:
            raise ClientFault(
                f"kvalet does not serve {request.method} {request.path}",
                status=404,
                code="not_found",
            )

    def _may_enter(self, headers: dict[str, str]) -> bool:
        if not self._config.keys:
            return True
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        given = given or headers.get("x-api-key", "")
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in self._config.keys]
        return any(matches)

    async def _relay(self, exchange: Exchange, surface: str) -> None:
        request = parse_request(surface, exchange.request.body)
        park_every = self._forced(exchange.request.headers)
        if not await self._wait_ready(exchange, request.streaming):
            return
        config = self._config
        wires = Wires(
            ledger=self._ledger,
            gate=self._gate,
            keepalive_s=config.keepalive_s,
            first_token_s=config.first_token_s,
            stall_s=config.stall_s,
            park_every=park_every,
        )
        await Relay(exchange, request, self._ledger.open_mailbox(), wires).run()

    def _forced(self, headers: dict[str, str]) -> int:
        """Tokens between forced parks: a tester's wish, heard only in debug mode."""
        wish = headers.get("kvalet-park-every", "0") if self._config.debug else "0"
        return whole_number(wish, "Kvalet-Park-Every", "bad_park_every")

    async def _wait_ready(self, exchange: Exchange, streaming: bool) -> bool:
        """Whether a server is there now; False when a stream already told its client otherwise."""
        ledger, gate = self._ledger, self._gate
        if is_settled(ledger.house, gate) or not streaming:
            await wait_settled(ledger, gate)
            reach_ready(ledger, gate)
            return True
        await exchange.start_stream(200, SSE_HEADERS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(repeat, exchange, notices.ADMISSION_WAIT, self._config.keepalive_s)
            await wait_settled(ledger, gate)
            nursery.cancel_scope.cancel()
        try:
            reach_ready(ledger, gate)
        except ServerFault as fault:
            await exchange.send(fault_event(fault))
            await exchange.finish()
            return False
        await exchange.send(notices.ADMISSION_DONE)
        return True

    async def _health(self, exchange: Exchange) -> None:
        reach_ready(self._ledger, self._gate)
        await exchange.respond(200, JSON_HEADERS, b'{"status":"ok"}')

    async def _status(self, exchange: Exchange) -> None:
        ledger = self._ledger
        document: dict[str, Any] = {
            "version": self._config.version,
            **status(ledger.house, ledger.now_ns()),
            "journal": {"path": str(ledger.journal.path), "seq": ledger.journal.seq},
        }
        mine = [{"code": code, "message": text} for code, text in self._config.warnings]
        document["warnings"] = [*document["warnings"], *mine]
        if ledger.failure is not None:
            failed = {"code": "journal_failed", "message": ledger.failure}
            document["warnings"] = [*document["warnings"], failed]
        await exchange.respond(200, JSON_HEADERS, msgspec.json.encode(document))

    async def _events(self, exchange: Exchange) -> None:
        """The event log as SSE, from ``after`` (or ``Last-Event-ID``) on, without end."""
        request = exchange.request
        given = request.headers.get("last-event-id") or request.query.get("after") or "0"
        after = whole_number(given, "after", "bad_after")
        await exchange.start_stream(200, SSE_HEADERS)
        if request.method == "HEAD":
            await exchange.finish()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(repeat, exchange, b": ping\n\n", EVENT_PING_S)
            nursery.start_soon(cancel_after, self._draining, nursery.cancel_scope)
            async for lines in follow(self._ledger, after):
                await exchange.send(lines)
            nursery.cancel_scope.cancel()
        await exchange.finish()

    async def _pass_through(self, exchange: Exchange) -> None:
        request = exchange.request
        target = passed_target(request)
        answer = await reach_ready(self._ledger, self._gate).call(
            request.method, target, request.body
        )
        headers = {n: answer.headers[n] for n in PASSED_HEADERS if n in answer.headers}
        await exchange.respond(answer.status_code, headers, answer.content)


def whole_number(text: str, name: str, code: str) -> int:
    """``text`` as a number. Raises ClientFault for anything but a few ASCII digits."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        shown = text[: 2 * DIGITS_MAX]
        raise ClientFault(f"{name} must be a whole number, not {shown!r}", code=code)
    return int(text)


def passed_target(request: Request) -> str:
    """The path and query to ask llama-server for: never a host, whatever the client wrote.

    Our key goes with the request, so the client must not choose where it goes.
    """
    path = "/" + quote(request.path.lstrip("/"), safe=PATH_SAFE)
    _, mark, query = request.target.partition("?")
    return path + mark + query


def require(method: str, *allowed: str) -> None:
    """Raises ClientFault 405 for a method that the path does not take."""
    if method not in allowed:
        raise ClientFault(
            f"{method} is not allowed here, only {' and '.join(allowed)}",
            status=405,
            code="method_not_allowed",
        )


async def cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    """End what has no end of its own when kvalet is told to stop."""
    await event.wait()
    scope.cancel()


async def repeat(exchange: Exchange, comment: bytes, interval_s: float) -> None:
    """Comments that keep a silent stream's connection open."""
    while True:
        await exchange.try_send_comment(comment)
        await trio.sleep(interval_s)


async def follow(ledger: Ledger, after: int) -> AsyncIterator[bytes]:
    """The journal's events after ``after`` as SSE, piece by piece, as they are appended.

    Read back from the file, so that a slow reader costs no memory and misses nothing.
    """
    reader = Reader()
    path = trio.Path(Path(ledger.journal.path))
    async with await path.open("rb") as file:
        while True:
            chunk = await file.read(READ_BYTES)
            lines = b"".join(
                event_lines(decision.seq, decision.at_ns, decision.events)
                for decision in reader.feed(chunk)
                if decision.seq > after
            )
            if lines:
                yield lines
            if not chunk:
                if ledger.failure is not None:
                    return
                await ledger.journal.wait_appended(reader.seq)


def event_lines(seq: int, at_ns: int, events: Sequence[object]) -> bytes:
    """The SSE events of one decision; ``id`` is its sequence number."""
    out: list[bytes] = []
    for event in events:
        fields = msgspec.to_builtins(event)
        payload = msgspec.json.encode({"seq": seq, "at_ns": at_ns, **fields})
        out.append(b"id: %d\nevent: %b\ndata: %b\n\n" % (seq, fields["kind"].encode(), payload))
    return b"".join(out)
