"""Requests of the surface ``openai.responses``, said as chat completions.

What the client sent inside a message or beside the fields known here keeps its exact bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from kvalet.protocol.errors import ClientFault
from kvalet.protocol.openai_request import INT_MAX

Fields = dict[str, msgspec.Raw]
Items = list[msgspec.Raw]

_JSON_FAULTS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_GONE = {"input", "instructions", "tools", "max_output_tokens", "reasoning", "messages"}
_UNSAID = {b"null", b'""'}

T = TypeVar("T")


class _Message(msgspec.Struct):
    """One chat message being put together. ``rest``: what the client sent besides."""

    role: str
    rest: Fields = {}
    content: msgspec.Raw | list[object] | None = None
    thought: msgspec.Raw | None = None
    calls: list[object] = []
    answers: msgspec.Raw | None = None

    def wire(self) -> dict[str, object]:
        said: dict[str, object | None] = {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.thought,
            "tool_calls": self.calls or None,
            "tool_call_id": self.answers,
        }
        return {**self.rest, **{name: part for name, part in said.items() if part is not None}}


def to_chat(body: bytes) -> bytes:
    """``body`` as a chat completion's body that asks for the same.

    A stream always reports its usage. ClientFault 400 that names the field which is missing,
    ill-typed or not supported.
    """
    try:
        return msgspec.json.encode(_chat(_object(body)))
    except _JSON_FAULTS as error:
        raise ClientFault(f"the request body is not valid JSON: {error}") from None


def _chat(fields: Fields) -> dict[str, object]:
    _refuse(fields)
    chat: dict[str, object] = {name: raw for name, raw in fields.items() if name not in _GONE}
    chat["messages"] = [message.wire() for message in _messages(fields)]
    tools = _tools(fields)
    if tools:
        chat["tools"] = tools
    if "max_output_tokens" in fields:
        chat["max_tokens"] = _cap(fields)
    effort = (_read(fields, "reasoning", Fields, "an object") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if _read(fields, "stream", bool, "true or false"):
        options = _read(fields, "stream_options", Fields, "an object") or {}
        chat["stream_options"] = {**options, "include_usage": True}
    return chat


def _object(body: bytes) -> Fields:
    try:
        if not body.isascii():
            body.decode()
        return msgspec.json.decode(body, type=Fields)
    except msgspec.ValidationError:
        raise ClientFault("the request body must be a JSON object") from None


def _read(fields: Fields, name: str, shape: type[T], expected: str) -> T | None:
    wanted: Any = shape | None
    try:
        value: T | None = msgspec.json.decode(fields.get(name, b"null"), type=wanted)
    except _JSON_FAULTS:
        raise ClientFault(f"'{name}' must be {expected}") from None
    return value


def _refuse(fields: Fields) -> None:
    if "input" not in fields:
        raise ClientFault("'input' is required")
    if bytes(fields.get("previous_response_id", b"null")) not in _UNSAID:
        raise ClientFault(
            "'previous_response_id' is not supported: send the whole conversation as 'input'"
        )
    for name in ("n", "n_cmpl"):
        if _read(fields, name, int, "an integer") not in (None, 1):
            raise ClientFault(f"'{name}' must be 1: a response is one answer")


def _cap(fields: Fields) -> int | None:
    number: Any = float | int
    value: float | int | None = _read(fields, "max_output_tokens", number, "an integer")
    if value is None:
        return None
    if not -1 <= value <= INT_MAX or value != int(value):
        expected = f"an integer between -1 and {INT_MAX}, where -1 means no limit"
        raise ClientFault(f"'max_output_tokens' must be {expected}")
    return int(value)


def _tools(fields: Fields) -> list[object]:
    if "tools" not in fields:
        return []
    expected = "a list of objects"
    items = _read(fields, "tools", Items, expected)
    if items is None:
        raise ClientFault(f"'tools' must be {expected}")
    tools = [_fields(item) for item in items]
    # Tools that the server itself would have to run have no counterpart in a chat.
    return [_function(tool) for tool in tools if _text(tool, "type") == "function"]


def _function(tool: Fields) -> dict[str, object]:
    if _text(tool, "name") is None:
        raise ClientFault("each function in 'tools' must have a 'name'")
    function = {"strict": True, **_without(tool, "type")}
    return {"type": "function", "function": function}


def _messages(fields: Fields) -> list[_Message]:
    messages: list[_Message] = []
    if "instructions" in fields:
        # Without a word of it there still is a system message, as llama-server has it.
        said = _read(fields, "instructions", str, "a string")
        messages.append(_Message("system", content=_raw(said or "")))
    if _text(fields, "input") is not None:
        messages.append(_Message("user", content=fields["input"]))
        return messages
    for place, item in enumerate(_items(fields)):
        _add(messages, item, f"input[{place}]")
    if not messages:
        raise ClientFault("'input' must not be empty")
    return messages


def _items(fields: Fields) -> list[Fields]:
    expected = "a string or a list of objects"
    items = _read(fields, "input", Items, expected)
    if items is None:
        raise ClientFault(f"'input' must be {expected}")
    return [_fields(item) for item in items]


def _add(messages: list[_Message], item: Fields, place: str) -> None:
    """Take one item of the input in; several in a row make up one turn of the assistant."""
    kind, role = _text(item, "type"), _text(item, "role")
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if role in ("user", "system", "developer") and _parts(item) is not None:
        messages.append(_heard(item, role, place))
    elif role == "assistant" and kind == "message":
        _add_said(messages, last, item, place)
    elif kind == "function_call" and _has_texts(item, "call_id", "name", "arguments"):
        _add_call(messages, last, item)
    elif kind == "function_call_output" and _has_texts(item, "call_id"):
        messages.append(_outcome(item, place))
    elif kind == "reasoning" and _list(item, "summary") is not None:
        _add_thought(messages, last, item, place)
    else:
        raise ClientFault(
            f"'{place}' must be a message with a role and content, a complete function_call,"
            " a function_call_output or a reasoning item"
        )


def _heard(item: Fields, role: str, place: str) -> _Message:
    content = [_heard_part(part, place) for part in _parts(item) or ()]
    return _Message(role, _without(item, "type", "status", "role", "content"), content)


def _heard_part(part: Fields, place: str) -> object:
    kind = _text(part, "type")
    if kind == "input_text":
        return {"type": "text", "text": _needed(part, "text", f"{place}.content")}
    if kind == "input_image":
        url = _needed(part, "image_url", f"{place}.content")
        return {"type": "image_url", "image_url": {"url": url}}
    raise ClientFault(
        f"'type' in '{place}.content' must be input_text or input_image; files are not supported"
    )


def _add_said(messages: list[_Message], last: _Message | None, item: Fields, place: str) -> None:
    content = [_said_part(part, place) for part in _parts(item) or ()]
    if last is None:
        rest = _without(item, "type", "status", "role", "content")
        messages.append(_Message("assistant", rest, content))
    else:
        before = last.content if isinstance(last.content, list) else []
        last.content = [*before, *content]


def _said_part(part: Fields, place: str) -> object:
    kind = _text(part, "type")
    if kind in ("output_text", "input_text"):
        return {"type": "text", "text": _needed(part, "text", f"{place}.content")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _needed(part, "refusal", f"{place}.content")}
    raise ClientFault(f"'type' in '{place}.content' must be output_text or refusal")


def _add_call(messages: list[_Message], last: _Message | None, item: Fields) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    if last is None:
        messages.append(_Message("assistant", calls=[call]))
    else:
        last.calls = [*last.calls, call]


def _outcome(item: Fields, place: str) -> _Message:
    content: msgspec.Raw | list[object]
    if _text(item, "output") is not None:
        content = item["output"]
    else:
        parts = _list(item, "output")
        if parts is None:
            raise ClientFault(f"'{place}.output' must be a string or a list of input_text parts")
        content = [_outcome_part(_fields(part), place) for part in parts]
    return _Message("tool", content=content, answers=item["call_id"])


def _outcome_part(part: Fields, place: str) -> object:
    if _text(part, "type") != "input_text":
        raise ClientFault(f"'type' in '{place}.output' must be input_text")
    return {**part, "type": "text", "text": _needed(part, "text", f"{place}.output")}


def _add_thought(messages: list[_Message], last: _Message | None, item: Fields, place: str) -> None:
    parts = _list(item, "content")
    if not parts:
        raise ClientFault(f"'{place}.content' must be a list with the text of the reasoning")
    thought = _needed(_fields(parts[0]), "text", f"{place}.content")
    if last is None:
        messages.append(_Message("assistant", content=[], thought=thought))
    else:
        last.thought = thought


def _parts(item: Fields) -> list[Fields] | None:
    """The parts of an item's content; a plain string is one of them."""
    if _text(item, "content") is not None:
        return [{"type": _raw("input_text"), "text": item["content"]}]
    parts = _list(item, "content")
    return None if parts is None else [_fields(part) for part in parts]


def _needed(part: Fields, name: str, place: str) -> msgspec.Raw:
    if _text(part, name) is None:
        raise ClientFault(f"'{name}' in '{place}' must be a string")
    return part[name]


def _has_texts(item: Fields, *names: str) -> bool:
    return all(_text(item, name) is not None for name in names)


def _fields(raw: msgspec.Raw) -> Fields:
    """What an object says; anything else says nothing."""
    return msgspec.json.decode(raw, type=Fields) if bytes(raw).startswith(b"{") else {}


def _list(fields: Fields, name: str) -> Items | None:
    raw = fields.get(name, msgspec.Raw(b""))
    return msgspec.json.decode(raw, type=Items) if bytes(raw).startswith(b"[") else None


def _text(fields: Fields, name: str) -> str | None:
    raw = fields.get(name, msgspec.Raw(b""))
    return msgspec.json.decode(raw, type=str) if bytes(raw).startswith(b'"') else None


def _without(fields: Fields, *names: str) -> Fields:
    return {name: raw for name, raw in fields.items() if name not in names}


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))
