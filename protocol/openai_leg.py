"""Bodies of the requests one answer sends upstream: its legs, and the count of its prompt."""

from __future__ import annotations

import msgspec

from kvalet.protocol.openai_request import (
    CAP_NAMES,
    CHAT,
    SEED_RANDOM,
    ParsedRequest,
)

_OURS = {*CAP_NAMES, "stream", "id_slot", "sse_ping_interval", "return_progress"}
_TRUE = msgspec.Raw(b"true")
_FALSE = msgspec.Raw(b"false")


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    """The answer so far: what all earlier legs have put into text."""

    content: str = ""
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning)


LEG_PATHS = {"openai.chat": "/v1/chat/completions", "openai.completions": "/v1/completions"}
"""Where llama-server takes a leg of each surface."""


def leg_body(
    request: ParsedRequest,
    *,
    partial: Partial,
    max_tokens: int,
    slot: int,
    leg: int,
    progress: bool,
) -> bytes:
    """The body of upstream request ``leg`` (0 is the first): always streamed, in ``slot``.

    With a non-empty ``partial`` the request continues it, which only a continuable one may.
    """
    fields = {name: raw for name, raw in _carried(request, partial).items() if name not in _OURS}
    fields["stream"] = _TRUE
    fields["max_tokens"] = _number(max_tokens)
    if request.seats == 1:
        fields["id_slot"] = _number(slot)
    if bytes(fields.get("cache_prompt", b"null")) == b"null":
        fields["cache_prompt"] = _TRUE
    if leg > 0 and request.seed is not None:
        # The same seed twice would draw the same numbers again, and the value left out
        # of the modulus would ask for random ones.
        fields["seed"] = _number((request.seed + leg) % SEED_RANDOM)
    if progress:
        fields["return_progress"] = _TRUE
    return msgspec.json.encode(fields)


def count_bodies(request: ParsedRequest, partial: Partial) -> tuple[bytes, ...]:
    """Bodies that lead to the prompt's tokens.

    A chat has one, for ``/apply-template``; a text completion has one per prompt, for
    ``/tokenize``.
    """
    if request.surface == CHAT:
        return (msgspec.json.encode(_carried(request, partial)),)
    return tuple(
        _tokenize(msgspec.Raw(_extended(prompt, partial.content))) for prompt in request.prompts
    )


def tokenize_body(prompt: str) -> bytes:
    """The body for ``/tokenize`` that counts a rendered chat prompt as the chat itself would."""
    return _tokenize(msgspec.Raw(msgspec.json.encode(prompt)))


def _carried(request: ParsedRequest, partial: Partial) -> dict[str, msgspec.Raw]:
    fields = dict(request.fields)
    if not partial:
        return fields
    assert request.continuable, request.why_not
    if request.surface == CHAT:
        fields["messages"] = _appended(bytes(fields["messages"]), _assistant(partial))
        fields["continue_final_message"] = (
            _TRUE if partial.content else msgspec.Raw(b'"reasoning_content"')
        )
        fields["add_generation_prompt"] = _FALSE
    else:
        fields["prompt"] = msgspec.Raw(_extended(request.prompts[0], partial.content))
    return fields


def _assistant(partial: Partial) -> bytes:
    message = {"role": "assistant", "content": partial.content}
    if partial.reasoning:
        message["reasoning_content"] = partial.reasoning
    return msgspec.json.encode(message)


def _extended(prompt: bytes, text: str) -> bytes:
    if not text:
        return prompt
    if prompt.startswith(b"["):
        return bytes(_appended(prompt, msgspec.json.encode(text)))
    return msgspec.json.encode(msgspec.json.decode(prompt, type=str) + text)


def _appended(array: bytes, item: bytes) -> msgspec.Raw:
    # The array is valid JSON and not empty, so its last byte is the bracket.
    return msgspec.Raw(array[:-1] + b"," + item + b"]")


def _number(value: int) -> msgspec.Raw:
    return msgspec.Raw(b"%d" % value)


def _tokenize(content: msgspec.Raw) -> bytes:
    return msgspec.json.encode({"content": content, "add_special": True, "parse_special": True})
