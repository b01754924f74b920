"""One answer on each surface, event by event or whole, with the very fields of a llama-server.

A voice belongs to one request. It is told the outputs of its jobs, each under the place of
the job in the request, and gives bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvalet.protocol.sse import DONE
from kvalet.sims.fakeserver.requests import Ask
from kvalet.sims.fakeserver.slot import Ended, Failed, Progress, Said
from kvalet.sims.fakeserver.tokens import detokenize
from kvalet.sims.fakeserver.wire import (
    Sender,
    error_fields,
    event,
    probabilities,
    progress_of,
    record_of,
    settings_of,
    timings_of,
    usage_of,
)


class Voice:
    """``/completion``, and what the other surfaces have in common with it."""

    def __init__(self, ask: Ask, sender: Sender, number: int) -> None:
        self.ask = ask
        self.sender = sender
        self._letters = hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()

    def progress(self, index: int, out: Progress) -> bytes:
        """A part of the prompt is done; said only to those who asked."""
        fields = self._chunk(index, "", (0,), 0, out.total)
        if self.ask.timings_per_token:
            fields["timings"] = timings_of(out.timings)
        return event({**fields, "prompt_progress": progress_of(out)})

    def said(self, index: int, out: Said) -> bytes:
        """Some text."""
        fields = self._chunk(index, out.text, out.ids, out.predicted, out.evaluated)
        if self.ask.timings_per_token:
            fields["timings"] = timings_of(out.timings)
        if self.ask.n_probs:
            fields["completion_probabilities"] = probabilities(out.ids)
        return event(fields)

    def ended(self, index: int, out: Ended) -> bytes:
        """The end of one answer."""
        return event(self._final(index, out, content="", ids=()))

    def done(self) -> bytes:
        """The end of the stream, when every answer has ended."""
        return b""

    def failed(self, out: Failed) -> bytes:
        """The end of the stream when it has failed."""
        return event({"error": error_fields(out)})

    def whole(self, ends: list[Ended]) -> bytes:
        """The answer to one who does not stream."""
        ids = (out.ids if self.ask.return_tokens else () for out in ends)
        finals = [
            self._final(index, out, content=out.text, ids=tokens)
            for index, (out, tokens) in enumerate(zip(ends, ids, strict=True))
        ]
        return msgspec.json.encode(finals if len(finals) > 1 else finals[0])

    def _chunk(
        self, index: int, text: str, ids: tuple[int, ...], predicted: int, evaluated: int
    ) -> dict[str, Any]:
        return {
            "index": index,
            "content": text,
            "tokens": list(ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": predicted,
            "tokens_evaluated": evaluated,
        }

    def _final(
        self, index: int, out: Ended, *, content: str, ids: tuple[int, ...]
    ) -> dict[str, Any]:
        final: dict[str, Any] = {
            "index": index,
            "content": content,
            "tokens": list(ids),
            "id_slot": out.slot,
            "stop": True,
            "model": self.sender.model,
            "tokens_predicted": out.predicted,
            "tokens_evaluated": out.evaluated,
            "generation_settings": settings_of(self.ask, self.sender.speculation),
            "prompt": detokenize(self.ask.prompts[index // self.ask.answers]),
            "has_new_line": "\n" in out.text,
            "truncated": out.truncated,
            "stop_type": out.stop_type,
            "stopping_word": out.stopping_word,
            "tokens_cached": out.cached,
            "timings": timings_of(out.timings),
            **record_of(self.sender, out),
        }
        if self.ask.n_probs and not self.ask.stream:
            final["completion_probabilities"] = probabilities(out.ids)
        return final


class TextVoice(Voice):
    """``/v1/completions``."""

    def progress(self, index: int, out: Progress) -> bytes:
        return event({**self._envelope(index, ""), "prompt_progress": progress_of(out)})

    def said(self, index: int, out: Said) -> bytes:
        fields = self._envelope(index, out.text, out.ids)
        if self.ask.timings_per_token:
            fields["timings"] = timings_of(out.timings)
        return event(fields)

    def ended(self, index: int, out: Ended) -> bytes:
        return event(self._last(index, out, ""))

    def done(self) -> bytes:
        return DONE

    def whole(self, ends: list[Ended]) -> bytes:
        first = self._last(0, ends[0], ends[0].text)
        for index, out in enumerate(ends[1:], start=1):
            first["choices"] += self._last(index, out, out.text)["choices"]
        return msgspec.json.encode({**first, **record_of(self.sender, *ends)})

    def _envelope(
        self, index: int, text: str, ids: tuple[int, ...] = (), finish: str | None = None
    ) -> dict[str, Any]:
        told = {"content": probabilities(ids)} if self.ask.n_probs and ids else None
        choice = {"text": text, "index": index, "logprobs": told, "finish_reason": finish}
        return {
            "choices": [choice],
            "created": self.sender.created,
            "model": self.sender.model,
            "system_fingerprint": self.sender.fingerprint,
            "object": "text_completion",
            "id": f"chatcmpl-{self._letters}",
        }

    def _last(self, index: int, out: Ended, text: str) -> dict[str, Any]:
        fields = self._envelope(index, text, finish=finish_of(out))
        letters = fields.pop("id")
        timings = timings_of(out.timings)
        fields |= {"usage": usage_of(out), "id": letters, "timings": timings}
        return {**fields, **record_of(self.sender, out)}


class ChatVoice(Voice):
    """``/v1/chat/completions``."""

    def __init__(self, ask: Ask, sender: Sender, number: int) -> None:
        super().__init__(ask, sender, number)
        self._spoken: dict[int, str] = {}
        self._ends: list[Ended] = []

    def progress(self, index: int, out: Progress) -> bytes:
        fields = self._role(index)
        if self.ask.timings_per_token:
            fields["timings"] = timings_of(out.timings)
        return event({**fields, "prompt_progress": progress_of(out)})

    def said(self, index: int, out: Said) -> bytes:
        text = out.text
        head = b""
        if index not in self._spoken:
            head = event(self._role(index))
            text = (self.ask.partial if self.ask.repeats else "") + text
        self._spoken[index] = self._spoken.get(index, "") + out.text
        if not text:
            return head
        fields = self._envelope(index, {"content": text})
        if self.ask.n_probs:
            fields["choices"][0]["logprobs"] = {"content": probabilities(out.ids)}
        if self.ask.timings_per_token:
            fields["timings"] = timings_of(out.timings)
        return head + event(fields)

    def ended(self, index: int, out: Ended) -> bytes:
        self._ends.append(out)
        rest = out.text[len(self._spoken.get(index, "")) :]
        head = event(self._envelope(index, {"content": rest})) if rest else b""
        last = self._envelope(index, {}, finish_of(out))
        if not self.ask.include_usage:
            last |= {"timings": timings_of(out.timings), **record_of(self.sender, out)}
        return head + event(last)

    def done(self) -> bytes:
        if not self.ask.include_usage:
            return DONE
        out = self._ends[-1]
        fields: dict[str, Any] = {**self._envelope(0, {}), "choices": []}
        fields |= {"usage": usage_of(out), "timings": timings_of(out.timings)}
        return event({**fields, **record_of(self.sender, *self._ends)}) + DONE

    def whole(self, ends: list[Ended]) -> bytes:
        choices = [
            {
                "finish_reason": finish_of(out),
                "index": index,
                "message": {"role": "assistant", "content": self.ask.partial + out.text},
                **({"logprobs": {"content": probabilities(out.ids)}} if self.ask.n_probs else {}),
            }
            for index, out in enumerate(ends)
        ]
        fields = {
            "choices": choices,
            "created": self.sender.created,
            "model": self.sender.model,
            "system_fingerprint": self.sender.fingerprint,
            "object": "chat.completion",
            "usage": usage_of(ends[0]),
            "id": f"chatcmpl-{self._letters}",
            "timings": timings_of(ends[0].timings),
        }
        return msgspec.json.encode({**fields, **record_of(self.sender, *ends)})

    def _role(self, index: int) -> dict[str, Any]:
        return self._envelope(index, {"role": "assistant", "content": None})

    def _envelope(
        self, index: int, delta: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        return {
            "choices": [{"finish_reason": finish, "index": index, "delta": delta}],
            "created": self.sender.created,
            "id": f"chatcmpl-{self._letters}",
            "model": self.sender.model,
            "system_fingerprint": self.sender.fingerprint,
            "object": "chat.completion.chunk",
        }


def finish_of(out: Ended) -> str:
    """``finish_reason`` in the OpenAI dialect."""
    return "length" if out.stop_type == "limit" else "stop"
