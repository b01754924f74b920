"""Answers of the surface ``openai.responses``, told from those of a chat.

The events, their order and their fields are llama-server's. Added are what OpenAI's own clients
need to put a response together: an event's ``sequence_number``, the ``output_index`` and
``content_index`` it belongs to, empty ``logprobs`` and ``annotations``, and ``created_at``,
``model`` and ``output`` of a response that has only begun.
"""

from __future__ import annotations

import msgspec

from kvalet.protocol import sse
from kvalet.protocol.openai_stream import JSON_FAULTS, CachedTokens, garbage

_ABSENT = msgspec.Raw(b"null")
_CHAT_ID = "chatcmpl-"

Json = dict[str, object]


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    kvalet: msgspec.Raw = _ABSENT

    def wire(self) -> Json:
        return {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "input_tokens_details": self.prompt_tokens_details or CachedTokens(),
            **_said(kvalet=self.kvalet),
        }


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None

    @property
    def name(self) -> str:
        return (self.function and self.function.name) or ""

    @property
    def arguments(self) -> str:
        return (self.function and self.function.arguments) or ""


class _Words(msgspec.Struct):
    """A whole message, or one piece of it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Words | None = None
    message: _Words | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> _Words:
        return self.delta or self.message or _Words()


class _Chat(msgspec.Struct):
    """A chat completion, or one chunk of it."""

    id: str | None = None
    created: int | None = None
    model: msgspec.Raw = msgspec.Raw(b'""')
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: msgspec.Raw = _ABSENT
    prompt_progress: msgspec.Raw = _ABSENT
    preempt: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT

    @property
    def tail(self) -> str:
        """What tells its ids from those of other answers."""
        return (self.id or "").removeprefix(_CHAT_ID)

    @property
    def is_last(self) -> bool:
        return self.usage is not None or any(choice.finish_reason for choice in self.choices)


_DECODER = msgspec.json.Decoder(_Chat | None)


class _Item:
    """One item of the output under way. ``index``: its place in the order of appearance."""

    def __init__(self, index: int, name: str, call: _Call | None = None) -> None:
        self.index = index
        self.id = name
        self.call = call or _Call()
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def delta(self, kind: str, text: str, **more: object) -> Json:
        """The event that ``text`` has been added."""
        self._pieces.append(text)
        return _event(kind, delta=text, **self.place(**more))

    def place(self, **more: object) -> Json:
        return {"item_id": self.id, "output_index": self.index, **more}

    def done(self, whole: Json) -> Json:
        return _event("response.output_item.done", item=whole, output_index=self.index)


class Stream:
    """One streamed answer: a chat's chunks in, a response's events out, each at once."""

    def __init__(self) -> None:
        self._events = 0
        self._items = 0
        self._response: Json = {}
        self._thought: _Item | None = None
        self._message: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._usage = _Usage()
        self._rest: Json = {}
        self._timings: Json = {}

    def feed(self, payload: bytes) -> bytes:
        """The events that one chat chunk's ``data:`` payload means, as bytes to send now.

        ServerFault when it is not a chunk. An error is passed on as it is.
        """
        if payload == b"[DONE]":
            return b""
        try:
            chunk = _DECODER.decode(payload) or _Chat()
        except JSON_FAULTS as error:
            raise garbage(error) from None
        if bytes(chunk.error) != b"null":
            return sse.data(payload)
        events = self._begin(chunk)
        for choice in chunk.choices:
            events += self._tell(choice.words, chunk.tail)
        if chunk.is_last:
            self._note(chunk)
        elif events:
            events[-1].update(_said(timings=chunk.timings, prompt_progress=chunk.prompt_progress))
        return self._sent(events)

    def close(self) -> bytes:
        """The events that end a successful answer: each item whole, then the response."""
        events: list[Json] = []
        output: list[Json] = []
        if self._thought is not None:
            output.append(_reasoning(self._thought.id, self._thought.text))
            events.append(self._thought.done(output[-1]))
        if self._message is not None:
            output.append(_message(self._message.id, self._message.text))
            events += _ended(self._message, output[-1])
        for item in self._calls.values():
            output.append(_function_call(item.call, item.text))
            events.append(item.done(output[-1]))
        response = {**self._response, "status": "completed", "output": output}
        response = {**response, "usage": self._usage.wire(), **self._rest}
        events.append(_event("response.completed", response=response, **self._timings))
        return self._sent(events)

    def _begin(self, chunk: _Chat) -> list[Json]:
        if self._response:
            again = bytes(chunk.prompt_progress) != b"null"
            return [_event("response.in_progress", response=self._response)] if again else []
        self._response = {
            "id": "resp_" + chunk.tail,
            "object": "response",
            "status": "in_progress",
            "created_at": chunk.created or 0,
            "model": chunk.model,
            "output": [],
        }
        kinds = ("response.created", "response.in_progress")
        return [_event(kind, response=self._response) for kind in kinds]

    def _tell(self, words: _Words, tail: str) -> list[Json]:
        events: list[Json] = []
        if words.reasoning_content:
            events += self._think(words.reasoning_content, tail)
        if words.content:
            events += self._say(words.content, tail)
        for call in words.tool_calls or ():
            events += self._call(call)
        return events

    def _think(self, text: str, tail: str) -> list[Json]:
        events: list[Json] = []
        if self._thought is None:
            self._thought = _Item(self._next_index(), "rs_" + tail)
            item: Json = {
                **_reasoning(self._thought.id, ""),
                "content": [],
                "status": "in_progress",
            }
            events.append(_added(self._thought, item))
        kind = "response.reasoning_text.delta"
        return [*events, self._thought.delta(kind, text, content_index=0)]

    def _say(self, text: str, tail: str) -> list[Json]:
        events: list[Json] = []
        if self._message is None:
            self._message = _Item(self._next_index(), "msg_" + tail)
            item: Json = {**_message(self._message.id, ""), "content": [], "status": "in_progress"}
            events.append(_added(self._message, item))
            place = self._message.place(content_index=0)
            events.append(_event("response.content_part.added", part=_part(""), **place))
        kind = "response.output_text.delta"
        return [*events, self._message.delta(kind, text, content_index=0, logprobs=[])]

    def _call(self, call: _Call) -> list[Json]:
        events: list[Json] = []
        item = self._calls.get(call.index)
        if item is None:
            item = _Item(self._next_index(), "fc_" + (call.id or ""), call)
            self._calls[call.index] = item
            events.append(_added(item, {**_function_call(call, ""), "status": "in_progress"}))
        if call.arguments:
            events.append(item.delta("response.function_call_arguments.delta", call.arguments))
        return events

    def _note(self, chunk: _Chat) -> None:
        self._usage = chunk.usage or self._usage
        self._timings = _said(timings=chunk.timings) or self._timings
        self._rest.update(_said(preempt=chunk.preempt))

    def _next_index(self) -> int:
        self._items += 1
        return self._items - 1

    def _sent(self, events: list[Json]) -> bytes:
        sent: list[bytes] = []
        for event in events:
            payload = msgspec.json.encode({**event, "sequence_number": self._events})
            sent += (b"event: ", str(event["type"]).encode(), b"\n", sse.data(payload))
            self._events += 1
        return b"".join(sent)


def whole(chat_answer: bytes) -> bytes:
    """The unstreamed response that tells what ``chat_answer``, a chat completion, says."""
    chat = msgspec.json.decode(chat_answer, type=_Chat)
    words = chat.choices[0].words
    output: list[Json] = []
    if words.reasoning_content:
        thought = _reasoning("rs_" + chat.tail, words.reasoning_content)
        output.append({**thought, "status": "completed"})
    if words.content:
        output.append(_message("msg_" + chat.tail, words.content))
    output += [_function_call(call, call.arguments) for call in words.tool_calls or ()]
    response: Json = {
        "completed_at": chat.created or 0,
        "created_at": chat.created or 0,
        "id": "resp_" + chat.tail,
        "model": chat.model,
        "object": "response",
        "output": output,
        "status": "completed",
        "usage": (chat.usage or _Usage()).wire(),
        **_said(preempt=chat.preempt),
    }
    return msgspec.json.encode(response)


def _event(kind: str, **fields: object) -> Json:
    return {"type": kind, **fields}


def _added(item: _Item, begun: Json) -> Json:
    return _event("response.output_item.added", item=begun, output_index=item.index)


def _ended(message: _Item, item: Json) -> list[Json]:
    place = message.place(content_index=0)
    return [
        _event("response.output_text.done", text=message.text, logprobs=[], **place),
        _event("response.content_part.done", part=_part(message.text), **place),
        message.done(item),
    ]


def _reasoning(name: str, text: str) -> Json:
    content = [{"text": text, "type": "reasoning_text"}]
    item: Json = {"id": name, "summary": [], "type": "reasoning", "content": content}
    return {**item, "encrypted_content": ""}


def _message(name: str, text: str) -> Json:
    item: Json = {"type": "message", "status": "completed", "id": name, "content": [_part(text)]}
    return {**item, "role": "assistant"}


def _part(text: str) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _function_call(call: _Call, arguments: str) -> Json:
    # llama-server makes two ids of the one that its chats show.
    ids = {"id": "fc_" + (call.id or ""), "call_id": "call_" + (call.id or "")}
    item: Json = {"type": "function_call", "status": "completed", "arguments": arguments}
    return {**item, **ids, "name": call.name}


def _said(**fields: msgspec.Raw) -> Json:
    return {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}
