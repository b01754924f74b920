"""Reads one answer's streams, leg after leg: what each event means, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import trio

from kvalet.actors.client import Client
from kvalet.actors.decisions.answer import Answer, Output
from kvalet.actors.decisions.away import Away, Heard
from kvalet.actors.vigil import Vigil
from kvalet.protocol import commands as c
from kvalet.protocol.ids import Cells, RequestId
from kvalet.protocol.sse import SseEvent, SseSplitter

PROOF_CHUNKS = 8
"""Events with text after which a chat that was resumed on another server is not suspected of
having killed the former one."""


class LegReader:
    """The bytes of a leg in; text, comments and reports out.

    ``expected`` is how many cells the leg after a resume should reuse, None for any other.
    """

    def __init__(
        self,
        request: RequestId,
        answer: Answer,
        away: Away,
        client: Client,
        vigil: Vigil,
        tell: Callable[[c.Command], None],
    ) -> None:
        self.expected: Cells | None = None
        self._request = request
        self._answer = answer
        self._away = away
        self._client = client
        self._vigil = vigil
        self._tell = tell
        self._splitter = SseSplitter()
        self._unproven = 0
        self._emitting = False
        self._stopped: trio.CancelScope | None = None

    def stop(self, leg: trio.CancelScope) -> None:
        """Cut the leg where no text is lost: at once, or behind what is being sent. What has
        been fed to the answer counts as heard."""
        self._stopped = leg
        if not self._emitting:
            self._cut()

    def _cut(self) -> None:
        if self._stopped is not None:
            self._stopped.cancel()

    def strand(self) -> None:
        """The stream's server died: half an event is none, and the next server must prove that
        this chat is not what kills it."""
        self._splitter = SseSplitter()
        self.expected = None
        self._unproven = PROOF_CHUNKS
        self._stopped = None

    async def read(self, response: httpx.Response) -> None:
        """Take a whole stream in. Raises ServerFault for what is none."""
        async for piece in response.aiter_raw():
            await self._take(self._splitter.feed(piece))
        await self._take(self._splitter.flush())

    async def _take(self, events: list[SseEvent]) -> None:
        """Feed events to the answer; send what may go out, in one write."""
        if self._stopped is not None:
            # Read in the very moment of the cut: it is generated again.
            return
        outputs: list[Output] = []
        for event in events:
            output = self._answer.feed(event)
            if event.data is not None:
                self._vigil.hear(token=output.reused is None)
                outputs += self._told(self._away.datum(self._vigil.heard))
            outputs += self._note(output)
            outputs.append(output)
        # While the client is slow to take its bytes nobody listens to the server.
        vigil = self._vigil
        phase, vigil.phase, since = vigil.phase, "sending", trio.current_time()
        self._emitting = True
        await self._client.emit(outputs)
        self._emitting = False
        vigil.phase = phase
        vigil.heard += trio.current_time() - since
        self._cut()

    def _note(self, output: Output) -> list[Output]:
        """Take down what is no text, and say what the client is told of it first."""
        told: list[Output] = []
        if output.notice is not None:
            self._vigil.hear()
            told += self._told(self._away.hear(output.notice, output.about, self._vigil.heard))
        if output.record is not None:
            told += self._told(self._away.settle(output.record))
        if output.reused is not None and self.expected is not None:
            expected, self.expected = self.expected, None
            reused = Cells(min(output.reused, expected))
            self._tell(c.CacheSeen(request=self._request, expected=expected, reused=reused))
        if self._unproven and output.data:
            self._unproven -= 1
            if not self._unproven:
                self._tell(c.ProgressSeen(request=self._request))
        return told

    def _told(self, heard: Heard) -> list[Output]:
        if heard.name:
            notice, away = heard.name, self._away.parked
            self._tell(c.NoticeHeard(request=self._request, notice=notice, away=away))
        return [Output(raw=heard.comment)] if heard.comment else []
