"""Watches over one request: what its time is spent on, what its client is told meanwhile."""

from __future__ import annotations

import math

import trio

from kvalet.actors.client import Client, count
from kvalet.actors.decisions.away import Away
from kvalet.actors.wires import Wires
from kvalet.protocol import commands as c
from kvalet.protocol import notices
from kvalet.protocol.ids import RequestId
from kvalet.protocol.openai import KvaletUsage

PING = b":\n\n"
PING_AFTER_S = 10.0
"""A stream silent for so long (a long prefill) gets a bare ping of ours."""

LOOK_MIN_S = 0.001
LISTENING = ("prefill", "decode")
KEPT_ALIVE = {
    "queued": notices.ADMISSION_WAIT,
    "parked": notices.PREEMPT_KEEPALIVE,
    "stranded": notices.PREEMPT_KEEPALIVE,
}


class Vigil:
    """One request's phase, and since when; ``usage`` is the time spent and the parks.

    ``heard`` is the last sign of life of its stream, in seconds of trio's clock.
    """

    def __init__(self, request: RequestId, client: Client, away: Away, wires: Wires) -> None:
        self.phase = "arriving"
        self.usage = KvaletUsage()
        self.heard = trio.current_time()
        self._since = self.heard
        self._request = request
        self._client = client
        self._away = away
        self._wires = wires

    def enter(self, phase: str) -> None:
        """From now on the request is in ``phase``."""
        now = trio.current_time()
        spent = now - self._since
        if self.phase == "queued":
            self.usage = count(self.usage, waited_s=spent)
        elif self.phase in ("parked", "stranded"):
            self.usage = count(self.usage, parked_s=spent)
        self.phase, self._since = phase, now

    def count(self, **more: int) -> None:
        """Add to the parks, resumes or recomputes."""
        self.usage = count(self.usage, **more)

    def begin_leg(self) -> None:
        """A leg is about to be sent: its deadline begins."""
        self.enter("prefill")
        self.heard = trio.current_time()

    def hear(self, *, token: bool = False) -> None:
        """The stream gave a sign of life. A prompt's progress is one, but not its first
        ``token``."""
        self.heard = trio.current_time()
        self._wires.gate.hear()
        if token and self.phase == "prefill":
            self.phase = "decode"

    async def run(self) -> None:
        """Keep a waiting client's connection alive, and watch for silence while one runs."""
        while True:
            await trio.sleep(self._till_next_look())
            if self.phase in LISTENING:
                self._watch_silence()
            ping = KEPT_ALIVE.get(self.phase)
            if self._away.parked:
                ping = notices.PREEMPT_KEEPALIVE
            if ping is None and trio.current_time() - self._client.sent_at >= PING_AFTER_S:
                ping = PING
            if ping is not None:
                await self._client.try_comment(ping)

    def _till_next_look(self) -> float:
        """Seconds to the next keep-alive, or to the deadline that comes before it."""
        left = self._patience() - (trio.current_time() - self.heard)
        # A rest too small to be added to the time of day would never pass.
        return min(self._wires.keepalive_s, max(left, LOOK_MIN_S if left > 0 else math.inf))

    def _patience(self) -> float:
        return self._wires.first_token_s if self.phase == "prefill" else self._wires.stall_s

    def _watch_silence(self) -> None:
        now = trio.current_time()
        silent_s = now - self.heard
        if silent_s >= self._patience():
            phase = "first-token" if self.phase == "prefill" else "decode"
            alone = now - self._wires.gate.heard_at >= self._patience()
            self._wires.ledger.tell(
                c.SilenceSeen(request=self._request, phase=phase, silent_s=silent_s, alone=alone)
            )
