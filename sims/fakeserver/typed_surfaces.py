"""The two surfaces whose events have names: ``/v1/responses`` and ``/v1/messages``."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvalet.sims.fakeserver.requests import Ask, Surface
from kvalet.sims.fakeserver.slot import Ended, Failed, Progress, Said
from kvalet.sims.fakeserver.surfaces import ChatVoice, TextVoice, Voice
from kvalet.sims.fakeserver.wire import (
    Sender,
    error_fields,
    event,
    named_event,
    record_of,
    timings_of,
)


class ResponsesVoice(Voice):
    """``/v1/responses``."""

    _opened = False

    def progress(self, index: int, out: Progress) -> bytes:
        return b""

    def said(self, index: int, out: Said) -> bytes:
        head = b"" if self._opened else self._opening()
        self._opened = True
        if not out.text:
            return head
        delta = {"type": "response.output_text.delta", "item_id": self._item, "delta": out.text}
        return head + named_event(delta)

    def ended(self, index: int, out: Ended) -> bytes:
        item = self._item
        part = _part(out.text)
        events: list[dict[str, Any]] = [
            {"type": "response.output_text.done", "item_id": item, "text": out.text},
            {"type": "response.content_part.done", "item_id": item, "part": part},
            {"type": "response.output_item.done", "item": self._message(out)},
            {
                "type": "response.completed",
                "response": {**self._response(out), **record_of(self.sender, out)},
                "timings": timings_of(out.timings),
            },
        ]
        return b"".join(map(named_event, events))

    def failed(self, out: Failed) -> bytes:
        return event({"error": error_fields(out)})

    def whole(self, ends: list[Ended]) -> bytes:
        fields = {**self._response(ends[0]), "timings": timings_of(ends[0].timings)}
        return msgspec.json.encode({**fields, **record_of(self.sender, *ends)})

    @property
    def _item(self) -> str:
        return f"msg_{self._letters}"

    def _opening(self) -> bytes:
        started = {"id": f"resp_{self._letters}", "object": "response", "status": "in_progress"}
        item: dict[str, Any] = {
            "content": [],
            "id": self._item,
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
        }
        part = {"type": "output_text", "text": ""}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
            {"type": "response.output_item.added", "item": item},
            {"type": "response.content_part.added", "item_id": self._item, "part": part},
        ]
        return b"".join(map(named_event, events))

    def _message(self, out: Ended) -> dict[str, Any]:
        return {
            "type": "message",
            "status": "completed",
            "id": self._item,
            "content": [_part(out.text)],
            "role": "assistant",
        }

    def _response(self, out: Ended) -> dict[str, Any]:
        return {
            "id": f"resp_{self._letters}",
            "object": "response",
            "created_at": self.sender.created,
            "status": "completed",
            "model": self.sender.model,
            "output": [self._message(out)],
            "usage": {
                "input_tokens": out.evaluated,
                "output_tokens": out.predicted,
                "total_tokens": out.evaluated + out.predicted,
                "input_tokens_details": {"cached_tokens": out.timings.cache_n},
            },
        }


class MessagesVoice(Voice):
    """``/v1/messages``."""

    _opened = False

    def progress(self, index: int, out: Progress) -> bytes:
        return b""

    def said(self, index: int, out: Said) -> bytes:
        head = b"" if self._opened else self._opening(out)
        self._opened = True
        if not out.text:
            return head
        delta = {"type": "text_delta", "text": out.text}
        return head + named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def ended(self, index: int, out: Ended) -> bytes:
        last: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": _reason(out), "stop_sequence": out.stopping_word or None},
            "usage": {"output_tokens": out.predicted},
            **record_of(self.sender, out),
        }
        events = [{"type": "content_block_stop", "index": 0}, last, {"type": "message_stop"}]
        return b"".join(map(named_event, events))

    def failed(self, out: Failed) -> bytes:
        return named_event(error_fields(out), "error")

    def whole(self, ends: list[Ended]) -> bytes:
        out = ends[0]
        fields = self._message([{"type": "text", "text": out.text}], out.timings.cache_n)
        fields |= {"stop_reason": _reason(out), "stop_sequence": out.stopping_word or None}
        fields["usage"] = {
            "cache_read_input_tokens": out.timings.cache_n,
            "input_tokens": out.evaluated - out.timings.cache_n,
            "output_tokens": out.predicted,
        }
        return msgspec.json.encode({**fields, **record_of(self.sender, *ends)})

    def _opening(self, out: Said) -> bytes:
        message = self._message([], out.timings.cache_n)
        message["usage"]["input_tokens"] = out.evaluated - out.timings.cache_n
        block = {"type": "text", "text": ""}
        start = {"type": "content_block_start", "index": 0, "content_block": block}
        return named_event({"type": "message_start", "message": message}) + named_event(start)

    def _message(self, content: list[dict[str, str]], cached: int) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._letters}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.sender.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": cached,
                "input_tokens": 0,
                "output_tokens": 0,
            },
        }


VOICES: Final[dict[Surface, type[Voice]]] = {
    "completion": Voice,
    "text": TextVoice,
    "chat": ChatVoice,
    "responses": ResponsesVoice,
    "messages": MessagesVoice,
}


def open_voice(ask: Ask, sender: Sender, number: int) -> Voice:
    """The voice of a request's surface. ``number`` gives the answer its name."""
    return VOICES[ask.surface](ask, sender, number)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _reason(out: Ended) -> str:
    if out.stop_type == "word":
        return "stop_sequence"
    return "max_tokens" if out.stop_type == "limit" else "end_turn"
