"""One answer, whatever number of legs it takes: what may reach the client, and when.

Pure: events of the upstream stream in, bytes for the client out. The rule at every seam:
the continuation is built on exactly what the client holds. Text that is not settled when
a leg ends (the first part of a stop string; half a UTF-8 character, which the server
keeps back by itself) is dropped and generated again.
"""

from __future__ import annotations

import attrs
from msgspec.structs import replace

from kvalet.protocol.llama import Timings
from kvalet.protocol.notices import Notice, read_notice
from kvalet.protocol.openai import (
    Chunk,
    KvaletUsage,
    ParkRecord,
    ParsedRequest,
    Partial,
    StopTail,
    Totals,
    final_event,
    read_chunk,
    rename,
)
from kvalet.protocol.sse import DONE, SseEvent


@attrs.frozen
class Output:
    """What one upstream event means: ``raw`` for a streaming client, ``data`` for an assembler."""

    raw: bytes = b""
    data: tuple[bytes, ...] = ()
    notice: Notice | None = None
    about: int = 0
    record: ParkRecord | None = None
    reused: int | None = None


NOTHING = Output()


@attrs.frozen
class LegEnd:
    """How a leg ended. ``kind``: final, credit, failed (an error was sent), cut."""

    kind: str
    reason: str
    generated: int


class Answer:
    """Follows one request's answer over its legs. ``partial`` is what the client holds."""

    def __init__(self, request: ParsedRequest) -> None:
        self.request = request
        self.leg = -1
        self.prompt = 0
        self.carried = 0
        self._max_tokens = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._stops = StopTail(request.stops)
        self._tail = ""
        self._pending: list[tuple[bytes, bytes, Chunk]] = []
        self._finish: list[bytes] = []
        self._reason: str | None = None
        self._failed = False
        self._done = False
        self._identity: tuple[str, int] | None = None
        self._totals = Totals()
        self._leg_tokens = 0
        self._measured = False
        self._said = False

    @property
    def partial(self) -> Partial:
        """What the client holds of the answer."""
        return Partial(content="".join(self._content), reasoning="".join(self._reasoning))

    def begin_leg(self, prompt: int, max_tokens: int) -> None:
        """A leg starts: its prompt takes ``prompt`` cells, it may generate ``max_tokens``."""
        self.leg += 1
        if self.leg == 0:
            self.prompt = prompt
        self.carried = prompt - self.prompt
        self._leg_tokens = 0
        self._measured = False
        self._max_tokens = max_tokens
        self._pending = []
        self._finish = []
        self._reason = None
        self._done = False

    def feed(self, event: SseEvent) -> Output:
        """Take one event of the upstream stream. Raises ServerFault on garbage."""
        if event.data is None:
            return self._comment(event)
        chunk = read_chunk(event.data)
        if self._failed:
            # An error has been passed on: the answer ends with it.
            return NOTHING
        if chunk.done:
            self._done = True
            return NOTHING
        if chunk.error is not None:
            self._failed = True
            return Output(raw=event.raw, data=(event.data,))
        if chunk.progress is not None:
            return Output(reused=chunk.progress.cache)
        if chunk.finish is not None or chunk.usage is not None:
            return self._finishing(event, chunk)
        if self.leg > 0 and chunk.role_only:
            return NOTHING
        if self._identity is None:
            # Usually the first leg's; one that said nothing has named nothing.
            self._identity = (chunk.id, chunk.created)
        elif self.leg > 0:
            event = self._renamed(event)
        return self._text(event, chunk)

    def _comment(self, event: SseEvent) -> Output:
        for comment in event.comments:
            heard = read_notice(comment)
            if heard is not None:
                return Output(notice=heard[0], about=heard[1])
        # A bare ping says nothing; keep-alives are ours to send.
        return Output(raw=event.raw) if any(event.comments) else NOTHING

    def _renamed(self, event: SseEvent) -> SseEvent:
        if self._identity is None or event.data is None:
            return event
        payload = rename(event.data, *self._identity)
        return SseEvent(raw=b"data: " + payload + b"\n\n", data=payload)

    def _text(self, event: SseEvent, chunk: Chunk) -> Output:
        assert event.data is not None
        if not self._stops.width:
            self._settle(chunk)
            return Output(raw=event.raw, data=(event.data,))
        self._pending.append((event.raw, event.data, chunk))
        # A thought is searched for stop strings like everything else that is said.
        held = "".join(chunk.reasoning + chunk.text for _, _, chunk in self._pending)
        if self._stops.unsettled(self._stops.keep(self._tail, held)):
            return NOTHING
        return self._flush()

    def strand(self) -> bool:
        """The leg's server died: drop what the client was not sent. Whether the answer can go
        on elsewhere: it can be continued, or its client has heard nothing of it yet."""
        self._pending = []
        self._finish = []
        return self.request.continuable or not self._said

    def _settle(self, chunk: Chunk) -> None:
        self._said = self._said or bool(chunk.text or chunk.reasoning or chunk.tool_call)
        if chunk.text:
            self._content.append(chunk.text)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        self._tail = self._stops.keep(self._tail, chunk.reasoning + chunk.text)

    def _flush(self) -> Output:
        pending, self._pending = self._pending, []
        for _, _, chunk in pending:
            self._settle(chunk)
        return Output(
            raw=b"".join(raw for raw, _, _ in pending), data=tuple(data for _, data, _ in pending)
        )

    def _finishing(self, event: SseEvent, chunk: Chunk) -> Output:
        assert event.data is not None
        if chunk.finish is not None:
            self._reason = chunk.finish
        self._measure(chunk)
        self._finish.append(event.data)
        return Output(record=chunk.record) if chunk.record else NOTHING

    def _measure(self, chunk: Chunk) -> None:
        timings = chunk.timings
        if timings is None and chunk.usage is not None and not self._measured:
            # A build that hides its timings still says how many tokens it generated.
            timings = Timings(predicted_n=chunk.usage.completion_tokens)
        if timings is not None and not self._measured:
            self._measured = True
            self._leg_tokens = timings.predicted_n
            self._totals = self._totals.after(timings)

    def end_leg(self) -> LegEnd:
        """Judge the leg whose stream has ended."""
        generated = self.carried + self._leg_tokens
        if self._failed:
            return LegEnd("failed", "failed", generated)
        if self._reason is None or not self._done:
            return LegEnd("cut", "failed", generated)
        cap = self.request.cap
        goes_on = (
            self._reason == "length"
            and self.request.continuable
            and (cap is None or generated < cap)
            # Without figures the server's own word for it must do: it was our limit.
            and (self._leg_tokens >= self._max_tokens or not self._measured)
        )
        return LegEnd("credit" if goes_on else "final", self._reason, generated)

    def finish(self, generated: int, usage: KvaletUsage) -> Output:
        """The last bytes: held text, the finish chunk with sums over all legs, ``[DONE]``."""
        held = self._flush()
        totals = self.totals(generated)
        events: list[bytes] = [held.raw]
        data = list(held.data)
        for payload in self._finish:
            if self.leg > 0 and self._identity is not None:
                payload = rename(payload, *self._identity)
            whole = final_event(payload, totals, usage)
            events.append(whole)
            data.append(whole[len(b"data: ") : -2])
        events.append(DONE)
        return Output(raw=b"".join(events), data=tuple(data))

    def totals(self, generated: int) -> Totals:
        """Sums over all legs, with ``generated`` tokens that the client really holds."""
        return replace(self._totals, prompt=self.prompt, completion=generated)
