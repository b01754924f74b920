"""Requests of the surfaces ``openai.chat`` and ``openai.completions``: peeked at, kept as bytes.

Only the fields that admission, legs and stops depend on are read. Every other field keeps
the exact bytes the client sent.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from kvalet.protocol.errors import ClientFault

CHAT = "openai.chat"
COMPLETIONS = "openai.completions"

CAP_NAMES = ("n_predict", "max_completion_tokens", "max_tokens")
"""The names a token limit goes by; the first one present counts, as in llama-server."""

INT_MAX = 2**31 - 1
SEED_RANDOM = 2**32 - 1
"""The seed that asks llama-server for a random one."""

_SEATS_NAMES = ("n_cmpl", "n")
_BLANK = {b"null", b"false", b"0", b"0.0", b'""', b"[]", b"{}"}
_JSON_FAULTS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``fields`` hold the client's bytes by name, ``null`` ones included.

    ``cap``: its own token limit, None for none. ``seats``: slots it occupies at once.
    ``prompts``: the prompts of a text completion, each as JSON. ``why_not`` says what keeps
    the answer from being continued in a second leg, empty when nothing does.
    """

    surface: str
    fields: dict[str, msgspec.Raw]
    streaming: bool = False
    include_usage: bool = False
    cap: int | None = None
    seats: int = 1
    prompts: tuple[bytes, ...] = ()
    stops: tuple[str, ...] = ()
    model: str | None = None
    seed: int | None = None
    why_not: str = ""

    @property
    def continuable(self) -> bool:
        """Whether the answer may be generated in several legs."""
        return not self.why_not


class _Message(msgspec.Struct):
    role: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def parse_request(surface: str, body: bytes) -> ParsedRequest:
    """Read ``body``. ClientFault 400 that names the field when a peeked one is ill-typed."""
    fields = _object(body)
    prompts = _prompts(fields) if surface == COMPLETIONS else ()
    roles = _roles(fields) if surface == CHAT else ()
    seats = _seats(fields) * max(1, len(prompts))
    options = _read(fields, "stream_options", _StreamOptions, "an object")
    return ParsedRequest(
        surface=surface,
        fields=fields,
        streaming=_read(fields, "stream", bool, "true or false") or False,
        include_usage=bool(options and options.include_usage),
        cap=_cap(fields),
        seats=seats,
        prompts=prompts,
        stops=_stops(fields),
        model=_read(fields, "model", str, "a string"),
        seed=_seed(fields),
        why_not=_why_not(surface, fields, seats, roles),
    )


