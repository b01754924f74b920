"""Chunks of an OpenAI stream: what a relay must know of them."""

from __future__ import annotations

from typing import cast

import msgspec

from kvalet.protocol.errors import ServerFault
from kvalet.protocol.llama import Timings

_ABSENT = b"null"
JSON_FAULTS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Everything that decoding foreign bytes can raise."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the prompt is: ``processed`` of ``total`` tokens, ``cache`` of them reused."""

    total: int = 0
    cache: int = 0
    processed: int = 0


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the prompt that was reused."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one upstream request, as the server bills them."""

    completion_tokens: int = 0
    prompt_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ParkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How often a server that parks by itself has parked the request, and how many of those parks
    dropped its cells. None: not said."""

    parks: int | None = None
    recomputes: int | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event of a chat or text stream, reduced to its first choice.

    ``role_only``: it only opens the message. ``error``: the error object's JSON, None when
    there is none. ``done``: it is the ``[DONE]`` that follows a success.
    """

    id: str = ""
    created: int = 0
    index: int = 0
    text: str = ""
    reasoning: str = ""
    role_only: bool = False
    tool_call: bool = False
    finish: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    progress: Progress | None = None
    record: ParkRecord | None = None
    error: bytes | None = None
    done: bool = False


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Wire(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: Progress | None = None
    preempt: object = None
    error: msgspec.Raw = msgspec.Raw(_ABSENT)


_DECODER = msgspec.json.Decoder(_Wire | None)
_NO_DELTA = _Delta()
_NO_CHOICE = _Choice()
_DONE = Chunk(done=True)
# b10434 opens a stream of several prompts with a bare null.
_NOTHING = Chunk()


def read_chunk(payload: bytes) -> Chunk:
    """The chunk in one ``data:`` payload. ServerFault when it is not one."""
    if payload == b"[DONE]":
        return _DONE
    try:
        wire = _DECODER.decode(payload)
    except JSON_FAULTS as error:
        raise garbage(error) from None
    return _NOTHING if wire is None else _chunk(wire)


def _chunk(wire: _Wire) -> Chunk:
    choice = wire.choices[0] if wire.choices else _NO_CHOICE
    delta = choice.delta or _NO_DELTA
    text = delta.content or choice.text or ""
    reasoning = delta.reasoning_content or ""
    tool_call = bool(delta.tool_calls)
    silent = not (text or reasoning or tool_call or choice.finish_reason)
    error = bytes(wire.error)
    return Chunk(
        id=wire.id or "",
        created=wire.created or 0,
        index=choice.index,
        text=text,
        reasoning=reasoning,
        role_only=silent and delta.role is not None,
        tool_call=tool_call,
        finish=choice.finish_reason,
        usage=wire.usage,
        timings=wire.timings,
        progress=wire.prompt_progress,
        record=_record(wire.preempt),
        error=None if error == _ABSENT else error,
    )


def _record(said: object) -> ParkRecord | None:
    """What no build can break: an odd record counts as none."""
    if not isinstance(said, dict):
        return None
    counts = cast(dict[str, object], said)
    return ParkRecord(parks=_count(counts, "parks"), recomputes=_count(counts, "recomputes"))


def _count(counts: dict[str, object], name: str) -> int | None:
    count = counts.get(name)
    return count if type(count) is int and count >= 0 else None


class StopTail:
    """Tells whether text might be running into a stop string, over legs that each forget.

    It needs only the last ``width`` characters of the answer, which ``keep`` carries on.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self.width = max((len(stop) for stop in stops), default=1) - 1 if any(stops) else 0

    def keep(self, tail: str, text: str) -> str:
        """The tail after ``text`` has followed ``tail``."""
        if not self.width:
            return ""
        return (tail + text)[-self.width :]

    def unsettled(self, tail: str) -> bool:
        """Whether ``tail`` ends with the beginning, not the whole, of a stop string."""
        return any(
            tail.endswith(stop[:size])
            for stop in self._stops
            for size in range(1, min(len(stop) - 1, len(tail)) + 1)
        )


def garbage(error: Exception) -> ServerFault:
    """The fault of an event that cannot be read; ``error`` says what is wrong with it."""
    return ServerFault(
        f"llama-server sent a stream event that is not understood: {error}",
        code="server_answer_malformed",
    )
