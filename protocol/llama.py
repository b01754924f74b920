"""llama-server's own answers, read tolerantly: unknown fields pass, missing ones default."""

from __future__ import annotations

from pathlib import PurePath
from typing import TypeVar

import msgspec

from kvalet.protocol.errors import ServerFault

_MESSAGE_CHARS_MAX = 500

T = TypeVar("T")


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """One request's work. ``cache_n`` prompt tokens were reused, ``prompt_n`` computed."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /props``. ``n_ctx`` is one slot's limit, which need not be the pool's size.

    What a build leaves out stays empty or 0. ``exact`` is ``exact_concurrency``, None for a build
    that does not know the mode: such a build says nothing in a stream that it parks.
    """

    n_ctx: int = 0
    slots: int = 0
    exact: bool | None = None
    build: str = ""
    model_path: str = ""
    model_alias: str = ""
    sleeping: bool = False
    template_caps: dict[str, bool] = {}
    modalities: dict[str, bool] = {}

    @property
    def model(self) -> str:
        """The model's alias, else its file name: an alias that nobody gave is the whole path."""
        alias = self.model_alias or self.model_path
        return PurePath(alias).stem if alias == self.model_path else alias


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``GET /slots``. ``n_prompt_tokens``: its cells, prompt and answer.

    A build that parks says ``is_preempted`` of a slot whose cells are out of the pool, and
    ``is_transferring`` of one that holds them while they are copied.
    """

    id: int
    n_ctx: int = 0
    is_processing: bool = False
    n_prompt_tokens: int = 0
    n_prompt_tokens_cache: int = 0
    n_prompt_tokens_processed: int = 0
    is_preempted: bool = False
    is_transferring: bool = False

    @property
    def is_parked(self) -> bool:
        """Whether it is busy and holds no cells."""
        return self.is_preempted and not self.is_transferring

    @property
    def resident(self) -> int:
        """Cells of the pool that it occupies."""
        return 0 if self.is_parked else self.n_prompt_tokens


class SlotAction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a save, restore or erase: cells (``n_saved``…) and bytes (``n_written``)."""

    id_slot: int
    n_saved: int = 0
    n_written: int = 0
    n_restored: int = 0
    n_read: int = 0
    n_erased: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The final object of ``POST /completion``. ``tokens_cached``: resident cells."""

    content: str = ""
    tokens: list[int] = []
    stop_type: str = "none"
    truncated: bool = False
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    timings: Timings = Timings()


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says went wrong. The two counts are there when a prompt is too large."""

    message: str = ""
    type: str = ""
    code: int | str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class _GenerationSettings(msgspec.Struct, frozen=True):
    n_ctx: int = 0


class _PropsWire(msgspec.Struct):
    default_generation_settings: _GenerationSettings = _GenerationSettings()
    total_slots: int = 0
    exact_concurrency: object = None
    build_info: str = ""
    model_path: str = ""
    model_alias: str | None = None
    is_sleeping: bool = False
    chat_template_caps: dict[str, bool] = {}
    modalities: dict[str, bool] = {}


class _Piece(msgspec.Struct):
    id: int


class _TokensWire(msgspec.Struct):
    tokens: list[int | _Piece]


class _TemplateWire(msgspec.Struct):
    prompt: str


class _ErrorWire(msgspec.Struct):
    error: ErrorReport | str


def decode_props(body: bytes) -> Props:
    """``GET /props``. ServerFault if it is not that."""
    wire = _decode(body, _PropsWire, "/props")
    return Props(
        n_ctx=wire.default_generation_settings.n_ctx,
        slots=wire.total_slots,
        # That the key is there tells more than its value.
        exact=None if wire.exact_concurrency is None else wire.exact_concurrency is True,
        build=wire.build_info,
        model_path=wire.model_path,
        model_alias=wire.model_alias or "",
        sleeping=wire.is_sleeping,
        template_caps=wire.chat_template_caps,
        modalities=wire.modalities,
    )


def decode_slots(body: bytes) -> list[SlotState]:
    """``GET /slots``. ServerFault if it is not that."""
    return _decode(body, list[SlotState], "/slots")


def decode_tokens(body: bytes) -> list[int]:
    """``POST /tokenize``, with or without pieces. ServerFault if it is not that."""
    wire = _decode(body, _TokensWire, "/tokenize")
    return [token if isinstance(token, int) else token.id for token in wire.tokens]


def decode_template(body: bytes) -> str:
    """``POST /apply-template``: the prompt. ServerFault if it is not that."""
    return _decode(body, _TemplateWire, "/apply-template").prompt


def decode_slot_action(body: bytes) -> SlotAction:
    """``POST /slots/N?action=…``. ServerFault if it is not that."""
    return _decode(body, SlotAction, "/slots action")


def decode_completion(body: bytes) -> Completion:
    """``POST /completion``, its whole or last object. ServerFault if it is not that."""
    return _decode(body, Completion, "/completion")


def decode_error(body: bytes) -> ErrorReport:
    """An error body, or the object inside its ``error``. Never fails: the text is the message."""
    try:
        error = msgspec.json.decode(body, type=_ErrorWire).error
        return ErrorReport(message=error) if isinstance(error, str) else error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        report = msgspec.json.decode(body, type=ErrorReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        report = ErrorReport()
    if report.message:
        return report
    return ErrorReport(message=body[:_MESSAGE_CHARS_MAX].decode(errors="replace"))


def _decode(body: bytes, shape: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ServerFault(
            f"llama-server's answer to {what} is not understood: {error}",
            code="server_answer_malformed",
        ) from None
