"""What the ledger is asked, and what it is told.

Requests are imperative (``Arrive``, ``Leave``); reports of the world end in
``Counted``, ``Spent``, ``Ended``, ``Freed``, ``Seen``, ``Heard`` or ``Read``. A command
carries numbers, ids and codes only: no prompt, answer, key or token text.
"""

from __future__ import annotations

import msgspec

from kvalet.protocol.ids import Cells, RequestId, SlotId


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the scheduler is told once, at the start of a journal.

    ``block_min``, ``first_block`` and ``quantum`` are cells: the smallest credit worth a
    leg, the credit a newcomer should start with, and what a resumed chat may run before
    it can be parked again. ``park_ram_bytes`` bounds what is saved (None: no bound); above
    it a park drops the cells and they are computed again. A server that dies is started again at
    most ``restarts_max`` times in ``restart_window_s`` seconds: at once, then after
    ``restart_wait_s`` seconds, and four times as many with each further end.
    """

    policy: str = "fair-share"
    block_min: int = 16
    first_block: int = 64
    quantum: int = 48
    resume_max: int = 32
    promote_after: int = 3
    queue_max: int = 1024
    park_ram_bytes: int | None = None
    preempt: bool = True
    first_token_s: float = 1200.0
    stall_s: float = 120.0
    restarts_max: int = 0
    restart_window_s: float = 300.0
    restart_wait_s: float = 1.0


DEFAULTS = Settings()
"""What applies where nothing else is said, in every configuration."""


class _Command(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    """Base of all commands: immutable, tagged by hand, strict about its fields."""


class OpenHouse(_Command, frozen=True, kw_only=True, tag="open-house"):
    """A process takes the journal over; whatever was open before is lost."""

    settings: Settings
    torn_bytes: int = 0


class Arrive(_Command, frozen=True, kw_only=True, tag="arrive"):
    """A request has come in. ``cap`` is its own token limit; ``seats`` the slots it needs.

    ``park_every``: park it after so many tokens even without need (a test's wish; 0: never).
    """

    request: RequestId
    surface: str
    streaming: bool
    cap: int | None = None
    pausable: bool = True
    seats: int = 1
    park_every: int = 0


class PromptCounted(_Command, frozen=True, kw_only=True, tag="prompt-counted"):
    """The prompt takes exactly ``prompt`` cells. ``affinity``: (slot, common prefix) pairs."""

    request: RequestId
    prompt: Cells
    affinity: tuple[tuple[SlotId, Cells], ...] = ()


class CreditSpent(_Command, frozen=True, kw_only=True, tag="credit-spent"):
    """A stream stands at the end of its credit: ``cells`` resident, ``generated`` so far.

    ``stuck`` says that the whole leg settled no text (half a character, half a stop
    string), so the next block must be larger.
    """

    request: RequestId
    cells: Cells
    generated: int
    stuck: bool = False


class AnswerEnded(_Command, frozen=True, kw_only=True, tag="answer-ended"):
    """The answer is complete; the slot may not be idle yet. ``reason``: stop, length, …"""

    request: RequestId
    reason: str
    cells: Cells
    generated: int


class Leave(_Command, frozen=True, kw_only=True, tag="leave"):
    """The request ends early: its client left, or it failed (``reason``)."""

    request: RequestId
    reason: str = "left"


class CellsFreed(_Command, frozen=True, kw_only=True, tag="cells-freed"):
    """A parked chat's slot is empty now. ``method`` save keeps ``saved_bytes`` of its cells."""

    request: RequestId
    method: str
    cells: Cells
    saved_bytes: int = 0


class CacheSeen(_Command, frozen=True, kw_only=True, tag="cache-seen"):
    """The leg after a resume reused ``reused`` of ``expected`` cells; the rest is computed."""

    request: RequestId
    expected: Cells
    reused: Cells


class SlotSeen(_Command, frozen=True, kw_only=True, tag="slot-seen"):
    """The slots of an ended lease are idle; ``residue`` cells stay behind in its first slot."""

    request: RequestId
    residue: Cells = Cells(0)


class SlotErased(_Command, frozen=True, kw_only=True, tag="slot-erased"):
    """An idle slot's residue is gone."""

    slot: SlotId
    cells: Cells


class PartialCounted(_Command, frozen=True, kw_only=True, tag="partial-counted"):
    """What the client of a stranded chat holds, counted anew: ``cells`` with its prompt,
    ``generated`` of them its answer's."""

    request: RequestId
    cells: Cells
    generated: int


class ProgressSeen(_Command, frozen=True, kw_only=True, tag="progress-seen"):
    """A chat that was running when a server died decodes again: it is not what killed it."""

    request: RequestId


class SilenceSeen(_Command, frozen=True, kw_only=True, tag="silence-seen"):
    """A stream sent no datum for ``silent_s``; ``phase`` is ``first-token`` or ``decode``.

    ``alone``: the server sent no datum on any other stream either.
    """

    request: RequestId
    phase: str
    silent_s: float
    alone: bool = False


class NoticeHeard(_Command, frozen=True, kw_only=True, tag="notice-heard"):
    """The server announced something about this stream's park, or a surprise in order.

    ``away``: afterwards the stream, or a part of it, is parked by the server.
    """

    request: RequestId
    notice: str
    away: bool = False


class PressureRead(_Command, frozen=True, kw_only=True, tag="pressure-read"):
    """One reading of ``/slots``: (slot, resident cells, busy) for every slot, and those that the
    server holds ``parked``."""

    slots: tuple[tuple[SlotId, Cells, bool], ...]
    parked: tuple[SlotId, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server is to be started with, where it differs from the settings kvalet runs by.

    ``model`` is a file, ``ctx`` the pool in cells, ``exact`` the wish for exact concurrency,
    ``server_args`` what is passed to llama-server; None: as the settings have it. ``armed`` is
    what was resolved of all wishes for exact concurrency, where it has changed.
    """

    model: str | None = None
    ctx: int | None = None
    parallel: int | None = None
    mode: str | None = None
    exact: str | None = None
    armed: str | None = None
    server_args: tuple[str, ...] | None = None


class LoadAsked(_Command, frozen=True, kw_only=True, tag="load-asked"):
    """Somebody wants another model, or other settings, from now on."""

    load: Load


class UnloadAsked(_Command, frozen=True, kw_only=True, tag="unload-asked"):
    """Somebody wants no server until the next load."""


class LaunchPlanned(_Command, frozen=True, kw_only=True, tag="launch-planned"):
    """A launch is about to happen with this argv (secrets removed).

    ``native_ctx`` is the context the model was trained for, ``max_ctx`` the most that is
    planned to fit; 0: not known.
    """

    generation: int
    argv: tuple[str, ...]
    warnings: tuple[tuple[str, str], ...] = ()
    native_ctx: Cells = Cells(0)
    max_ctx: Cells = Cells(0)


class SpawnSeen(_Command, frozen=True, kw_only=True, tag="spawn-seen"):
    """The child runs as ``pid`` and will listen at ``url``."""

    generation: int
    pid: int
    url: str


class ReadySeen(_Command, frozen=True, kw_only=True, tag="ready-seen"):
    """The server answers: its build, pool and slots. ``headroom`` is kept free at all times.

    ``parks``: this launch made it park chats by itself; ``notices``: it says so in their streams.
    ``given`` is what the launch gave up; ``drafting`` are the types of drafting it runs with,
    ``drafting_asked`` those that were asked for; ``split`` is none, layer or tensor.
    """

    generation: int
    url: str
    build: str
    model: str
    cells: Cells
    slots: int
    headroom: Cells
    pid: int | None = None
    parks: bool = False
    notices: bool = False
    given: tuple[str, ...] = ()
    drafting: tuple[str, ...] = ()
    drafting_asked: tuple[str, ...] = ()
    split: str = ""


class ExactSeen(_Command, frozen=True, kw_only=True, tag="exact-seen"):
    """How a launch came up: who parks (``mode``), and exact concurrency, ``on``, ``off`` or
    ``unavailable`` with the reason."""

    generation: int
    mode: str
    state: str
    reason: str = ""


class MemoryFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that takes memory, in bytes: as it was planned, and as the server reported it."""

    name: str
    planned: int
    reported: int

    @property
    def excess(self) -> int:
        """Bytes that the server took beyond the plan; below zero where it took less."""
        return self.reported - self.planned


class MemorySeen(_Command, frozen=True, kw_only=True, tag="memory-seen"):
    """What the server says that it allocated, beside the plan. ``exact``: no figure differs."""

    generation: int
    figures: tuple[MemoryFigure, ...]
    exact: bool


class ProbeSeen(_Command, frozen=True, kw_only=True, tag="probe-seen"):
    """The park method that a probe proved for this model: ``save`` or ``recompute``."""

    generation: int
    method: str
    saved: Cells = Cells(0)
    reused: Cells = Cells(0)
    detail: str = ""


class ExitSeen(_Command, frozen=True, kw_only=True, tag="exit-seen"):
    """The child is gone. ``code`` is its status, negative for a signal; ``reason`` a line, and
    ``cause`` its kind: memory, assertion, killed…"""

    generation: int
    code: int
    planned: bool
    reason: str = ""
    cause: str = ""


class HangSeen(_Command, frozen=True, kw_only=True, tag="hang-seen"):
    """The child lives and answers nothing, for ``silent_s`` seconds."""

    generation: int
    silent_s: float


class CloseHouse(_Command, frozen=True, kw_only=True, tag="close-house"):
    """kvalet stops and waits no longer: whatever is open ends now, each with its error."""

    reason: str


Command = (
    OpenHouse
    | CloseHouse
    | Arrive
    | PromptCounted
    | CreditSpent
    | AnswerEnded
    | Leave
    | CellsFreed
    | CacheSeen
    | SlotSeen
    | SlotErased
    | PartialCounted
    | ProgressSeen
    | SilenceSeen
    | NoticeHeard
    | PressureRead
    | LoadAsked
    | UnloadAsked
    | LaunchPlanned
    | SpawnSeen
    | ReadySeen
    | ExactSeen
    | MemorySeen
    | ProbeSeen
    | ExitSeen
    | HangSeen
)
