"""One stream on a server that parks by itself: what its client is told of it, and the counts.

Pure. A request with several prompts is away while any of them is.
"""

from __future__ import annotations

from attrs import frozen
from msgspec.structs import replace

from kvalet.protocol import notices
from kvalet.protocol.notices import Notice, NoticeState
from kvalet.protocol.openai import KvaletUsage, ParkRecord


@frozen
class Heard:
    """What one notice means: ``comment`` for the client, ``name`` for the journal (empty: nothing
    to write down)."""

    comment: bytes = b""
    name: str = ""


NOTHING = Heard()


class Away:
    """Follows the server's notices on one stream."""

    def __init__(self) -> None:
        self._state = NoticeState()
        self._since = 0.0
        self.parked_s = 0.0
        """Seconds that the stream was away, all its parks that have ended together."""

    @property
    def parked(self) -> bool:
        """Whether the server has the stream, or a part of it, parked."""
        return self._state.parked

    def hear(self, notice: Notice, prompt: int, now: float) -> Heard:
        """Take one notice in, at ``now`` in seconds of the caller's clock."""
        was = self.parked
        odd = self._state.hear(notice, prompt)
        name = odd or notice.value
        if notice is Notice.KEEPALIVE:
            # Ours keep the client, theirs renew the deadline; only a surprise is worth a line.
            return Heard(name=odd or "")
        if notice is Notice.RECOMPUTED:
            return Heard(notices.PREEMPT_RECOMPUTED, name)
        return Heard(self._turned(was, now), name)

    def datum(self, now: float) -> Heard:
        """Take in that data came: whoever gets data is not parked any more."""
        was = self.parked
        odd = self._state.datum()
        return Heard(self._turned(was, now), odd) if odd else NOTHING

    def see(self, parked: bool, now: float) -> bytes:
        """Take in what a reading of the slots says, on a build that is silent about its parks.
        Returns the comment for the client; the reading is in the journal already."""
        if parked == self.parked:
            return b""
        return self.hear(Notice.PREEMPTED if parked else Notice.RESUMED, 0, now).comment

    def lose(self, now: float) -> bool:
        """The server died: whoever it held parked is away no more. Whether it held the stream."""
        was = self.parked
        self._state.lose()
        self._turned(was, now)
        return was

    def settle(self, record: ParkRecord | None) -> Heard:
        """The server's own count at the end: a recompute that nobody announced is told now."""
        counted = (record.recomputes if record else None) or 0
        if counted <= self._state.recomputes:
            return NOTHING
        self._state.recomputes = counted
        return Heard(notices.PREEMPT_RECOMPUTED, Notice.RECOMPUTED.value)

    def added_to(self, usage: KvaletUsage) -> KvaletUsage:
        """``usage`` with this stream's counts."""
        state = self._state
        return replace(
            usage,
            parks=usage.parks + state.parks,
            resumes=usage.resumes + state.resumes,
            recomputes=usage.recomputes + state.recomputes,
            parked_s=usage.parked_s + self.parked_s,
        )

    def _turned(self, was: bool, now: float) -> bytes:
        if self.parked and not was:
            self._since = now
            return notices.PREEMPT_PAUSED
        if was and not self.parked:
            self.parked_s += now - self._since
            return notices.PREEMPT_RESUMED
        return b""
