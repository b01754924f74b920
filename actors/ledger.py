"""THE single writer: command → decide → append → evolve → hand the events out.

Nothing is done before its event is in the journal: shells act on the events they are
handed here, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from kvalet.actors.decisions.core import take
from kvalet.actors.decisions.state import House
from kvalet.actors.journal import Journal
from kvalet.protocol.commands import Command
from kvalet.protocol.errors import JournalFault
from kvalet.protocol.events import AnyEvent, NoticeTaken
from kvalet.protocol.ids import Nanos, RequestId, Seq
from kvalet.protocol.journal import Decision

# Every live request has at most a handful of commands under way; this many is a bug.
INBOX_MAX = 65_536
# A relay reads its events between legs; one leg causes three or four.
MAILBOX_MAX = 64
# Decisions that share one write to the journal.
BATCH_MAX = 256

Clock = Callable[[], Nanos]


class Mailbox:
    """One request's own events, in order. The channel ends when the ledger fails closed."""

    def __init__(self, request: RequestId, events: trio.MemoryReceiveChannel[AnyEvent]) -> None:
        self.request = request
        self.events = events


class Ledger:
    """Holds the house; takes commands; hands out events. One per journal."""

    def __init__(self, journal: Journal, house: House, clock: Clock) -> None:
        self.house = house
        self.journal = journal
        self._clock = clock
        self._send, self._inbox = trio.open_memory_channel[Command](INBOX_MAX)
        self._mailboxes: dict[RequestId, trio.MemorySendChannel[AnyEvent]] = {}
        self._taps: list[trio.MemorySendChannel[AnyEvent]] = []
        self._last_request = house.totals.requests
        self._last_ns = Nanos(0)
        self._changed = trio.Event()

    @property
    def failure(self) -> str | None:
        """Why nothing is decided any more, or None."""
        return self.journal.failure

    def tell(self, command: Command) -> None:
        """Put ``command`` in the inbox. Never waits, so it is safe on the way out."""
        self._send.send_nowait(command)

    def reports(self) -> trio.MemorySendChannel[Command]:
        """An end of the inbox for an actor of its own; the actor closes it."""
        return self._send.clone()

    def now_ns(self) -> Nanos:
        """The clock that decisions are stamped by."""
        return self._clock()

    async def wait_idle(self) -> None:
        """Return once the inbox is empty."""
        while self._inbox.statistics().current_buffer_used and self.failure is None:
            await self._changed.wait()

    def open_mailbox(self) -> Mailbox:
        """A new request's id and mailbox. Raises JournalFault once the ledger has failed."""
        if self.failure is not None:
            raise JournalFault(self.failure)
        self._last_request += 1
        request = RequestId(f"r{self._last_request}")
        # The bound is generous: a relay that lags this far behind is a bug (Overrun).
        send, receive = trio.open_memory_channel[AnyEvent](MAILBOX_MAX)
        self._mailboxes[request] = send
        return Mailbox(request, receive)

    def close_mailbox(self, mailbox: Mailbox) -> None:
        """The request's task is over; later events about it have no reader."""
        channel = self._mailboxes.pop(mailbox.request, None)
        if channel is not None:
            channel.close()

    def tap(self, size: int) -> trio.MemoryReceiveChannel[AnyEvent]:
        """All events from now on. ``size`` bounds how far the reader may lag."""
        send, receive = trio.open_memory_channel[AnyEvent](size)
        self._taps.append(send)
        return receive

    async def wait_for(self, condition: Callable[[House], bool]) -> None:
        """Return once the house satisfies ``condition`` (or the ledger has failed)."""
        while not condition(self.house) and self.failure is None:
            await self._changed.wait()

    async def run(self) -> None:
        """Decide until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_journal)
            await self._decide_all()

    async def _watch_journal(self) -> None:
        # A sync that fails in the background must not wait for the next command.
        await self.journal.wait_failed()
        self._fail_closed()

    async def _decide_all(self) -> None:
        while True:
            batch = [await self._inbox.receive()]
            while len(batch) < BATCH_MAX:
                try:
                    batch.append(self._inbox.receive_nowait())
                except trio.WouldBlock:
                    break
            self.decide(batch)

    def decide(self, batch: list[Command]) -> None:
        """Decide ``batch`` at one moment, append it in one write, then hand the events out."""
        if self.failure is not None:
            self._fail_closed()
            return
        # A clock that is set back must not turn waits into negative figures.
        at_ns = self._last_ns = max(self._clock(), self._last_ns)
        house, seq = self.house, self.journal.seq
        decisions: list[Decision] = []
        for command in batch:
            events, house = take(house, command, at_ns)
            seq += 1
            decisions.append(Decision(seq=Seq(seq), at_ns=at_ns, command=command, events=events))
        try:
            self.journal.append(decisions)
        except JournalFault:
            self._fail_closed()
            return
        self.house = house
        for decision in decisions:
            for event in decision.events:
                self._hand_out(event)
        self._announce()

    def settle(self) -> None:
        """Decide what is still in the inbox, when nobody is left to hear of it."""
        self._mailboxes.clear()
        self._taps.clear()
        batch: list[Command] = []
        while True:
            try:
                batch.append(self._inbox.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                break
        if batch:
            self.decide(batch)

    def _announce(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def _fail_closed(self) -> None:
        for channel in [*self._mailboxes.values(), *self._taps]:
            channel.close()
        self._mailboxes.clear()
        self._taps.clear()
        self._announce()

    def _hand_out(self, event: AnyEvent) -> None:
        for channel in [*self._taps]:
            try:
                channel.send_nowait(event)
            except trio.BrokenResourceError:
                # Its reader has gone home; that is no reason to decide nothing more.
                self._taps.remove(channel)
                channel.close()
        if isinstance(event, NoticeTaken):
            # Its relay told it; a burst of them would only crowd the mailbox.
            return
        for name in ("request", "asker"):
            request = getattr(event, name, None)
            mailbox = self._mailboxes.get(request) if request is not None else None
            if mailbox is not None:
                mailbox.send_nowait(event)
