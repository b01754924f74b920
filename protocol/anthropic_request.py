"""Requests of the surface ``anthropic.messages``, said again as chat completions.

llama-server does the same to them, and drops whatever it does not know on the way: fields
(``model``, ``metadata``), and kinds of content blocks. What it drops is dropped here too, so
that the answer is the one that its own surface gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from kvalet.protocol.errors import ClientFault

MAX_TOKENS = 4096
"""The token limit of a request that names none."""

THINKING_TOKENS = 10_000
"""The thinking budget of a request that wants one and does not say how large."""

_PASSED = ("max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}
_NULL = msgspec.Raw(b"null")
_JSON_FAULTS = (msgspec.MsgspecError, RecursionError)

# Some clients stamp each request there; the prompt would never be found in the cache again.
_STAMP = re.compile(r"(x-anthropic-billing-header:(?:(?!cch=).)*cch=).{5}(?=;)", re.DOTALL)

T = TypeVar("T")
Json = dict[str, object]


class _Kind(msgspec.Struct):
    type: str | None = None


class _Text(msgspec.Struct):
    text: str


class _Thinking(msgspec.Struct):
    thinking: str | None = None


class _Source(msgspec.Struct):
    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class _Image(msgspec.Struct):
    source: _Source | None = None


class _ToolUse(msgspec.Struct):
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = _NULL


class _ToolResult(msgspec.Struct):
    tool_use_id: str | None = None
    content: str | list[msgspec.Raw] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET


class _Tool(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.Raw(b"{}")


class _Budget(msgspec.Struct):
    type: str | None = None
    budget_tokens: int | None = None


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw] | None = None
    system: str | list[msgspec.Raw] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Kind | None = None
    stop_sequences: str | list[str] | None = None
    stream: bool | None = None
    thinking: _Budget | None = None


def to_chat(body: bytes) -> bytes:
    """The chat completions body that means the same. ClientFault 400 that names the field when
    one that has to be read is ill-typed; what is only passed on keeps the client's bytes.

    A stream is asked for its usage. A request with stop sequences is made ``verbose``: only
    so does the server tell which of them ended the answer.
    """
    fields = _fields(body)
    request = _decode(body, _Request, "")
    chat: Json = {"messages": _messages(request)}
    if request.tools is not None:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    choice = request.tool_choice and _CHOICES.get(request.tool_choice.type or "")
    if choice:
        chat["tool_choice"] = choice
    if request.stop_sequences:
        chat["stop"] = fields["stop_sequences"]
        chat["verbose"] = True
    chat["max_tokens"] = MAX_TOKENS
    chat.update({name: fields[name] for name in _PASSED if name in fields})
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    if request.thinking is not None and request.thinking.type == "enabled":
        budget = request.thinking.budget_tokens
        chat["thinking_budget_tokens"] = THINKING_TOKENS if budget is None else budget
    return msgspec.json.encode(chat)


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()
    except UnicodeDecodeError as error:
        raise ClientFault(f"the request body is not valid JSON: {error}") from None
    return _decode(body, dict[str, msgspec.Raw], "")


def _decode(raw: bytes | msgspec.Raw, shape: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        raise _ill_typed(str(error), name) from None
    except _JSON_FAULTS as error:
        raise ClientFault(f"the request body is not valid JSON: {error}") from None


def _ill_typed(complaint: str, name: str) -> ClientFault:
    """``name`` is the place of the value that was decoded, empty for the whole body."""
    said, _, path = complaint.replace("`", "").partition(" - at $")
    place = (name + path).removeprefix(".")
    return ClientFault(f"'{place}': {said}" if place else f"the request body: {said}")


def _messages(request: _Request) -> list[object]:
    if not request.messages:
        raise ClientFault("'messages' must be a non-empty list of message objects")
    out: list[object] = []
    if request.system is not None:
        out.append({"role": "system", "content": _system(request.system)})
    for number, raw in enumerate(request.messages):
        out += _message(raw, f"messages[{number}]")
    return out


def _system(system: str | list[msgspec.Raw]) -> str:
    if isinstance(system, str):
        return _unstamped(system)
    texts: list[str] = []
    for number, raw in enumerate(system):
        place = f"system[{number}]"
        if _kind(raw, place) == "text":
            texts.append(_unstamped(_decode(raw, _Text, place).text))
    return "".join(texts)


def _unstamped(system: str) -> str:
    stamped = _STAMP.match(system)
    return system if stamped is None else f"{stamped[1]}fffff{system[stamped.end() :]}"


def _message(raw: msgspec.Raw, place: str) -> Sequence[object]:
    message = _decode(raw, _Message, place)
    content = message.content
    if content is msgspec.UNSET:
        if message.role != "assistant":
            raise ClientFault(f"'{place}': a message that is not the assistant's needs 'content'")
        return ()
    if not isinstance(content, list):
        return (raw,)
    spoken = _Spoken()
    for number, block in enumerate(content):
        spoken.add(block, f"{place}.content[{number}]")
    return spoken.messages(message.role)


class _Spoken:
    """The blocks of one message. Tool results become messages of their own, after it."""

    def __init__(self) -> None:
        self._parts: list[Json] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._results: list[Json] = []

    def add(self, raw: msgspec.Raw, place: str) -> None:
        kind = _kind(raw, place)
        if kind in ("text", "image"):
            self._parts += _part(raw, kind, place)
        elif kind == "thinking":
            self._thoughts.append(_decode(raw, _Thinking, place).thinking or "")
        elif kind == "tool_use":
            self._calls.append(_call(_decode(raw, _ToolUse, place)))
        elif kind == "tool_result":
            self._results.append(_result(raw, place))

    def messages(self, role: str) -> list[Json]:
        thoughts = "".join(self._thoughts)
        message: Json = {"role": role, "content": self._parts or ""}
        if self._calls:
            message["tool_calls"] = self._calls
        if thoughts:
            message["reasoning_content"] = thoughts
        says = self._parts or self._calls or thoughts
        return [message, *self._results] if says else self._results


def _kind(raw: msgspec.Raw, place: str) -> str:
    return _decode(raw, _Kind, place).type or ""


def _part(raw: msgspec.Raw, kind: str, place: str) -> list[Json]:
    """One text or image as chat has it; none for an image from where chat cannot take it."""
    if kind == "text":
        return [{"type": "text", "text": _decode(raw, _Text, place).text}]
    source = _decode(raw, _Image, place).source or _Source()
    if source.type == "base64":
        url = f"data:{source.media_type or 'image/jpeg'};base64,{source.data or ''}"
    elif source.type == "url":
        url = source.url or ""
    else:
        return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _call(use: _ToolUse) -> Json:
    given: Any = msgspec.json.decode(use.input)
    arguments = msgspec.json.encode({} if given is None else given).decode()
    function = {"name": use.name or "", "arguments": arguments}
    return {"id": use.id or "", "type": "function", "function": function}


def _result(raw: msgspec.Raw, place: str) -> Json:
    result = _decode(raw, _ToolResult, place)
    content: object = result.content or ""
    if isinstance(result.content, list):
        content = _result_parts(result.content, f"{place}.content")
    return {"role": "tool", "tool_call_id": result.tool_use_id or "", "content": content}


def _result_parts(blocks: list[msgspec.Raw], place: str) -> object:
    parts: list[Json] = []
    pictured = False
    for number, raw in enumerate(blocks):
        spot = f"{place}[{number}]"
        kind = _kind(raw, spot)
        if kind in ("text", "image"):
            pictured = pictured or kind == "image"
            parts += _part(raw, kind, spot)
    # Templates that take no list of parts still take a tool's text.
    return parts if pictured else "".join(str(part["text"]) for part in parts)


def _tool(tool: _Tool) -> Json:
    function = {
        "name": tool.name or "",
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
