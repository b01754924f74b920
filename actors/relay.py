"""One request's life between its client and llama-server: legs, parks, comments, one ending.

The relay acts on the ledger's events and reports what it sees. It runs in the task of its
connection: when the client leaves, the task is cancelled, its upstream connection closes,
and ``Leave`` is told on the way out without waiting.
"""

from __future__ import annotations

import math

import httpx
import trio

from kvalet.actors.carry import (
    check_thought,
    count_tokens,
    may_carry_over,
    wait_left,
    wait_settled,
)
from kvalet.actors.client import JSON_HEADERS, Client, round_times
from kvalet.actors.decisions.answer import Answer, LegEnd
from kvalet.actors.decisions.away import Away
from kvalet.actors.decisions.evolve_lease import FINISHED_REASONS
from kvalet.actors.decisions.refusal import ending, reason_of, refusal
from kvalet.actors.http_exchange import ClientGone, Exchange
from kvalet.actors.ledger import Mailbox
from kvalet.actors.leg_reader import LegReader
from kvalet.actors.parking import Berth
from kvalet.actors.vigil import Vigil
from kvalet.actors.wires import Wires
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol import llama, notices, openai
from kvalet.protocol.errors import (
    JournalFault,
    KvaletError,
    ServerFault,
    ServerLost,
    first_fault,
)
from kvalet.protocol.ids import Cells, SlotId
from kvalet.protocol.openai import ParsedRequest, Partial


