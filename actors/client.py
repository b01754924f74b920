"""The client's side of a request: streamed or whole, what it is sent and when it last was."""

from __future__ import annotations

import trio
from msgspec.structs import replace

from kvalet.actors.decisions.answer import Output
from kvalet.actors.http_exchange import Exchange
from kvalet.protocol.openai import Assembler, KvaletUsage, ParsedRequest, Totals

SSE_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
JSON_HEADERS = {"content-type": "application/json"}


def round_times(usage: KvaletUsage) -> KvaletUsage:
    """``usage`` as a client wants to read it: milliseconds are precise enough."""
    return replace(usage, waited_s=round(usage.waited_s, 3), parked_s=round(usage.parked_s, 3))


def count(usage: KvaletUsage, **more: float) -> KvaletUsage:
    """``usage`` with its figures raised by ``more``."""
    return replace(usage, **{name: getattr(usage, name) + n for name, n in more.items()})


class Client:
    """Sends one answer. A client that does not stream gets it whole, and no comments."""

    def __init__(self, exchange: Exchange, request: ParsedRequest) -> None:
        self.exchange = exchange
        self.sent_at = trio.current_time()
        self._assembler = None if request.streaming else Assembler(request.surface)

    @property
    def streaming(self) -> bool:
        """Whether the client reads a stream."""
        return self._assembler is None

    @property
    def started(self) -> bool:
        """Whether anything has been sent, so that no status can be chosen any more."""
        return self.exchange.started

    async def open(self) -> None:
        """Send a stream's headers, once: from now on the client knows that it is heard."""
        if self.streaming and not self.exchange.started:
            await self.exchange.start_stream(200, SSE_HEADERS)

    async def comment(self, comment: bytes) -> None:
        """Tell a streaming client something between two events."""
        if self.streaming:
            await self.open()
            await self._send(comment)

    async def try_comment(self, comment: bytes) -> None:
        """The same, unless a write is in flight or nothing has been sent yet."""
        if self.streaming and self.exchange.started:
            self.sent_at = trio.current_time()
            await self.exchange.try_send_comment(comment)

    async def emit(self, outputs: list[Output]) -> None:
        """Pass on what some upstream events mean, in one write."""
        if self._assembler is not None:
            for output in outputs:
                for payload in output.data:
                    self._assembler.add(payload)
            return
        raw = b"".join(output.raw for output in outputs)
        if raw:
            await self._send(raw)

    async def finish(self, last: Output, totals: Totals, usage: KvaletUsage) -> None:
        """Send the last bytes, or the whole answer."""
        await self.emit([last])
        if self._assembler is None:
            await self.exchange.finish()
        else:
            body = self._assembler.result(totals, usage)
            await self.exchange.respond(200, JSON_HEADERS, body)

    async def end_with(self, event: bytes) -> None:
        """End a stream that has begun with one last event: an error."""
        if event:
            await self._send(event)
        await self.exchange.finish()

    async def _send(self, raw: bytes) -> None:
        self.sent_at = trio.current_time()
        await self.exchange.send(raw)
