"""Requests of the Responses surface, said as chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvalet.protocol.errors import ClientFault
from kvalet.protocol.openai import CHAT, parse_request
from kvalet.protocol.responses import to_chat
from tests.protocol.responses_truth import REQUESTS, TOOL, Json, called, said, thought, user


def chat(**fields: Any) -> Json:
    """The chat that a request with these fields becomes."""
    read: Json = json.loads(to_chat(json.dumps({"input": "Hi", **fields}).encode()))
    return read


def messages(*items: Any, **fields: Any) -> list[Json]:
    """The messages that these items of an input become."""
    found: list[Json] = chat(input=list(items), **fields)["messages"]
    return found


def text(words: str) -> Json:
    """A part of a chat message's content."""
    return {"type": "text", "text": words}


def call(city: str = "Rome") -> Json:
    """The chat's form of a call."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": "call_1", "type": "function", "function": function}


def test_a_plain_input_is_a_users_message() -> None:
    assert chat() == {"messages": [{"role": "user", "content": "Hi"}]}


def test_instructions_are_the_first_message() -> None:
    system, hi = chat(instructions="Be brief.")["messages"]
    assert (system["role"], system["content"], hi["role"]) == ("system", "Be brief.", "user")


def test_instructions_of_null_are_an_empty_message_as_with_llama_server() -> None:
    assert chat(instructions=None)["messages"][0] == {"role": "system", "content": ""}


def test_fields_that_chats_know_or_nobody_knows_are_kept_to_the_byte() -> None:
    body = b'{"input":"Hi","temperature":0.10,"metadata":{"a": 1.0},"id_slot":3}'
    assert b'"temperature":0.10,"metadata":{"a": 1.0},"id_slot":3' in to_chat(body)


def test_the_input_replaces_messages_that_are_not_of_this_surface() -> None:
    assert chat(messages=[{"role": "user", "content": "Bye"}])["messages"] == [user("Hi")]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_messages_keep_their_role_and_lose_what_only_responses_have(role: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    item = {"type": "message", "status": "completed", "role": role, "name": "x", "content": parts}
    (message,) = messages(item)
    assert message == {"role": role, "name": "x", "content": [text("a"), text("b")]}


def test_an_image_is_shown_by_its_address() -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    (message,) = messages({"role": "user", "content": [part]})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert message["content"] == [image]


def test_an_earlier_answer_is_the_assistants_message() -> None:
    _, message = messages(user("Hi"), said("Hello."))
    assert message == {"id": "msg_1", "role": "assistant", "content": [text("Hello.")]}


def test_an_earlier_answer_may_be_plain_or_a_refusal_or_empty() -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    for content, parts in (("Yes.", [text("Yes.")]), ([refusal], [refusal]), (None, [])):
        item = {"type": "message", "role": "assistant", "content": content}
        assert messages(item) == [{"role": "assistant", "content": parts}]


def test_a_turn_of_thought_text_and_calls_is_one_message() -> None:
    items = [thought("Hm."), said("Let"), said(" me see."), *called("Rome")[:1], *called("Oslo")]
    turn, outcome = messages(*items)
    assert turn == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": [text("Let"), text(" me see.")],
        "tool_calls": [call("Rome"), call("Oslo")],
    }
    assert outcome == {"role": "tool", "content": "Sunny.", "tool_call_id": "call_1"}


def test_a_call_begins_a_turn_that_text_and_thought_may_join() -> None:
    (turn,) = messages(*called("Rome")[:1], said("There."), thought("Hm."))
    assert turn["tool_calls"] == [call()]
    assert (turn["content"], turn["reasoning_content"]) == ([text("There.")], "Hm.")


def test_turns_are_told_apart_by_what_others_say() -> None:
    roles = [one["role"] for one in messages(*called("Rome"), *called("Oslo"), user("And?"))]
    assert roles == ["assistant", "tool", "assistant", "tool", "user"]


def test_what_came_of_a_call_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": "Sun"}, {"type": "input_text", "text": "ny."}]
    item = {"type": "function_call_output", "call_id": "c", "output": parts}
    (message,) = messages(item)
    assert message["content"] == [text("Sun"), text("ny.")]


def test_functions_are_tools_and_strict_unless_told_otherwise() -> None:
    lax = {**TOOL, "strict": False}
    first, second = chat(tools=[TOOL, lax])["tools"]
    function = {name: part for name, part in TOOL.items() if name != "type"}
    assert first == {"type": "function", "function": {**function, "strict": True}}
    assert second["function"]["strict"] is False


@pytest.mark.parametrize("tools", [[], [{"type": "web_search"}], [5]])
def test_tools_that_a_chat_has_not_are_left_out(tools: list[Any]) -> None:
    assert "tools" not in chat(tools=tools)


@pytest.mark.parametrize(("limit", "cap"), [(5, 5), (5.0, 5), (-1, -1), (0, 0), (None, None)])
def test_the_limit_goes_by_the_chats_name(limit: Any, cap: Any) -> None:
    found = chat(max_output_tokens=limit, max_tokens=9)
    assert found["max_tokens"] == cap
    assert "max_output_tokens" not in found


def test_of_the_reasoning_only_its_effort_is_asked_for() -> None:
    found = chat(reasoning={"effort": "low", "summary": "auto"})
    assert found["reasoning_effort"] == "low"
    assert "reasoning" not in found
    assert "reasoning_effort" not in chat(reasoning=None)


def test_a_stream_reports_its_usage() -> None:
    found = chat(stream=True, stream_options={"include_usage": False, "include_obfuscation": True})
    assert found["stream"] is True
    assert found["stream_options"] == {"include_usage": True, "include_obfuscation": True}
    assert "stream_options" not in chat(stream=False)
    assert "stream_options" not in chat(stream=None)


def test_one_answer_may_be_asked_for_by_number() -> None:
    assert chat(n=1, n_cmpl=None)["n"] == 1


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_is_one_that_the_chat_surface_reads(name: str) -> None:
    body = json.dumps({**REQUESTS[name], "stream": True}).encode()
    parsed = parse_request(CHAT, to_chat(body))
    assert parsed.streaming
    assert parsed.include_usage
    assert parsed.cap == REQUESTS[name].get("max_output_tokens")


def part_of_user(part: Any) -> Json:
    return {"input": [{"role": "user", "content": [part]}]}


def part_of_answer(part: Any) -> Json:
    return {"input": [{"role": "assistant", "type": "message", "content": [part]}]}


def item(kind: str, **fields: Any) -> Json:
    return {"input": [{"type": kind, **fields}]}


REFUSED: list[tuple[Json, str]] = [
    ({}, "'input' is required"),
    ({"input": 5}, "'input' must be a string or a list"),
    ({"input": None}, "'input' must be a string or a list"),
    ({"input": []}, "'input' must not be empty"),
    ({"input": [5]}, r"'input\[0\]' must be"),
    ({"input": [{"role": "user", "content": "a"}, {}]}, r"'input\[1\]' must be"),
    ({"input": [{"role": "user", "content": None}]}, r"'input\[0\]' must be"),
    ({"input": [{"role": "wizard", "content": "a"}]}, r"'input\[0\]' must be"),
    ({"input": [{"role": "assistant", "content": "a"}]}, r"'input\[0\]' must be"),
    (part_of_user(5), r"'type' in 'input\[0\].content' must be input_text or input_image"),
    (part_of_user({"type": "input_file"}), "files are not supported"),
    (part_of_user({"type": "input_text"}), r"'text' in 'input\[0\].content' must be a string"),
    (part_of_user({"type": "input_image"}), "'image_url' in"),
    (part_of_answer({"type": "input_image"}), "must be output_text or refusal"),
    (part_of_answer({"type": "output_text", "text": 5}), "'text' in"),
    (part_of_answer({"type": "refusal"}), "'refusal' in"),
    (item("function_call", call_id="c", name="f"), "a complete function_call"),
    (item("function_call_output", output="x"), r"'input\[0\]' must be"),
    (item("function_call_output", call_id="c"), r"'input\[0\].output' must be"),
    (item("function_call_output", call_id="c", output=[{"type": "input_image"}]), "input_text"),
    (item("reasoning", content=[]), r"'input\[0\]' must be"),
    (item("reasoning", summary=[], content=[]), r"'input\[0\].content' must be a list"),
    (item("reasoning", summary=[], content=[5]), "'text' in"),
    ({"input": "x", "previous_response_id": "resp_1"}, "'previous_response_id' is not supported"),
    ({"input": "x", "instructions": 5}, "'instructions' must be a string"),
    ({"input": "x", "tools": None}, "'tools' must be a list of objects"),
    ({"input": "x", "tools": "f"}, "'tools' must be a list of objects"),
    ({"input": "x", "tools": [{"type": "function"}]}, "must have a 'name'"),
    ({"input": "x", "max_output_tokens": "5"}, "'max_output_tokens' must be an integer"),
    ({"input": "x", "max_output_tokens": 1.5}, "'max_output_tokens' must be an integer"),
    ({"input": "x", "max_output_tokens": -2}, "between -1 and"),
    ({"input": "x", "max_output_tokens": 1e300}, "between -1 and"),
    ({"input": "x", "reasoning": "high"}, "'reasoning' must be an object"),
    ({"input": "x", "stream": "yes"}, "'stream' must be true or false"),
    ({"input": "x", "stream": True, "stream_options": 5}, "'stream_options' must be an object"),
    ({"input": "x", "n": 2}, "'n' must be 1"),
    ({"input": "x", "n_cmpl": "2"}, "'n_cmpl' must be an integer"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=str)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(body: Json, words: str) -> None:
    with pytest.raises(ClientFault, match=words) as caught:
        to_chat(json.dumps(body).encode())
    assert caught.value.status_hint == 400


BROKEN = [
    b"",
    b'{"input":',
    b'{"input":"\xff"}',
    b'{"input":"x","user":"\xff"}',
    b'{"input":"\\ud800"}',
    b'{"input":[{"role":"user","content":"\\x"}]}',
    b'{"input":' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:40]))
def test_what_is_not_json_is_the_clients_fault(body: bytes) -> None:
    with pytest.raises(ClientFault, match="not valid JSON"):
        to_chat(body)


@pytest.mark.parametrize("body", [b"[1]", b"5", b"null"])
def test_a_request_must_be_an_object(body: bytes) -> None:
    with pytest.raises(ClientFault, match="must be a JSON object"):
        to_chat(body)