class Relay:
    """One request. ``run`` returns when its answer has ended, however it did."""

    def __init__(
        self, exchange: Exchange, request: ParsedRequest, mailbox: Mailbox, wires: Wires
    ) -> None:
        self.name = mailbox.request
        self._client = Client(exchange, request)
        self._berth = Berth(wires.gate, mailbox.request)
        self._request = request
        self._mailbox = mailbox
        self._wires = wires
        self._answer = Answer(request)
        self._away = Away()
        self._vigil = Vigil(mailbox.request, self._client, self._away, wires)
        self._reader = LegReader(
            self.name, self._answer, self._away, self._client, self._vigil, self._tell
        )
        self._slots: tuple[SlotId, ...] = ()
        self._tokens: list[int] = []
        self._interrupt: KvaletError | None = None
        self._died = False
        self._generation = 0
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
                nursery.start_soon(self._vigil.run)
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
        self._tokens = await count_tokens(self._wires, self._client, request, Partial())
        per_seat = math.ceil(len(self._tokens) / max(1, len(request.prompts)))
        self._cells = Cells(per_seat)
        affinity = self._wires.gate.prefixes.shared_with(self._tokens)
        self._tell(c.PromptCounted(request=self.name, prompt=self._cells, affinity=affinity))
        while not self._over:
            event = await self._next_event()
            self._generation = self._wires.ledger.house.server.generation
            try:
                await self._act(event)
            except ServerLost as fault:
                await self._outlive(fault)

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
                self._vigil.enter("queued")
                await self._client.open()
            case e.LeaseRefused():
                self._over = True
                raise refusal(event)
            case e.LeaseGranted() | e.LeaseExtended() | e.LeaseResumed() | e.LeaseParking() if (
                self._is_overtaken()
            ):
                # Its server died meanwhile; that is in the mailbox, too.
                pass
            case e.LeaseGranted():
                if self._vigil.phase == "queued":
                    await self._client.comment(notices.ADMISSION_DONE)
                self._slots = event.slots
                await self._leg(event.credit, event.erase)
            case e.LeaseExtended():
                await self._leg(event.credit, event.erase)
            case e.LeaseResumed():
                await self._resume(event)
            case e.LeaseParking():
                await self._park(event)
            case e.LeaseParked(cause=cause) if cause:
                await self._strand()
            case e.PoolPressed(asker=asker) if asker == self.name:
                self._vigil.enter("waiting")
            case e.LeaseEnded():
                await self._ended(event)
            case _:
                await self._remark(event)

    def _is_overtaken(self) -> bool:
        lease = self._wires.ledger.house.leases.get(self.name)
        return lease is not None and lease.stranded

    async def _remark(self, event: e.AnyEvent) -> None:
        """Events that change nothing in the order of things but may be worth a comment."""
        if isinstance(event, e.LeaseRecomputed):
            self._vigil.count(recomputes=1)
            await self._client.comment(notices.PREEMPT_RECOMPUTED)
        elif isinstance(event, e.ParkSeen):
            now = trio.current_time()
            if not event.away:
                # It has only just got its cells back: its deadline begins here.
                self._vigil.heard = now
            told = self._away.see(event.away, now)
            if told:
                await self._client.comment(told)

    async def _ended(self, event: e.LeaseEnded) -> None:
        if event.reason == "context-full":
            await self._finish(event.generated)
            return
        self._over = True
        raise ending(event)

    async def _park(self, event: e.LeaseParking) -> None:
        """Move the cells out: save them if ordered and possible, then empty the slot."""
        self._vigil.enter("parked")
        self._vigil.count(parks=1)
        await self._client.comment(notices.PREEMPT_PAUSED)
        size = await self._berth.move_out(self._slots[0], event.save)
        self._wires.gate.prefixes.forget(self._slots[0])
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
        self._reader.expected = await self._berth.bring_back(self._slots[0], Cells(self._cells - 1))
        self._vigil.count(resumes=1)
        stranded = self._vigil.phase == "stranded"
        await self._client.comment(notices.SERVER_RESUMED if stranded else notices.PREEMPT_RESUMED)
        await self._leg(event.credit, ())

    async def _erase(self, slots: tuple[SlotId, ...]) -> None:
        for slot in slots:
            await self._wires.gate.reach().empty(slot)
            self._wires.gate.prefixes.forget(slot)
            self._tell(c.SlotErased(slot=slot, cells=Cells(0)))

    async def _leg(self, credit: Cells, erase: tuple[SlotId, ...]) -> None:
        """One upstream request of ``credit`` new tokens at most; then report how it ended."""
        await self._erase(erase)
        self._vigil.begin_leg()
        request, answer = self._request, self._answer
        credit = Cells(credit // request.seats)
        spent = self._cells - answer.prompt if answer.leg >= 0 else 0
        left = credit if request.cap is None else min(credit, request.cap - spent)
        answer.begin_leg(self._cells, max_tokens=left)
        self._wires.gate.prefixes.remember(self._slots, self._tokens)
        body = openai.leg_body(
            request,
            partial=answer.partial,
            max_tokens=left,
            slot=self._slots[0],
            leg=answer.leg,
            progress=self._reader.expected is not None,
        )
        lost: ServerLost | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, nursery.cancel_scope)
            try:
                await self._stream(body)
            except ServerLost as fault:
                lost = fault
            nursery.cancel_scope.cancel()
        self._vigil.enter("seam")
        if self._interrupt is not None:
            raise self._interrupt
        if self._died:
            await self._strand()
            return
        if lost is not None:
            raise lost
        if not self._over:
            await self._judge(answer.end_leg())

    async def _stream(self, body: bytes) -> None:
        upstream = self._wires.gate.reach()
        async with upstream.stream(openai.LEG_PATHS[self._request.surface], body) as response:
            if response.status_code != 200:
                await self._pass_refusal(response)
                return
            await self._client.open()
            await self._reader.read(response)

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
                    case e.LeaseParked(cause=cause) if cause:
                        self._died = True
                        self._reader.stop(scope)
                        return
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
                raise ServerLost("llama-server broke off in the middle of the answer")

    async def _spend(self) -> None:
        """The credit is used up: count what the continuation starts from, and ask for more."""
        partial = self._answer.partial
        self._tokens = await self._wires.gate.reach().count(self._request, partial)
        cells = Cells(len(self._tokens))
        check_thought(partial, cells, self._answer.prompt)
        stuck = cells <= self._cells
        self._cells = cells
        generated = cells - self._answer.prompt
        self._tell(c.CreditSpent(request=self.name, cells=cells, generated=generated, stuck=stuck))

    async def _outlive(self, fault: ServerLost) -> None:
        """The server does not answer. If it is dead the ledger says so; go on from there."""
        ledger = self._wires.ledger
        if self._over or not may_carry_over(ledger.house):
            raise fault
        if not await wait_left(ledger, self._generation):
            raise fault
        while True:
            match await self._next_event():
                case e.LeaseParked(cause=cause) if cause:
                    await self._strand()
                    return
                case e.LeaseEnded() as event:
                    await self._ended(event)
                    return
                case event:
                    await self._remark(event)

    async def _strand(self) -> None:
        """The server died under this answer: count what its client holds on the next one."""
        self._died = False
        self._berth.forget()
        self._reader.strand()
        if not self._answer.strand():
            raise ServerFault(
                "llama-server died under this answer, which cannot be continued: "
                f"{self._request.why_not}"
            )
        self._vigil.enter("stranded")
        self._vigil.count(parks=int(not self._away.lose(trio.current_time())))
        await self._client.comment(notices.SERVER_RESTARTING)
        wires, request = self._wires, self._request
        await wait_settled(wires.ledger, wires.gate)
        partial = self._answer.partial
        self._tokens = await count_tokens(wires, self._client, request, partial)
        cells = Cells(math.ceil(len(self._tokens) / max(1, len(request.prompts))))
        check_thought(partial, cells, self._answer.prompt)
        self._cells = cells
        generated = cells - self._answer.prompt
        if request.cap is not None and generated >= request.cap:
            await self._finish(generated, "length")
            return
        self._tell(
            c.PartialCounted(
                request=self.name, cells=Cells(cells * request.seats), generated=generated
            )
        )

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
        usage = round_times(self._away.added_to(self._vigil.usage))
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
