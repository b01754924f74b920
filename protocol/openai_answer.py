"""The non-streaming answer, put together from a stream's chunks.

Upstream everything is streamed, because only a stream notices that its client has left.
"""

from __future__ import annotations

import msgspec

from kvalet.protocol.errors import ServerFault
from kvalet.protocol.llama import decode_error
from kvalet.protocol.openai_request import CHAT
from kvalet.protocol.openai_stream import JSON_FAULTS, garbage
from kvalet.protocol.openai_totals import KvaletUsage, Totals

_OWN = {"choices", "created", "error", "id", "object", "usage", "timings", "prompt_progress"}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


class _ChoiceDelta(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Call:
    def __init__(self) -> None:
        self.id = ""
        self.type = "function"
        self.name = ""
        self.arguments: list[str] = []

    def add(self, delta: _CallDelta) -> None:
        self.id = delta.id or self.id
        self.type = delta.type or self.type
        if delta.function is not None:
            self.name += delta.function.name or ""
            self.arguments.append(delta.function.arguments or "")

    def result(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        call: dict[str, object] = {"type": self.type, "function": function}
        return {**call, "id": self.id} if self.id else call


class _Choice:
    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: str | None = None
        self.role = "assistant"
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, _Call] = {}
        self.logprobs: list[msgspec.Raw] | None = None

    def add(self, piece: _ChoiceDelta) -> None:
        self.finish = piece.finish_reason or self.finish
        self.text.append(piece.text or "")
        if piece.delta is not None:
            self._add_delta(piece.delta)
        if piece.logprobs is not None and piece.logprobs.content is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += piece.logprobs.content

    def _add_delta(self, delta: _Delta) -> None:
        self.role = delta.role or self.role
        self.text.append(delta.content or "")
        self.reasoning.append(delta.reasoning_content or "")
        for call in delta.tool_calls or ():
            self.calls.setdefault(call.index, _Call()).add(call)

    def chat(self) -> dict[str, object]:
        message: dict[str, object] = {"role": self.role, "content": "".join(self.text)}
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self.calls[index].result() for index in sorted(self.calls)]
        choice: dict[str, object] = {
            "finish_reason": self.finish,
            "index": self.index,
            "message": message,
        }
        return choice if self.logprobs is None else {**choice, "logprobs": self._logprobs()}

    def completion(self) -> dict[str, object]:
        return {
            "text": "".join(self.text),
            "index": self.index,
            "logprobs": self._logprobs(),
            "finish_reason": self.finish,
        }

    def _logprobs(self) -> dict[str, list[msgspec.Raw]] | None:
        return None if self.logprobs is None else {"content": self.logprobs}


class Assembler:
    """Collects one answer's chunks, those of all its legs, into what a client without
    ``stream`` expects: all choices, texts, thoughts, tool calls and log-probabilities.
    """

    def __init__(self, surface: str) -> None:
        self._chat = surface == CHAT
        self._choices: dict[int, _Choice] = {}
        self._id: msgspec.Raw | None = None
        self._created: msgspec.Raw | None = None
        self._rest: dict[str, msgspec.Raw] = {}

    def add(self, payload: bytes) -> None:
        """Take one ``data:`` payload in. ServerFault for an error event and for garbage."""
        if payload == b"[DONE]":
            return
        try:
            fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw] | None) or {}
            choices = fields.get("choices", msgspec.Raw(b"null"))
            pieces = msgspec.json.decode(choices, type=list[_ChoiceDelta] | None) or []
        except JSON_FAULTS as error:
            raise garbage(error) from None
        if bytes(fields.get("error", b"null")) != b"null":
            raise ServerFault(decode_error(payload).message, code="server_failed")
        for piece in pieces:
            self._choices.setdefault(piece.index, _Choice(piece.index)).add(piece)
        self._note(fields)

    def _note(self, fields: dict[str, msgspec.Raw]) -> None:
        # The first leg names the answer; of everything else the last word counts.
        self._id = self._id or fields.get("id")
        self._created = self._created or fields.get("created")
        self._rest.update({name: raw for name, raw in fields.items() if name not in _OWN})

    def result(self, totals: Totals, kvalet: KvaletUsage) -> bytes:
        """The JSON body of the whole answer, with the figures of all its legs."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        usage = {
            **totals.usage(),
            "prompt_tokens_details": {"cached_tokens": totals.cached},
            "kvalet": kvalet,
        }
        answer: dict[str, object] = {
            "choices": [one.chat() if self._chat else one.completion() for one in choices],
            "created": self._created or 0,
            **self._rest,
            "object": "chat.completion" if self._chat else "text_completion",
            "usage": usage,
            "id": self._id or "",
            "timings": totals.timings(),
        }
        return msgspec.json.encode(answer)