def _object(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise ClientFault("the request body must be a JSON object") from None
    except _JSON_FAULTS as error:
        raise ClientFault(f"the request body is not valid JSON: {error}") from None


def _wrong(name: str, expected: str) -> ClientFault:
    return ClientFault(f"'{name}' must be {expected}")


def _read(fields: dict[str, msgspec.Raw], name: str, shape: type[T], expected: str) -> T | None:
    raw = fields.get(name)
    if raw is None:
        return None
    wanted: Any = shape | None
    try:
        value: T | None = msgspec.json.decode(raw, type=wanted)
    except _JSON_FAULTS:
        raise _wrong(name, expected) from None
    return value


def _whole_number(fields: dict[str, msgspec.Raw], name: str) -> int | None:
    number: Any = float | int
    value: float | int | None = _read(fields, name, number, "an integer")
    if isinstance(value, float):
        if not value.is_integer():
            raise _wrong(name, "an integer")
        return int(value)
    return value


def _cap(fields: dict[str, msgspec.Raw]) -> int | None:
    found = [value for name in CAP_NAMES if (value := _limit(fields, name)) is not None]
    if not found or found[0] == -1:
        return None
    # llama-server samples one token even when asked for none.
    return max(1, found[0])


def _limit(fields: dict[str, msgspec.Raw], name: str) -> int | None:
    value = _whole_number(fields, name)
    if value is not None and not -1 <= value <= INT_MAX:
        raise _wrong(name, f"between -1 and {INT_MAX}, where -1 means no limit")
    return value


def _seats(fields: dict[str, msgspec.Raw]) -> int:
    for name in _SEATS_NAMES:
        value = _whole_number(fields, name)
        if value is not None:
            if not 1 <= value <= INT_MAX:
                raise _wrong(name, "a positive integer")
            return value
    return 1


def _seed(fields: dict[str, msgspec.Raw]) -> int | None:
    value = _whole_number(fields, "seed")
    if value is None or value < 0:
        return None
    value %= 2**32
    return None if value == SEED_RANDOM else value


def _stops(fields: dict[str, msgspec.Raw]) -> tuple[str, ...]:
    either: Any = str | list[str]
    value: str | list[str] | None = _read(fields, "stop", either, "a string or a list of strings")
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _roles(fields: dict[str, msgspec.Raw]) -> tuple[str | None, ...]:
    messages = _read(fields, "messages", list[_Message], "a list of message objects")
    if not messages:
        raise _wrong("messages", "a non-empty list of message objects")
    return tuple(message.role for message in messages)


def _prompts(fields: dict[str, msgspec.Raw]) -> tuple[bytes, ...]:
    expected = "a string, a list of tokens, or a list of these"
    items: Any = str | list[int | str | list[int | str]]
    prompt: str | list[int | str | list[int | str]] | None = _read(
        fields, "prompt", items, expected
    )
    if prompt is None or prompt == []:
        raise _wrong("prompt", expected + ", and not empty")
    if isinstance(prompt, str) or _is_flat(prompt):
        return (bytes(fields["prompt"]),)
    if any(isinstance(item, int) or item == [] for item in prompt):
        raise _wrong("prompt", expected + ", and not empty")
    return tuple(
        bytes(raw) for raw in msgspec.json.decode(fields["prompt"], type=list[msgspec.Raw])
    )


def _is_flat(prompt: list[int | str | list[int | str]]) -> bool:
    # Tokens alone, or tokens and text, make one prompt; text alone makes one prompt each.
    return any(isinstance(item, int) for item in prompt) and not any(
        isinstance(item, list) for item in prompt
    )


def _says(fields: dict[str, msgspec.Raw], name: str) -> bool:
    """Whether a field is there and neither null, false, zero nor empty."""
    return bytes(fields.get(name, b"null")).translate(None, b" \t\r\n") not in _BLANK


def _why_not(
    surface: str, fields: dict[str, msgspec.Raw], seats: int, roles: tuple[str | None, ...]
) -> str:
    # What the server carries from one request to the next is text alone: whatever has a
    # memory of its own (a grammar, an adaptive sampler, a clock) would start anew.
    if seats > 1:
        return "several answers at once"
    for name in ("grammar", "mirostat", "xtc_probability", "t_max_predict_ms", "echo"):
        if _says(fields, name):
            return name
    return _why_not_chat(fields, roles) if surface == CHAT else _why_not_text(fields)


def _why_not_chat(fields: dict[str, msgspec.Raw], roles: tuple[str | None, ...]) -> str:
    if _says(fields, "tools") and bytes(fields.get("tool_choice", b"")) != b'"none"':
        return "tools"
    if _says(fields, "continue_final_message") or roles[-1] == "assistant":
        return "the answer's beginning is the client's"
    return ""


def _why_not_text(fields: dict[str, msgspec.Raw]) -> str:
    for name in ("json_schema", "suffix"):
        if bytes(fields.get(name, b"null")) != b"null":
            return name
    if _says(fields, "response_format") and _format(fields) != "text":
        return "response_format"
    return ""


class _Format(msgspec.Struct):
    type: str | None = None


def _format(fields: dict[str, msgspec.Raw]) -> str | None:
    found = _read(fields, "response_format", _Format, "an object")
    return found.type if found else None
