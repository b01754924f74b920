"""What the simulated pool is made of: its settings, one slot, one job, and what comes out."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from attrs import define, field, frozen

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver import constants
from kvalet.sims.fakeserver.speech import Speech

Policy = Literal["smallest", "largest", "youngest", "oldest"]
Order = Literal["head", "pass"]
ActionKind = Literal["save", "restore", "erase"]
StopType = Literal["none", "eos", "limit", "word"]

MIB: Final = 1 << 20
FULL: Final = "Context size has been exceeded."


@frozen(kw_only=True)
class Parking:
    """How a build parks. ``budget_mib`` -1 is no bound. The knobs after it are its own tests'.

    ``recompute``: what does not fit the budget gives its cells up and is computed again.
    ``restore_failures``: so many attempts to bring somebody back fail first.
    """

    budget_mib: int = -1
    asynchronous: bool = False
    recompute: bool = True
    every: int = 0
    policy: Policy = "smallest"
    resume: Order = "head"
    planner: bool = True
    fail_save: bool = False
    restore_failures: int = 0


@frozen(kw_only=True)
class PoolSettings:
    """One launch's pool. Sizes in cells; rates in tokens or bytes a second.

    ``slot_ctx`` is the most that one sequence may have. Without ``unified`` each slot has
    ``slot_ctx`` cells of its own and nothing is ever parked. ``answer_tokens``: the model
    ends its answer in a chat by then; 0: it never does.
    """

    slots: int = 4
    cells: int = 4096
    slot_ctx: int = 4096
    unified: bool = True
    batch: int = 2048
    draft_max: int = 0
    page: int = 1
    context_shift: bool = False
    clear_idle: bool = False
    store_mib: int = 0
    answer_tokens: int = 0
    alone_in_step: bool = False
    """Whether neighbours leave an answer alone: exact mode, or a wish."""
    recompute_differs: bool = False
    tokens_per_s: float = constants.TOKENS_PER_S
    prefill_per_s: float = constants.PREFILL_PER_S
    copy_bytes_per_s: float = constants.COPY_BYTES_PER_S
    cell_bytes: int = constants.CELL_BYTES
    parking: Parking | None = None

    def paged(self, tokens: int) -> int:
        """Cells that so many tokens take."""
        return -(-tokens // self.page) * self.page


@frozen(kw_only=True)
class Job:
    """One prompt to complete. ``family``: how many answers share it, this one included."""

    number: int
    prompt: tuple[int, ...]
    n_predict: int = -1
    n_keep: int = 0
    id_slot: int = -1
    cache_prompt: bool = True
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    family: int = 1
    parent: int = 0
    """The number of the first answer of the family; 0: there is none but this."""


class Phase(Enum):
    """What a slot does with its job."""

    IDLE = "idle"
    STARTED = "started"
    PREFILL = "prefill"
    SHARING = "sharing"
    """A further answer of a family waits for the prompt that it shares."""
    DECODE = "decode"


class Where(Enum):
    """Where a slot's sequence is. All but OUT hold cells."""

    HERE = "here"
    LEAVING = "leaving"
    OUT = "out"
    COMING = "coming"


@define(eq=False, kw_only=True)
class Slot:
    """One seat. ``cells`` is its sequence as it lies, or lay, in the pool."""

    number: int
    phase: Phase = Phase.IDLE
    where: Where = Where.HERE
    job: Job | None = None
    last_job: int = -1
    cells: list[int] = field(factory=list[int])
    todo: list[int] = field(factory=list[int])
    """Tokens still to be evaluated: of the prompt, or of a sequence that lost its cells."""
    replaying: bool = False
    sampled: int = 0
    """The last token that was said; its own cell comes with the next step."""
    summed: int = 0
    summed_cells: int = 0
    """``summed`` is the digest of so many cells."""
    used_at: float = 0.0
    order: int = 0
    """Launches in a row: the lower, the older."""
    shared: int = 0
    """Cells at the front that a family has in common, also after it has ended."""
    family: int = 0
    """Whose those are: the number of the family's first job."""
    speech: Speech = field(factory=Speech)
    reused: int = 0
    processed: int = 0
    predicted: int = 0
    drafted: int = 0
    accepted: int = 0
    begun_at: float = 0.0
    prompt_done_at: float = 0.0
    shifts: int = 0
    parks: int = 0
    recomputes: int = 0
    dropped: bool = False
    """The present park has dropped its cells."""
    parked_at: float = 0.0
    lands_at: float = 0.0
    failures: int = 0

    @property
    def busy(self) -> bool:
        """Whether it has a job, parked or not."""
        return self.phase is not Phase.IDLE

    @property
    def running(self) -> bool:
        """Whether its job has its cells and may be in the next step."""
        return self.busy and self.where is Where.HERE

    @property
    def length(self) -> int:
        """The whole sequence, wherever it is: what ``n_prompt_tokens`` says."""
        return len(self.cells) or (len(self.todo) if self.where is Where.OUT else 0)

    @property
    def work(self) -> Job:
        """The job of a slot that is busy."""
        assert self.job is not None
        return self.job


@frozen(kw_only=True)
class Timings:
    """One request's work, times in milliseconds."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


@frozen(kw_only=True)
class Begun:
    """The prompt is being processed: a stream's headers may go out."""

    job: int


@frozen(kw_only=True)
class Progress:
    """So much of the prompt has been evaluated."""

    job: int
    total: int
    cache: int
    processed: int
    time_ms: int
    timings: Timings


@frozen(kw_only=True)
class Said:
    """Some text and the one token that let it out; ids of half characters go unsaid."""

    job: int
    text: str
    ids: tuple[int, ...]
    predicted: int
    evaluated: int
    timings: Timings


@frozen(kw_only=True)
class Ended:
    """A whole answer. ``cached``: cells that stay with the slot."""

    job: int
    slot: int
    text: str
    ids: tuple[int, ...]
    evaluated: int
    predicted: int
    cached: int
    stop_type: StopType
    stopping_word: str
    truncated: bool
    parks: int
    recomputes: int
    timings: Timings


@frozen(kw_only=True)
class Failed:
    """The job has ended with an error of the server's own shape."""

    job: int
    code: int
    kind: str
    message: str
    tokens: int = 0
    n_ctx: int = 0


@frozen(kw_only=True)
class Noticed:
    """Something about a park that a build with comments tells its client."""

    job: int
    notice: Notice


@frozen(kw_only=True)
class Action:
    """Something to do with an idle slot. ``tokens``: what a restore puts into it."""

    number: int
    kind: ActionKind
    slot: int
    tokens: tuple[int, ...] = ()


@frozen(kw_only=True)
class Acted:
    """A slot action is through: the cells it was about. Not ``done``: there was no room."""

    number: int
    tokens: tuple[int, ...]
    done: bool = True


Output = Begun | Progress | Said | Ended | Failed | Noticed | Acted


@define(kw_only=True)
class Step:
    """One turn of the server. ``early`` is true at its beginning, ``late`` ``seconds`` later."""

    early: list[Output] = field(factory=list[Output])
    late: list[Output] = field(factory=list[Output])
    log: list[str] = field(factory=list[str])
    seconds: float = 0.0
    decoded: int = 0
    """Tokens sampled in it."""


@define(kw_only=True)
class Totals:
    """What ``/metrics`` counts."""

    prompt_tokens: int = 0
    prompt_cached: int = 0
    prompt_s: float = 0.0
    predicted: int = 0
    predicted_s: float = 0.0
    decodes: int = 0
    busy_slots: int = 0
    tokens_max: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
