"""One request's life between its client and llama-server: legs, parks, comments, one ending.

The relay acts on the ledger's events and reports what it sees. It runs in the task of its
connection: when the client leaves, the task is cancelled, its upstream connection closes,
and ``Leave`` is told on the way out without waiting.
"""

from __future__ import annotations

import math

import httpx
import trio

from kvalet.actors.client import JSON_HEADERS, Client, count, round_times
from kvalet.actors.decisions.answer import Answer, LegEnd, Output
from kvalet.actors.decisions.away import Away, Heard
from kvalet.actors.decisions.evolve_lease import FINISHED_REASONS
from kvalet.actors.decisions.refusal import ending, reason_of, refusal
from kvalet.actors.http_exchange import ClientGone, Exchange
from kvalet.actors.ledger import Mailbox
from kvalet.actors.parking import Berth
from kvalet.actors.wires import Wires
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol import llama, notices, openai
from kvalet.protocol.errors import JournalFault, KvaletError, ServerFault, first_fault
from kvalet.protocol.ids import Cells, SlotId
from kvalet.protocol.openai import KvaletUsage, ParsedRequest, Partial
from kvalet.protocol.sse import SseEvent, SseSplitter

PATHS = {"openai.chat": "/v1/chat/completions", "openai.completions": "/v1/completions"}
PING = b":\n\n"
LOOK_MIN_S = 0.001
PING_AFTER_S = 10.0
"""A stream silent for so long (a long prefill) gets a bare ping of ours."""


