"""A chat's answer on its way out: the same answer as ``anthropic.messages`` tells it.

Streamed or whole, and what there is to say when it fails.
"""

from __future__ import annotations

import msgspec

from kvalet.protocol.errors import ClientFault, KvaletError, ServerFault
from kvalet.protocol.llama import decode_error
from kvalet.protocol.openai_stream import JSON_FAULTS, garbage

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""The event that keeps a silent stream's connection alive."""

_ABSENT = b"null"
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_THINKING = "thinking"
_TEXT = "text"
# Nobody but the vendor of the dialect can sign a thought, but its clients wait for it.
_SIGNATURE = ""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Json = dict[str, object]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    kvalet: object = None

    @property
    def cached(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class _Verbose(msgspec.Struct):
    stopping_word: str | None = None


class _Chat(msgspec.Struct):
    """A chunk of a streamed chat, or a whole one."""

    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    verbose: _Verbose | None = msgspec.field(name="__verbose", default=None)
    error: msgspec.Raw = msgspec.Raw(_ABSENT)


_DECODER = msgspec.json.Decoder(_Chat | None)
_NOTHING_SAID = _Said()
_UNFINISHED = _Choice()


class Stream:
    """One streamed answer. ``feed`` takes the ``data:`` payloads of the chat's chunks, those of
    all legs under one id, the finish and usage chunks last; ``close`` ends a success.

    A message's start tells the size of the prompt, which a chat tells only at its end; so it
    is what ``count`` was told. Figures that prove wrong are told again in the last usage.
    """

    def __init__(self) -> None:
        self._prompt = 0
        self._cached = 0
        self._opened = False
        self._failed = False
        self._blocks: dict[str | int, int] = {}
        self._finish = "length"
        self._stopped_by: str | None = None
        self._usage: _Usage | None = None

    def count(self, prompt: int, cached: int = 0) -> None:
        """Tell that the prompt has ``prompt`` tokens, ``cached`` of them reused. To be said
        before the first chunk."""
        self._prompt, self._cached = prompt, cached

    def feed(self, payload: bytes) -> bytes:
        """The events that one chunk makes, none after an error. ServerFault on garbage."""
        if payload == b"[DONE]" or self._failed:
            return b""
        chunk = _decode(payload)
        if bytes(chunk.error) != _ABSENT:
            self._failed = True
            return _upstream_error(payload)
        self._note(chunk)
        return self._open(chunk) + b"".join(map(self._say, chunk.choices or ()))

    def close(self) -> bytes:
        """The events that end a successful answer."""
        events = [self._open(_Chat())]
        for key, index in self._blocks.items():
            if key == _THINKING:
                events.append(_delta(index, "signature_delta", "signature", _SIGNATURE))
            events.append(_event("content_block_stop", index=index))
        stop: Json = {"stop_reason": _stop_reason(self._finish), "stop_sequence": self._stopped_by}
        events.append(_event("message_delta", delta=stop, usage=self._last_usage()))
        events.append(_event("message_stop"))
        return b"".join(events)

    def _note(self, chunk: _Chat) -> None:
        for choice in chunk.choices or ():
            self._finish = choice.finish_reason or self._finish
        if chunk.verbose is not None:
            self._stopped_by = chunk.verbose.stopping_word or None
        self._usage = chunk.usage or self._usage

    def _open(self, chunk: _Chat) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        message: Json = {
            "id": chunk.id or "",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": chunk.model or "",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_prompt_usage(self._prompt, self._cached), "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def _say(self, choice: _Choice) -> bytes:
        said = choice.delta or _NOTHING_SAID
        events = b""
        if said.reasoning_content:
            events += self._started(_THINKING, {"type": "thinking", "thinking": ""})
            index = self._blocks[_THINKING]
            events += _delta(index, "thinking_delta", "thinking", said.reasoning_content)
        if said.content:
            events += self._started(_TEXT, {"type": "text", "text": ""})
            events += _delta(self._blocks[_TEXT], "text_delta", "text", said.content)
        for call in said.tool_calls or ():
            events += self._call(call)
        return events

    def _call(self, call: _Call) -> bytes:
        function = call.function or _Function()
        block: Json = {"type": "tool_use", "id": call.id or "", "name": function.name or ""}
        events = self._started(call.index, block)
        if function.arguments:
            index = self._blocks[call.index]
            events += _delta(index, "input_json_delta", "partial_json", function.arguments)
        return events

    def _started(self, key: str | int, block: Json) -> bytes:
        """The start of the block, unless it has one. Blocks are numbered as they appear."""
        if key in self._blocks:
            return b""
        index = self._blocks[key] = len(self._blocks)
        return _event("content_block_start", index=index, content_block=block)

    def _last_usage(self) -> Json:
        usage = self._usage or _Usage(prompt_tokens=self._prompt)
        told: Json = {"output_tokens": usage.completion_tokens}
        if self._usage and (usage.prompt_tokens, usage.cached) != (self._prompt, self._cached):
            told = {**_prompt_usage(usage.prompt_tokens, usage.cached), **told}
        return _with_kvalet(told, usage)


def whole(chat_answer: bytes) -> bytes:
    """The answer to a request that did not stream, from a whole chat completion. ServerFault
    when that is not one."""
    chat = _decode(chat_answer)
    choice = chat.choices[0] if chat.choices else _UNFINISHED
    usage = chat.usage or _Usage()
    told: Json = {
        **_prompt_usage(usage.prompt_tokens, usage.cached),
        "output_tokens": usage.completion_tokens,
    }
    answer: Json = {
        "id": chat.id or "",
        "type": "message",
        "role": "assistant",
        "content": _content(choice.message or _NOTHING_SAID),
        "model": chat.model or "",
        "stop_reason": _stop_reason(choice.finish_reason or ""),
        "stop_sequence": (chat.verbose and chat.verbose.stopping_word) or None,
        "usage": _with_kvalet(told, usage),
    }
    return msgspec.json.encode(answer)


def _content(said: _Said) -> list[Json]:
    blocks: list[Json] = []
    if said.reasoning_content:
        thought = said.reasoning_content
        blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
    if said.content:
        blocks.append({"type": "text", "text": said.content})
    for call in said.tool_calls or ():
        function = call.function or _Function()
        use: Json = {"type": "tool_use", "id": call.id or "", "name": function.name or ""}
        blocks.append({**use, "input": _input(function.arguments or "")})
    return blocks


def _input(arguments: str) -> object:
    try:
        given: object = msgspec.json.decode(arguments)
    except JSON_FAULTS:
        # The answer ended in the middle of them.
        return {}
    return given


def _decode(payload: bytes) -> _Chat:
    try:
        return _DECODER.decode(payload) or _Chat()
    except JSON_FAULTS as error:
        raise garbage(error) from None


def _stop_reason(finish: str) -> str:
    return _STOP_REASONS.get(finish, "max_tokens")


def _prompt_usage(prompt: int, cached: int) -> Json:
    return {"cache_read_input_tokens": cached, "input_tokens": prompt - cached}


def _with_kvalet(told: Json, usage: _Usage) -> Json:
    return told if usage.kvalet is None else {**told, "kvalet": usage.kvalet}


def _event(name: str, **fields: object) -> bytes:
    payload = msgspec.json.encode({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def _delta(index: int, kind: str, name: str, piece: str) -> bytes:
    return _event("content_block_delta", index=index, delta={"type": kind, name: piece})


def error_body(
    message: str, *, status: int, code: str = "", fields: dict[str, int] | None = None
) -> bytes:
    """An error as JSON; its type goes by the HTTP status."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: Json = {"type": kind, "message": message, **({"code": code} if code else {})}
    return msgspec.json.encode({"type": "error", "error": {**error, **(fields or {})}})


def fault_body(fault: KvaletError) -> bytes:
    """A fault of ours as an error body; its status is ``fault.status_hint``."""
    code = fault.code if isinstance(fault, ClientFault | ServerFault) else ""
    fields = fault.fields if isinstance(fault, ClientFault) else None
    return error_body(str(fault), status=fault.status_hint, code=code, fields=fields)


def fault_event(fault: KvaletError) -> bytes:
    """A fault of ours as an event of a stream that has begun already."""
    return _error_event(fault_body(fault))


def refusal_body(body: bytes, *, status: int) -> bytes:
    """llama-server's own error body, whatever is in it, as one of this dialect."""
    report = decode_error(body)
    counts = {"n_prompt_tokens": report.n_prompt_tokens, "n_ctx": report.n_ctx}
    fields = {name: count for name, count in counts.items() if count is not None}
    return error_body(report.message, status=status, fields=fields)


def _upstream_error(payload: bytes) -> bytes:
    code = decode_error(payload).code
    return _error_event(refusal_body(payload, status=code if isinstance(code, int) else 500))


def _error_event(body: bytes) -> bytes:
    return b"event: error\ndata: " + body + b"\n\n"
