"""What a b10434 said at both of its surfaces to the same requests, recorded.

Each line has a request, the chunks of the chat that it was made into, and the events and the
whole answer of ``/v1/messages`` itself. ``anthropic_template.jinja`` was the chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvalet.protocol import anthropic
from kvalet.protocol.openai import CHAT, Assembler, KvaletUsage, Totals, parse_request
from kvalet.protocol.sse import SseSplitter

ANSWERS = Path(__file__).parent / "golden" / "anthropic_answers.jsonl"


class Recorded(msgspec.Struct):
    """One request and what the server said to it."""

    case: str
    request: dict[str, Any]
    chat: list[msgspec.Raw]
    events: list[tuple[str, Any]]
    answer: dict[str, Any]


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details


class _Last(msgspec.Struct):
    usage: _Usage


RECORDED = [msgspec.json.decode(line, type=Recorded) for line in ANSWERS.read_bytes().splitlines()]
KVALET = {"parks": 0, "resumes": 0, "recomputes": 0, "waited_s": 0.0, "parked_s": 0.0}

each_recorded = pytest.mark.parametrize("recorded", RECORDED, ids=[one.case for one in RECORDED])


def events_in(stream: bytes) -> list[tuple[str, Any]]:
    return [
        ((event.event or b"").decode(), msgspec.json.decode(event.data or b""))
        for event in SseSplitter().feed(stream)
    ]


def usage_of(recorded: Recorded) -> _Usage:
    return msgspec.json.decode(recorded.chat[-1], type=_Last).usage


@each_recorded
def test_a_stream_makes_the_events_that_the_server_makes(recorded: Recorded) -> None:
    stream, usage = anthropic.Stream(), usage_of(recorded)
    stream.count(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
    sent = b"".join(stream.feed(bytes(chunk)) for chunk in recorded.chat) + stream.close()
    assert events_in(sent) == recorded.events


@each_recorded
def test_every_delta_is_passed_on_at_once(recorded: Recorded) -> None:
    stream = anthropic.Stream()
    for chunk in recorded.chat:
        deltas = stream.feed(bytes(chunk)).count(b"event: content_block_delta\n")
        choices = msgspec.json.decode(chunk)["choices"]
        assert deltas == bool(choices and says(choices[0]["delta"]))


def says(delta: dict[str, Any]) -> bool:
    calls: list[dict[str, Any]] = delta.get("tool_calls") or []
    arguments = any(call["function"].get("arguments") for call in calls)
    return bool(delta.get("content") or delta.get("reasoning_content") or arguments)


@each_recorded
def test_a_whole_answer_is_the_servers_own(recorded: Recorded) -> None:
    assembler, usage = Assembler(CHAT), usage_of(recorded)
    for chunk in recorded.chat:
        assembler.add(bytes(chunk))
    totals = Totals(
        prompt=usage.prompt_tokens,
        completion=usage.completion_tokens,
        cached=usage.prompt_tokens_details.cached_tokens,
    )
    answer = msgspec.json.decode(anthropic.whole(assembler.result(totals, KvaletUsage())))
    assert answer["usage"].pop("kvalet") == KVALET
    assert answer == recorded.answer
    assert list(answer) == list(recorded.answer)


@each_recorded
def test_the_request_is_a_chat_that_kvalet_takes(recorded: Recorded) -> None:
    asked: dict[str, Any] = {**recorded.request, "stream": True}
    chat = parse_request(CHAT, anthropic.to_chat(msgspec.json.encode(asked)))
    assert chat.streaming
    assert chat.include_usage
    assert chat.cap == asked.get("max_tokens", 4096)
    assert chat.stops == tuple(asked.get("stop_sequences", ()))
    begun = asked["messages"][-1]["role"] == "assistant"
    assert chat.continuable == (not begun and "tools" not in asked)


def test_the_record_shows_every_kind_of_block_and_end() -> None:
    blocks = {block["type"] for one in RECORDED for block in one.answer["content"]}
    assert blocks == {"thinking", "text", "tool_use"}
    ends = {one.answer["stop_reason"] for one in RECORDED}
    assert ends == {"end_turn", "max_tokens", "tool_use"}
    assert any(not one.answer["content"] for one in RECORDED)
