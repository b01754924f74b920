"""The Anthropic surface's answers beyond what a server can be made to say on purpose."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvalet.protocol import anthropic
from kvalet.protocol.errors import (
    ClientFault,
    EnvironmentFault,
    KvaletError,
    ServerFault,
)
from kvalet.protocol.sse import SseSplitter

Json = dict[str, Any]
Events = list[Json]

KVALET = {"parks": 2, "resumes": 2, "recomputes": 1, "waited_s": 0.5, "parked_s": 1.5}
OPENING: Json = {"role": "assistant", "content": None}


def chunk(delta: Json, finish: str | None = None, **more: Any) -> bytes:
    choice = {"finish_reason": finish, "index": 0, "delta": delta}
    return json.dumps({"choices": [choice], "id": "chatcmpl-1", "model": "m", **more}).encode()


def usage_chunk(**usage: Any) -> bytes:
    return json.dumps({"choices": [], "id": "chatcmpl-1", "usage": usage}).encode()


def call(index: int, **function: str) -> Json:
    return {"tool_calls": [{"index": index, "id": f"t{index}", "function": function}]}


def read(stream: bytes) -> Events:
    events: Events = []
    for event in SseSplitter().feed(stream):
        payload: Json = json.loads(event.data or b"")
        assert event.event == payload["type"].encode()
        events.append(payload)
    return events


def told(*payloads: bytes) -> Events:
    stream = anthropic.Stream()
    return read(b"".join(map(stream.feed, payloads)) + stream.close())


def kinds(events: Events) -> list[tuple[str, int]]:
    named = [e for e in events if e["type"] in ("content_block_start", "content_block_stop")]
    return [(e.get("content_block", {}).get("type", "stop"), e["index"]) for e in named]


def delta_of(events: Events) -> Json:
    (delta,) = [event for event in events if event["type"] == "message_delta"]
    return delta


def test_the_start_tells_the_size_of_the_prompt_when_it_is_known() -> None:
    stream = anthropic.Stream()
    stream.count(25, cached=20)
    (start,) = read(stream.feed(chunk(OPENING)))
    assert start["message"] == {
        "id": "chatcmpl-1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"cache_read_input_tokens": 20, "input_tokens": 5, "output_tokens": 0},
    }


def test_the_end_repeats_a_prompts_size_only_if_the_start_was_wrong() -> None:
    last = usage_chunk(
        completion_tokens=3, prompt_tokens=25, prompt_tokens_details={"cached_tokens": 20}
    )
    right = {"cache_read_input_tokens": 20, "input_tokens": 5, "output_tokens": 3}
    for prompt, cached, usage in ((25, 20, {"output_tokens": 3}), (25, 0, right), (0, 0, right)):
        stream = anthropic.Stream()
        stream.count(prompt, cached)
        events = stream.feed(chunk(OPENING)) + stream.feed(last) + stream.close()
        assert delta_of(read(events))["usage"] == usage


def test_a_usage_without_details_reused_nothing() -> None:
    events = told(chunk(OPENING), usage_chunk(completion_tokens=1, prompt_tokens=4))
    assert delta_of(events)["usage"] == {
        "cache_read_input_tokens": 0,
        "input_tokens": 4,
        "output_tokens": 1,
    }


def test_what_parking_meant_is_told_at_the_end() -> None:
    events = told(chunk(OPENING), usage_chunk(completion_tokens=3, kvalet=KVALET))
    assert delta_of(events)["usage"] == {"output_tokens": 3, "kvalet": KVALET}


def test_an_answer_that_nobody_began_is_still_a_message() -> None:
    stream = anthropic.Stream()
    assert stream.feed(b"[DONE]") == b""
    events = read(stream.close())
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    assert delta_of(events)["usage"] == {"output_tokens": 0}


def test_a_prompts_size_is_not_told_again_by_an_end_that_does_not_know_it() -> None:
    stream = anthropic.Stream()
    stream.count(25, cached=20)
    assert delta_of(read(stream.close()))["usage"] == {"output_tokens": 0}


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("tool_calls", "tool_use"),
        ("unheard", "max_tokens"),
        (None, "max_tokens"),
    ],
)
def test_the_end_has_a_reason(finish: str | None, reason: str) -> None:
    (end,) = [delta_of(told(chunk(OPENING), chunk({}, finish)))["delta"]]
    assert end == {"stop_reason": reason, "stop_sequence": None}
    said = {"choices": [{"message": {"content": "x"}, "finish_reason": finish}]}
    assert json.loads(anthropic.whole(json.dumps(said).encode()))["stop_reason"] == reason


@pytest.mark.parametrize(("word", "stopped_by"), [("\n\n", "\n\n"), ("", None), (None, None)])
def test_the_stop_sequence_that_ended_the_answer_is_named(
    word: str | None, stopped_by: str | None
) -> None:
    verbose = {"__verbose": {"stopping_word": word, "prompt": "long"}}
    events = told(chunk(OPENING), chunk({}, "stop", **verbose))
    assert delta_of(events)["delta"]["stop_sequence"] == stopped_by
    whole = json.loads(anthropic.whole(json.dumps({"choices": [], **verbose}).encode()))
    assert whole["stop_sequence"] == stopped_by


def test_thought_text_and_calls_of_one_chunk_are_told_in_that_order() -> None:
    both = {"content": "It", "reasoning_content": "Hm", **call(0, name="f", arguments="{}")}
    events = told(chunk(OPENING), chunk(both), chunk({"content": "", "reasoning_content": ""}))
    assert kinds(events) == [
        ("thinking", 0),
        ("text", 1),
        ("tool_use", 2),
        ("stop", 0),
        ("stop", 1),
        ("stop", 2),
    ]


def test_a_thought_is_signed_before_it_is_closed() -> None:
    events = told(chunk({"reasoning_content": "Hm"}))
    signed, closed = events[3:5]
    assert signed["delta"] == {"type": "signature_delta", "signature": ""}
    assert (closed["type"], signed["index"], closed["index"]) == ("content_block_stop", 0, 0)


def test_blocks_never_share_a_number_though_a_text_follows_a_call() -> None:
    events = told(
        chunk(call(0, name="f", arguments="{")),
        chunk({"content": "And"}),
        chunk({"reasoning_content": "Hm"}),
        chunk(call(1, name="g")),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
        chunk({"tool_calls": [{"index": 2}]}),
    )
    assert kinds(events)[:5] == [
        ("tool_use", 0),
        ("text", 1),
        ("thinking", 2),
        ("tool_use", 3),
        ("tool_use", 4),
    ]
    assert [index for kind, index in kinds(events) if kind == "stop"] == [0, 1, 2, 3, 4]
    pieces = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    assert pieces == ["{", "}"]


def test_text_keeps_every_character() -> None:
    text = 'line\u2028 "quoted" \\ \U0001f98a\r\n'
    events = told(chunk({"content": text}))
    assert events[2]["delta"] == {"type": "text_delta", "text": text}


@pytest.mark.parametrize(
    ("code", "kind"), [(500, "api_error"), (503, "overloaded_error"), ("odd", "api_error")]
)
def test_an_error_of_the_server_ends_the_stream_in_this_dialect(code: int | str, kind: str) -> None:
    stream = anthropic.Stream()
    stream.feed(chunk(OPENING))
    error = {"code": code, "message": "Context size has been exceeded.", "type": "server_error"}
    (event,) = read(stream.feed(json.dumps({"error": error}).encode()))
    assert event == {
        "type": "error",
        "error": {"type": kind, "message": "Context size has been exceeded."},
    }
    assert stream.feed(chunk({"content": "more"})) == b""


@pytest.mark.parametrize("payload", [b"{bad", b"5", b'{"choices":5}', b'"\xff"'])
def test_garbage_is_the_servers_fault(payload: bytes) -> None:
    with pytest.raises(ServerFault):
        anthropic.Stream().feed(payload)
    with pytest.raises(ServerFault):
        anthropic.whole(payload)


def test_a_null_says_nothing() -> None:
    events = told(b"null", b'{"choices":null,"error":null}', b'{"choices":[{"index":0}]}')
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]


def test_a_whole_answer_carries_what_parking_meant() -> None:
    usage = {"completion_tokens": 3, "prompt_tokens": 9, "kvalet": KVALET}
    whole = json.loads(anthropic.whole(json.dumps({"choices": [], "usage": usage}).encode()))
    assert whole["usage"] == {
        "cache_read_input_tokens": 0,
        "input_tokens": 9,
        "output_tokens": 3,
        "kvalet": KVALET,
    }


@pytest.mark.parametrize(
    ("arguments", "given"), [('{"a":[1]}', {"a": [1]}), ("5", 5), ('{"a":', {}), ("", {})]
)
def test_a_whole_call_has_its_arguments_as_json_or_none_at_all(
    arguments: str, given: object
) -> None:
    calls = [{"id": "t1", "function": {"name": "f", "arguments": arguments}}]
    said = {"choices": [{"message": {"content": None, "tool_calls": calls}}]}
    whole = json.loads(anthropic.whole(json.dumps(said).encode()))
    assert whole["content"] == [{"type": "tool_use", "id": "t1", "name": "f", "input": given}]


def test_a_call_without_a_function_still_makes_a_block() -> None:
    said: Json = {"choices": [{"message": {"tool_calls": [{}]}}]}
    whole = json.loads(anthropic.whole(json.dumps(said).encode()))
    assert whole["content"] == [{"type": "tool_use", "id": "", "name": "", "input": {}}]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            ClientFault("no", code="odd"),
            {"type": "invalid_request_error", "message": "no", "code": "odd"},
        ),
        (
            ClientFault("long", fields={"n_prompt_tokens": 9, "n_ctx": 8}),
            {
                "type": "invalid_request_error",
                "message": "long",
                "code": "invalid_request",
                "n_prompt_tokens": 9,
                "n_ctx": 8,
            },
        ),
        (
            ServerFault("gone"),
            {"type": "api_error", "message": "gone", "code": "server_lost"},
        ),
        (EnvironmentFault("full"), {"type": "overloaded_error", "message": "full"}),
        (KvaletError("odd"), {"type": "api_error", "message": "odd"}),
    ],
)
def test_a_fault_is_told_in_this_dialect(fault: KvaletError, error: Json) -> None:
    told = {"type": "error", "error": error}
    assert json.loads(anthropic.fault_body(fault)) == told
    assert read(anthropic.fault_event(fault)) == [told]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_an_errors_type_goes_by_its_status(status: int, kind: str) -> None:
    assert json.loads(anthropic.error_body("m", status=status)) == {
        "type": "error",
        "error": {"type": kind, "message": "m"},
    }


def test_a_refusal_of_the_server_is_told_in_this_dialect() -> None:
    words = "request (9 tokens) exceeds the available context size (8 tokens)"
    error = {"code": 400, "message": words, "type": "exceed_context_size_error"}
    counts = {"n_prompt_tokens": 9, "n_ctx": 8}
    body = json.dumps({"error": {**error, **counts}}).encode()
    refusal = json.loads(anthropic.refusal_body(body, status=400))
    expected = {"type": "invalid_request_error", "message": words, **counts}
    assert refusal == {"type": "error", "error": expected}
    assert json.loads(anthropic.refusal_body(b"Not Found", status=404))["error"] == {
        "type": "not_found_error",
        "message": "Not Found",
    }


def test_a_ping_is_an_event_of_this_dialect() -> None:
    assert read(anthropic.PING) == [{"type": "ping"}]
