"""One request's side of the server: waits for results, writes them, and notices who left.

A stock server looks at its client only when it has a result for him, or after a second in
which nobody got one. A build with notices looks every second while the request is parked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import trio
from attrs import define, field

from kvalet.actors.http import ClientGone, Request
from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver import constants
from kvalet.sims.fakeserver.faults import SplitWrites
from kvalet.sims.fakeserver.options import Options
from kvalet.sims.fakeserver.refusals import Refused
from kvalet.sims.fakeserver.requests import Ask
from kvalet.sims.fakeserver.slot import (
    Acted,
    Begun,
    Ended,
    Failed,
    Noticed,
    Output,
    Progress,
    Said,
)
from kvalet.sims.fakeserver.surfaces import Voice
from kvalet.sims.fakeserver.turns import Mailbox, Turns
from kvalet.sims.fakeserver.wire import JSON_HEADERS, PING, STREAM_HEADERS

_NEVER: Final = 1e9


class Reply(Protocol):
    """Where an answer goes: an HTTP exchange, or one in memory."""

    request: Request
    started: bool

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send the whole answer."""
        ...

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the headers of a stream."""
        ...

    async def send(self, chunk: bytes) -> None:
        """Send a piece of a stream."""
        ...

    async def finish(self) -> None:
        """End a stream as a whole one."""
        ...

    def abandon(self) -> None:
        """Cut a stream."""
        ...

    def is_gone(self) -> bool:
        """Whether the client has left."""
        ...


@define(eq=False, kw_only=True)
class Reader:
    """Answers one request. ``numbers`` are its jobs, in the order of its answers."""

    options: Options
    turns: Turns
    box: Mailbox
    reply: Reply
    ask: Ask
    voice: Voice
    numbers: tuple[int, ...]
    stopping: trio.Event
    done: trio.Event = field(factory=trio.Event)
    _ends: dict[int, Ended] = field(factory=dict[int, Ended])
    _parked: set[int] = field(factory=set[int])
    _held: bytes = b""
    _left: bool = False
    _over: bool = False
    _written_at: float = field(factory=trio.current_time)
    _polled_at: float = field(factory=trio.current_time)

    def leave(self) -> None:
        """The client is known to have left; the server has yet to look."""
        self._left = True

    async def run(self) -> None:
        """To the end of the answer, or until the client's leaving is noticed."""
        try:
            while not self._over:
                if outputs := self.box.take():
                    await self._deliver(outputs)
                    continue
                due = self._poll_due()
                if trio.current_time() >= due:
                    await self._poll()
                else:
                    await self.turns.bulletin.wait(due)
        except ClientGone:
            pass
        finally:
            self.turns.cancel(self.numbers)
            self.done.set()

    @property
    def _gone(self) -> bool:
        return self._left or self.reply.is_gone()

    @property
    def _noticing(self) -> bool:
        return self.options.build.comments and bool(self._parked)

    def _poll_due(self) -> float:
        since = self._polled_at
        if not self._noticing:
            since = max(since, self.turns.bulletin.rung_at)
        return since + constants.POLL_S

    async def _poll(self) -> None:
        now = self._polled_at = trio.current_time()
        if self._gone:
            self._over = True
            return
        period = self._ping_period()
        if not (self.reply.started and self.ask.stream and now - self._written_at > period):
            return
        if self.stopping.is_set():
            self.reply.abandon()
            self._over = True
        elif self._noticing:
            build = self.options.build
            await self._write(build.notice(Notice.KEEPALIVE, 0, self.ask.jobs))
        else:
            await self._write(PING)

    def _ping_period(self) -> float:
        said = self.options.ping_s if self.ask.ping_s is None else self.ask.ping_s
        period = float(said) if said > 0 else _NEVER
        return min(period, constants.KEEPALIVE_S) if self._noticing else period

    async def _deliver(self, outputs: list[Output]) -> None:
        if self._gone:
            self._over = True
            return
        if self.stopping.is_set():
            return
        for out in outputs:
            assert not isinstance(out, Acted)
            await self._take(out, self.numbers.index(out.job))
            if self._over:
                return

    async def _take(
        self, out: Begun | Progress | Said | Ended | Failed | Noticed, index: int
    ) -> None:
        match out:
            case Failed():
                await self._fail(out)
            case Ended():
                await self._end(out, index)
            case Noticed():
                await self._notice(out, index)
            case Begun():
                await self._open()
            case Progress() if self.ask.stream and self.ask.return_progress:
                await self._write(self.voice.progress(index, out))
            case Said() if self.ask.stream:
                await self._write(self.voice.said(index, out))
            case _:
                pass

    async def _open(self) -> None:
        if self.ask.stream and not self.reply.started:
            await self.reply.start_stream(200, self._headers(STREAM_HEADERS))

    async def _write(self, chunk: bytes) -> None:
        await self._open()
        chunk, self._held = self._held + chunk, b""
        if any(isinstance(fault, SplitWrites) for fault in self.options.faults):
            for byte in chunk:
                await self.reply.send(bytes((byte,)))
        else:
            await self.reply.send(chunk)
        self._written_at = self._polled_at = trio.current_time()

    async def _notice(self, out: Noticed, index: int) -> None:
        if out.notice is Notice.PREEMPTED:
            self._parked.add(index)
            self._polled_at = trio.current_time()
        elif out.notice is Notice.RESUMED:
            self._parked.discard(index)
        comment = self.options.build.notice(out.notice, index, self.ask.jobs)
        if not (comment and self.ask.stream):
            return
        if self.reply.started or self.options.build.opens_at_park:
            await self._write(comment)
        else:
            self._held += comment

    async def _end(self, out: Ended, index: int) -> None:
        self._ends[index] = out
        if self.ask.stream:
            await self._write(self.voice.ended(index, out))
        if len(self._ends) < len(self.numbers):
            return
        self._over = True
        if self.ask.stream:
            if last := self.voice.done():
                await self._write(last)
            await self.reply.finish()
        else:
            ends = [self._ends[place] for place in sorted(self._ends)]
            await self.reply.respond(200, self._headers(JSON_HEADERS), self.voice.whole(ends))

    async def _fail(self, out: Failed) -> None:
        self._over = True
        if self.reply.started:
            await self._write(self.voice.failed(out))
            await self.reply.finish()
            return
        refused = Refused(out.code, out.message, out.kind)
        await self.reply.respond(out.code, self._headers(JSON_HEADERS), refused.body)

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        origin = self.reply.request.headers.get("origin", "")
        return {**headers, "access-control-allow-origin": origin}
