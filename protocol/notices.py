"""Comments about parking: what a llama-server says, and what kvalet tells its clients."""

from __future__ import annotations

import re
from enum import Enum

from kvalet.protocol.sse import comment

ADMISSION_WAIT = comment("admission-wait")
ADMISSION_DONE = comment("admission-done")
PREEMPT_PAUSED = comment("preempt-paused")
PREEMPT_RESUMED = comment("preempt-resumed")
PREEMPT_KEEPALIVE = comment("preempt-keepalive")
PREEMPT_RECOMPUTED = comment("preempt-recomputed")
SERVER_RESTARTING = comment("server-restarting")
SERVER_RESUMED = comment("server-resumed")


class Notice(Enum):
    """What a llama-server that parks by itself writes between two events of a stream."""

    PREEMPTED = "preempted"
    RESUMED = "resumed"
    KEEPALIVE = "preempt-keepalive"
    RECOMPUTED = "recomputed"


_NOTICE = re.compile(rb"(preempted|resumed|preempt-keepalive|recomputed)(?: (\d{1,9}))?")


def read_notice(text: bytes) -> tuple[Notice, int] | None:
    """The notice in a comment's text and the index of the prompt it is about.

    A request with several prompts numbers its notices, ``: preempted 1``; the bare form
    is about prompt 0. None for pings and for every comment of another vocabulary.
    """
    found = _NOTICE.fullmatch(text)
    if found is None:
        return None
    return Notice(found[1].decode()), int(found[2] or 0)


class NoticeState:
    """One stream's parks, folded from the notices on its own wire and nothing else.

    The stream is parked while any of its prompts is. A surprise in the order changes no
    count that it does not prove; it is counted in ``anomalies`` and named to the caller.
    """

    def __init__(self) -> None:
        self.parks = 0
        self.resumes = 0
        self.recomputes = 0
        self.anomalies = 0
        self.heard = False
        self._parked: set[int] = set()

    @property
    def parked(self) -> bool:
        """Whether the server holds this stream parked right now."""
        return bool(self._parked)

    def hear(self, notice: Notice, prompt: int = 0) -> str | None:
        """Fold one notice in. Returns the name of the anomaly, if it is one."""
        self.heard = True
        if notice is Notice.PREEMPTED:
            return self._park(prompt)
        if notice is Notice.RESUMED:
            return self._resume(prompt)
        if notice is Notice.KEEPALIVE:
            return None if self._parked else self._odd("keepalive-without-park")
        self.recomputes += 1
        return self._odd("recomputed-while-parked") if prompt in self._parked else None

    def datum(self, prompt: int = 0) -> str | None:
        """Fold one event with data in: whoever gets data is not parked (any more)."""
        if prompt not in self._parked:
            return None
        self._resume(prompt)
        return self._odd("data-while-parked")

    def lose(self) -> None:
        """The server is gone, and with it whatever it held parked."""
        self._parked.clear()

    def _park(self, prompt: int) -> str | None:
        if prompt in self._parked:
            return self._odd("preempted-twice")
        self._parked.add(prompt)
        self.parks += 1
        return None

    def _resume(self, prompt: int) -> str | None:
        if prompt not in self._parked:
            return self._odd("resumed-without-park")
        self._parked.discard(prompt)
        self.resumes += 1
        return None

    def _odd(self, name: str) -> str:
        self.anomalies += 1
        return name