class Relay:
    """One request. ``run`` returns when its answer has ended, however it did."""

    def __init__(
        self, exchange: Exchange, request: ParsedRequest, mailbox: Mailbox, wires: Wires
    ) -> None:
        self.name = mailbox.request
        self._client = Client(exchange, request)
        self._berth = Berth(wires.upstream, mailbox.request)
        self._request = request
        self._mailbox = mailbox
        self._wires = wires
        self._answer = Answer(request)
        self._splitter = SseSplitter()
        self._away = Away()
        self._phase = "arriving"
        self._since = trio.current_time()
        self._heard = self._since
        self._slots: tuple[SlotId, ...] = ()
        self._tokens: list[int] = []
        self._expected: Cells | None = None
        self._usage = KvaletUsage()
        self._interrupt: KvaletError | None = None
        self._over = False

    async def run(self) -> None:
        """Serve the request. Raises KvaletError only while nothing has been sent."""
        try:
            await self._guarded()
        finally:
            self._leave("left")
            self._wires.ledger.close_mailbox(self._mailbox)
            self._berth.forget()

    async def _guarded(self) -> None:
        fault: KvaletError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_alive)
                await self._serve()
                nursery.cancel_scope.cancel()
        except* ClientGone:
            self._leave("left")
        except* KvaletError as group:
            fault = first_fault(group)
        if fault is not None:
            self._leave(reason_of(fault))
            if not self._client.started:
                raise fault
            await self._client.end_with(openai.fault_event(fault))

    def _tell(self, command: c.Command) -> None:
        self._wires.ledger.tell(command)

    def _leave(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._tell(c.Leave(request=self.name, reason=reason))

    async def _serve(self) -> None:
        request = self._request
        self._tell(
            c.Arrive(
                request=self.name,
                surface=request.surface,
                streaming=request.streaming,
                cap=request.cap,
                pausable=request.continuable,
                seats=request.seats,
                park_every=self._wires.park_every,
            )
        )
        self._tokens = await self._wires.upstream.count(request, Partial())
        per_seat = math.ceil(len(self._tokens) / max(1, len(request.prompts)))
        self._cells = Cells(per_seat)
        affinity = self._wires.prefixes.shared_with(self._tokens)
        self._tell(c.PromptCounted(request=self.name, prompt=self._cells, affinity=affinity))
        while not self._over:
            await self._act(await self._next_event())

    async def _next_event(self) -> e.AnyEvent:
        try:
            return await self._mailbox.events.receive()
        except trio.EndOfChannel:
            raise JournalFault(
                f"kvalet can take no decision any more: {self._wires.ledger.failure}"
            ) from None

    async def _act(self, event: e.AnyEvent) -> None:
        match event:
            case e.LeaseQueued():
                self._enter("queued")
                await self._client.open()
            case e.LeaseRefused():
                self._over = True
                raise refusal(event)
            case e.LeaseGranted():
                if self._phase == "queued":
                    await self._client.comment(notices.ADMISSION_DONE)
                self._slots = event.slots
                await self._leg(event.credit, event.erase)
            case e.LeaseExtended():
                await self._leg(event.credit, event.erase)
            case e.LeaseResumed():
                await self._resume(event)
            case e.LeaseParking():
                await self._park(event)
            case e.PoolPressed(asker=asker) if asker == self.name:
                self._enter("waiting")
            case e.LeaseEnded():
                await self._ended(event)
            case _:
                await self._remark(event)

    async def _remark(self, event: e.AnyEvent) -> None:
        """Events that change nothing in the order of things but may be worth a comment."""
        if isinstance(event, e.LeaseRecomputed):
            self._usage = count(self._usage, recomputes=1)
            await self._client.comment(notices.PREEMPT_RECOMPUTED)
        elif isinstance(event, e.ParkSeen):
            told = self._away.see(event.away, trio.current_time())
            if told:
                await self._client.comment(told)

    def _enter(self, phase: str) -> None:
        now = trio.current_time()
        spent = now - self._since
        if self._phase == "queued":
            self._usage = count(self._usage, waited_s=spent)
        elif self._phase == "parked":
            self._usage = count(self._usage, parked_s=spent)
        self._phase, self._since = phase, now

    async def _ended(self, event: e.LeaseEnded) -> None:
        if event.reason == "context-full":
            await self._finish(event.generated)
            return
        self._over = True
        raise ending(event)

    async def _park(self, event: e.LeaseParking) -> None:
        """Move the cells out: save them if ordered and possible, then empty the slot."""
        self._enter("parked")
        self._usage = count(self._usage, parks=1)
        await self._client.comment(notices.PREEMPT_PAUSED)
        size = await self._berth.move_out(self._slots[0], event.save)
        self._wires.prefixes.forget(self._slots[0])
        self._tell(
            c.CellsFreed(
                request=self.name,
                method="recompute" if size is None else "save",
                cells=event.cells,
                saved_bytes=size or 0,
            )
        )

    async def _resume(self, event: e.LeaseResumed) -> None:
        """Bring the cells back, tell the client, go on."""
        self._slots = event.slots
        await self._erase(event.erase)
        # One token is evaluated in any case: the last one never had a cell.
        self._expected = await self._berth.bring_back(self._slots[0], Cells(self._cells - 1))
        self._usage = count(self._usage, resumes=1)
        await self._client.comment(notices.PREEMPT_RESUMED)
        await self._leg(event.credit, ())

    async def _erase(self, slots: tuple[SlotId, ...]) -> None:
        for slot in slots:
            await self._wires.upstream.empty(slot)
            self._wires.prefixes.forget(slot)
            self._tell(c.SlotErased(slot=slot, cells=Cells(0)))

    async def _leg(self, credit: Cells, erase: tuple[SlotId, ...]) -> None:
        """One upstream request of ``credit`` new tokens at most; then report how it ended."""
        await self._erase(erase)
        self._enter("prefill")
        self._heard = trio.current_time()
        request, answer = self._request, self._answer
        credit = Cells(credit // request.seats)
        spent = self._cells - answer.prompt if answer.leg >= 0 else 0
        left = credit if request.cap is None else min(credit, request.cap - spent)
        answer.begin_leg(self._cells, max_tokens=left)
        self._wires.prefixes.remember(self._slots, self._tokens)
        body = openai.leg_body(
            request,
            partial=answer.partial,
            max_tokens=left,
            slot=self._slots[0],
            leg=answer.leg,
            progress=self._expected is not None,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, nursery.cancel_scope)
            await self._stream(body)
            nursery.cancel_scope.cancel()
        self._enter("seam")
        if self._interrupt is not None:
            raise self._interrupt
        if not self._over:
            await self._judge(answer.end_leg())

    async def _stream(self, body: bytes) -> None:
        path = PATHS[self._request.surface]
        async with self._wires.upstream.stream(path, body) as response:
            if response.status_code != 200:
                await self._pass_refusal(response)
                return
            await self._client.open()
            async for piece in response.aiter_raw():
                await self._take(self._splitter.feed(piece))
            await self._take(self._splitter.flush())

    async def _take(self, events: list[SseEvent]) -> None:
        """Feed events to the answer; send what may go out, in one write."""
        outputs: list[Output] = []
        for event in events:
            output = self._answer.feed(event)
            if event.data is not None:
                self._heard = trio.current_time()
                # A prompt's progress is a sign of life, but not its first token.
                if self._phase == "prefill" and output.reused is None:
                    self._phase = "decode"
                outputs += self._told(self._away.datum(self._heard))
            outputs += self._note(output)
            outputs.append(output)
        # While the client is slow to take its bytes nobody listens to the server.
        phase, self._phase, since = self._phase, "sending", trio.current_time()
        await self._client.emit(outputs)
        self._phase = phase
        self._heard += trio.current_time() - since

    def _note(self, output: Output) -> list[Output]:
        """Take down what is no text, and say what the client is told of it first."""
        told: list[Output] = []
        if output.notice is not None:
            self._heard = trio.current_time()
            told += self._told(self._away.hear(output.notice, output.about, self._heard))
        if output.record is not None:
            told += self._told(self._away.settle(output.record))
        if output.reused is not None and self._expected is not None:
            expected, self._expected = self._expected, None
            reused = Cells(min(output.reused, expected))
            self._tell(c.CacheSeen(request=self.name, expected=expected, reused=reused))
        return told

    def _told(self, heard: Heard) -> list[Output]:
        if heard.name:
            notice, away = heard.name, self._away.parked
            self._tell(c.NoticeHeard(request=self.name, notice=notice, away=away))
        return [Output(raw=heard.comment)] if heard.comment else []

    async def _listen(self, scope: trio.CancelScope) -> None:
        """Hear the ledger while a leg runs: remarks are passed on, verdicts cut the leg."""
        while True:
            try:
                event = await self._next_event()
            except JournalFault as fault:
                self._interrupt = fault
            else:
                match event:
                    case e.StreamStalled():
                        self._interrupt = ServerFault(
                            f"llama-server sent nothing for {event.silent_s:.0f} s",
                            status=504,
                            code="stalled",
                        )
                    case e.LeaseEnded() if not self._over:
                        self._interrupt = ending(event)
                    case _:
                        await self._remark(event)
            if self._interrupt is not None:
                scope.cancel()
                return

    async def _judge(self, end: LegEnd) -> None:
        match end.kind:
            case "final":
                await self._finish(end.generated, end.reason)
            case "credit":
                await self._spend()
            case "failed":
                # The server's own error event has been relayed already.
                self._leave("failed")
                await self._client.end_with(b"")
            case _:
                raise ServerFault("llama-server broke off in the middle of the answer")

    async def _spend(self) -> None:
        """The credit is used up: count what the continuation starts from, and ask for more."""
        partial = self._answer.partial
        self._tokens = await self._wires.upstream.count(self._request, partial)
        cells = Cells(len(self._tokens))
        if partial.reasoning and not partial.content and cells <= self._answer.prompt:
            raise ServerFault(
                "the pool is full, and this model's template cannot continue a thought",
                code="not_continuable",
            )
        stuck = cells <= self._cells
        self._cells = cells
        generated = cells - self._answer.prompt
        self._tell(c.CreditSpent(request=self.name, cells=cells, generated=generated, stuck=stuck))

    async def _finish(self, generated: int, reason: str = "context-full") -> None:
        """The answer is complete: give the lease back first, then send the last bytes."""
        self._over = True
        # The server's word goes to the client; the journal knows its own.
        reason = reason if reason in FINISHED_REASONS else "finished"
        if reason != "context-full":
            cells = Cells(self._answer.prompt + generated)
            self._tell(
                c.AnswerEnded(request=self.name, reason=reason, cells=cells, generated=generated)
            )
        usage = round_times(self._away.added_to(self._usage))
        output = self._answer.finish(generated, usage)
        await self._client.finish(output, self._answer.totals(generated), usage)

    async def _pass_refusal(self, response: httpx.Response) -> None:
        """llama-server refused the leg: its own words while nothing was sent, else an event."""
        body = await response.aread()
        status = response.status_code
        if self._client.started:
            message = llama.decode_error(body).message
            raise ServerFault(message, status=status, code="refused")
        self._leave("refused")
        kind = response.headers.get("content-type", JSON_HEADERS["content-type"])
        await self._client.exchange.respond(status, {"content-type": kind}, body)

    async def _keep_alive(self) -> None:
        """Keep a waiting client's connection alive, and watch for silence while one runs."""
        while True:
            await trio.sleep(self._till_next_look())
            if self._phase in ("prefill", "decode"):
                self._watch_silence()
            ping = {
                "queued": notices.ADMISSION_WAIT,
                "parked": notices.PREEMPT_KEEPALIVE,
            }.get(self._phase)
            if self._away.parked:
                ping = notices.PREEMPT_KEEPALIVE
            if ping is None and trio.current_time() - self._client.sent_at >= PING_AFTER_S:
                ping = PING
            if ping is not None:
                await self._client.try_comment(ping)

    def _till_next_look(self) -> float:
        """Seconds to the next keep-alive, or to the deadline that comes before it."""
        left = self._patience() - (trio.current_time() - self._heard)
        # A rest too small to be added to the time of day would never pass.
        return min(self._wires.keepalive_s, max(left, LOOK_MIN_S if left > 0 else math.inf))

    def _patience(self) -> float:
        return self._wires.first_token_s if self._phase == "prefill" else self._wires.stall_s

    def _watch_silence(self) -> None:
        silent = trio.current_time() - self._heard
        if silent >= self._patience():
            phase = "first-token" if self._phase == "prefill" else "decode"
            self._tell(c.SilenceSeen(request=self.name, phase=phase, silent_s=silent))
