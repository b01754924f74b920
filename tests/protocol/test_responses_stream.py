"""A response told from a chat: what recordings of llama-server do not show."""

from __future__ import annotations

import json

import pytest

from kvalet.protocol.errors import ClientFault, ServerFault
from kvalet.protocol.responses import Stream, fault_body, fault_event, whole
from tests.protocol.responses_truth import Json, payloads

KVALET = {"parks": 2, "resumes": 2, "recomputes": 0, "waited_s": 0.5, "parked_s": 1.25}
USAGE: Json = {
    "completion_tokens": 7,
    "prompt_tokens": 20,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 5},
}
CALL: Json = {"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}


def chunk(*choices: Json, **more: object) -> bytes:
    """A chat's chunk, as kvalet has it."""
    fields = {"choices": choices, "created": 7, "id": "chatcmpl-r1", "model": "m.gguf", **more}
    return json.dumps(fields).encode()


def piece(finish: str | None = None, **delta: object) -> Json:
    """A choice of a chunk."""
    return {"index": 0, "delta": delta, "finish_reason": finish}


def tell(*chunks: bytes) -> list[Json]:
    """All events of an answer of these chunks."""
    stream = Stream()
    return payloads(b"".join([*map(stream.feed, chunks), stream.close()]))


def completed(*chunks: bytes) -> Json:
    """The event that ends the answer."""
    last = tell(*chunks)[-1]
    assert last["type"] == "response.completed"
    return last


def test_ids_come_from_the_answers_own_and_stay_the_same() -> None:
    words = [piece(reasoning_content="Hm."), piece(content="Yes.")]
    events = tell(*(chunk(one) for one in words))
    responses = {event["response"]["id"] for event in events if "response" in event}
    assert responses == {"resp_r1"}
    output = events[-1]["response"]["output"]
    assert [item["id"] for item in output] == ["rs_r1", "msg_r1"]


def test_usage_has_what_waiting_and_parks_came_to() -> None:
    last = completed(chunk(piece("stop")), chunk(usage={**USAGE, "kvalet": KVALET}))
    assert last["response"]["usage"] == {
        "input_tokens": 20,
        "output_tokens": 7,
        "total_tokens": 27,
        "input_tokens_details": {"cached_tokens": 5},
        "kvalet": KVALET,
    }


def test_figures_may_come_with_the_finish_or_after_it() -> None:
    together = completed(chunk(piece("stop"), usage=USAGE, timings={"cache_n": 3}))
    apart = completed(
        chunk(piece("stop"), timings={"cache_n": 3}), chunk(usage=USAGE, timings=None)
    )
    turned = completed(chunk(usage=USAGE, timings={"cache_n": 3}), chunk(piece("stop")))
    assert together == apart == turned
    assert apart["timings"] == {"cache_n": 3}
    assert apart["response"]["usage"]["output_tokens"] == 7


def test_what_a_parking_server_records_is_within_the_response() -> None:
    record = {"parks": 1, "recomputes": 0}
    last = completed(chunk(piece("stop"), preempt=record), chunk(usage=USAGE))
    assert last["response"]["preempt"] == record
    assert "preempt" not in last


def test_an_answer_without_figures_still_ends() -> None:
    last = completed(chunk(piece("length")))
    assert last["response"]["usage"]["total_tokens"] == 0
    assert last["response"]["output"] == []
    assert "timings" not in last


def test_calls_in_turn_keep_their_own_arguments() -> None:
    other = {**CALL, "index": 1, "id": "b"}
    calls: list[list[Json]] = [
        [CALL, other],
        [{"index": 0, "function": {"arguments": "{"}}],
        [{"index": 1, "function": {"arguments": "[]"}}, {"index": 0, "function": None}],
        [{"index": 0, "function": {"arguments": "}"}}],
    ]
    events = tell(*(chunk(piece(tool_calls=one)) for one in calls))
    output = events[-1]["response"]["output"]
    assert [(item["call_id"], item["arguments"]) for item in output] == [
        ("call_a", "{}"),
        ("call_b", "[]"),
    ]
    deltas = [event for event in events if event["type"].endswith("arguments.delta")]
    assert [(event["item_id"], event["delta"]) for event in deltas] == [
        ("fc_a", "{"),
        ("fc_b", "[]"),
        ("fc_a", "}"),
    ]


def test_text_after_a_call_is_placed_after_it() -> None:
    events = tell(chunk(piece(tool_calls=[CALL])), chunk(piece(content="Done.")))
    added = [event for event in events if event["type"].endswith("item.added")]
    places = [(event["item"]["type"], event["output_index"]) for event in added]
    assert places == [("function_call", 0), ("message", 1)]


def test_a_later_legs_opening_is_not_told_again() -> None:
    opening = chunk(piece(role="assistant", content=None))
    events = tell(opening, chunk(piece(content="a")), opening, chunk(piece(content="b")))
    kinds = [event["type"] for event in events]
    assert kinds.count("response.created") == kinds.count("response.in_progress") == 1
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "ab"


def test_what_is_not_part_of_the_answer_says_nothing() -> None:
    stream = Stream()
    stream.feed(chunk(piece(role="assistant")))
    assert stream.feed(b"[DONE]") == b""
    assert stream.feed(b"null") == b""
    assert stream.feed(chunk({"index": 0, "delta": None})) == b""


def test_an_error_in_a_stream_is_passed_on_as_the_server_sends_it() -> None:
    error = b'{"error":{"code":500,"message":"broken","type":"server_error"}}'
    assert Stream().feed(error) == b"data: " + error + b"\n\n"


@pytest.mark.parametrize("payload", [b"{", b"[1]", b'{"choices":5}', b'{"id":"\xff"}'])
def test_what_is_no_chunk_is_the_servers_fault(payload: bytes) -> None:
    with pytest.raises(ServerFault, match="not understood"):
        Stream().feed(payload)


def test_a_whole_answer_has_its_figures_and_the_servers_record() -> None:
    chat = {
        "choices": [{"message": {"content": None, "tool_calls": [CALL]}, "index": 0}],
        "created": 7,
        "id": "chatcmpl-r1",
        "model": "m.gguf",
        "usage": {**USAGE, "kvalet": KVALET},
        "preempt": {"parks": 1},
    }
    answer = json.loads(whole(json.dumps(chat).encode()))
    assert answer["usage"]["kvalet"] == KVALET
    assert answer["preempt"] == {"parks": 1}
    assert (answer["created_at"], answer["model"], answer["id"]) == (7, "m.gguf", "resp_r1")
    (call,) = answer["output"]
    assert (call["id"], call["call_id"], call["arguments"]) == ("fc_a", "call_a", "")


def test_faults_look_as_they_do_on_every_openai_surface() -> None:
    fault = ClientFault("'input' is required")
    error = {"message": "'input' is required", "type": "invalid_request_error"}
    assert json.loads(fault_body(fault)) == {"error": {**error, "code": "invalid_request"}}
    assert fault_event(fault) == b"data: " + fault_body(fault) + b"\n\n"
