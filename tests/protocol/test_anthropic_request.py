"""Requests of the Anthropic surface, and the chats that llama-server makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvalet.protocol.anthropic import to_chat
from kvalet.protocol.errors import ClientFault
from kvalet.protocol.openai import CHAT, parse_request

Json = dict[str, Any]

HELLO: Json = {"role": "user", "content": "Hello"}
PIXEL: Json = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
TEXT: Json = {"type": "text", "text": "Look:"}


def chat_of(**fields: Any) -> Json:
    body: Json = json.loads(to_chat(json.dumps({"messages": [HELLO], **fields}).encode()))
    return body


def messages_of(*messages: Json) -> list[Json]:
    found: list[Json] = chat_of(messages=list(messages))["messages"]
    return found


def said(*blocks: Json, role: str = "user") -> list[Json]:
    return messages_of({"role": role, "content": list(blocks)})


def image(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_bare_request_gets_the_surfaces_own_limit() -> None:
    assert chat_of() == {"messages": [HELLO], "max_tokens": 4096}


def test_what_only_has_to_be_passed_on_keeps_its_bytes() -> None:
    body = (
        b'{"messages":[{"role":"user","content":"\\u00e9","name":"n"}], "max_tokens": 1e2, '
        b'"temperature":0.70, "top_p":1.0,"top_k":null,"chat_template_kwargs":{"a" : 1}}'
    )
    assert to_chat(body) == (
        b'{"messages":[{"role":"user","content":"\\u00e9","name":"n"}],"max_tokens":1e2,'
        b'"temperature":0.70,"top_p":1.0,"top_k":null,"chat_template_kwargs":{"a" : 1}}'
    )


def test_a_limit_that_is_null_is_none_at_all() -> None:
    body = to_chat(json.dumps({"messages": [HELLO], "max_tokens": None}).encode())
    assert parse_request(CHAT, body).cap is None


def test_what_the_server_drops_is_dropped() -> None:
    dropped = {"model": "m", "metadata": {"user_id": "u"}, "seed": 1, "id_slot": 2, "n": 3}
    assert chat_of(**dropped) == chat_of()


def test_a_stream_is_asked_for_its_usage() -> None:
    asked = chat_of(stream=True)
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}
    for not_streamed in (False, None):
        assert chat_of(stream=not_streamed) == {**chat_of(), "stream": not_streamed}


def test_stop_sequences_make_the_server_tell_which_of_them_it_met() -> None:
    assert chat_of(stop_sequences=["a", "b"]) == {**chat_of(), "stop": ["a", "b"], "verbose": True}
    assert chat_of(stop_sequences="a")["stop"] == "a"
    assert chat_of(stop_sequences=[]) == chat_of(stop_sequences=None) == chat_of()


def test_a_system_prompt_comes_first_whether_text_or_blocks() -> None:
    first = {"role": "system", "content": "Be brief."}
    assert chat_of(system="Be brief.")["messages"] == [first, HELLO]
    blocks = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": PIXEL},
        {"text": "unheard"},
        {"type": "text", "text": "brief."},
    ]
    assert chat_of(system=blocks)["messages"] == [first, HELLO]
    assert chat_of(system="")["messages"][0] == {"role": "system", "content": ""}
    assert chat_of(system=None) == chat_of()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x-anthropic-billing-header: v=1; cch=a5145;You", "cch=fffff;You"),
        ("x-anthropic-billing-header: v=1;\n cch=a5145; cch=b5145;", "cch=fffff; cch=b5145;"),
        ("x-anthropic-billing-header: cch=a51; cch=b5145;", "cch=a51; cch=b5145;"),
        ("x-anthropic-billing-header: cch=a5145", "cch=a5145"),
        ("You x-anthropic-billing-header: cch=a5145;", "cch=a5145;"),
    ],
)
def test_a_stamp_that_changes_with_each_request_is_blotted_out(written: str, read: str) -> None:
    for system in (written, [{"type": "text", "text": written}]):
        content = chat_of(system=system)["messages"][0]["content"]
        assert content.endswith(read)
        assert len(content) == len(written)


def test_texts_and_images_become_parts_in_their_order() -> None:
    assert said(
        TEXT,
        {"type": "image", "source": PIXEL},
        {"type": "image", "source": {"type": "url", "url": "http://host/cat.png"}},
        {"type": "image", "source": {"type": "base64"}},
        {"type": "image", "source": {"type": "url"}},
    ) == [
        {
            "role": "user",
            "content": [
                TEXT,
                image("data:image/png;base64,iVBO"),
                image("http://host/cat.png"),
                image("data:image/jpeg;base64,"),
                image(""),
            ],
        }
    ]


def test_blocks_that_a_chat_does_not_know_are_passed_over() -> None:
    unknown: list[Json] = [
        {"type": "search_result", "source": "http://host", "content": 5},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "image"},
        {"type": None},
    ]
    assert said(*unknown, TEXT) == said(TEXT) == [{"role": "user", "content": [TEXT]}]
    assert said(*unknown) == said() == []


def test_thoughts_are_joined_and_set_apart() -> None:
    blocks: list[Json] = [
        {"type": "thinking", "thinking": "First. ", "signature": "s"},
        {"type": "thinking", "thinking": "Then.", "signature": "s"},
        {"type": "thinking", "thinking": None},
    ]
    thought = {"role": "assistant", "content": "", "reasoning_content": "First. Then."}
    assert said(*blocks, role="assistant") == [thought]
    assert said(*blocks, TEXT, role="assistant") == [{**thought, "content": [TEXT]}]


def test_the_use_of_a_tool_becomes_a_call() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "find", "input": {"a": 1.0, "b": ["\u00e9"]}}
    bare = {"type": "tool_use", "input": None}
    (message,) = said(use, bare, {"type": "tool_use"}, role="assistant")
    nothing = {"id": "", "type": "function", "function": {"name": "", "arguments": "{}"}}
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "t1",
                "type": "function",
                "function": {"name": "find", "arguments": '{"a":1.0,"b":["\u00e9"]}'},
            },
            nothing,
            nothing,
        ],
    }


def test_results_of_tools_follow_the_message_they_came_in() -> None:
    sunny = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    silent = {"type": "tool_result", "tool_use_id": "t2", "is_error": True}
    results = [
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
    ]
    assert said(sunny, silent) == results
    assert said(sunny, TEXT, silent) == [{"role": "user", "content": [TEXT]}, *results]


def test_a_result_of_texts_alone_is_one_text_but_with_an_image_it_is_parts() -> None:
    texts: list[Json] = [TEXT, {"type": "other"}, {"type": "text", "text": " rain"}]
    picture: Json = {"type": "image", "source": PIXEL}

    def content(blocks: list[Json]) -> Any:
        return said({"type": "tool_result", "content": blocks})[0]["content"]

    assert content(texts) == "Look: rain"
    pixel = image("data:image/png;base64,iVBO")
    assert content([*texts, picture]) == [TEXT, texts[2], pixel]
    assert content([picture, TEXT]) == [pixel, TEXT]
    assert content([]) == ""


def test_an_answer_that_the_client_has_begun_stays_last() -> None:
    begun = {"role": "assistant", "content": "The sky is"}
    assert messages_of(HELLO, begun) == [HELLO, begun]


def test_an_assistant_who_said_nothing_is_left_out() -> None:
    assert messages_of(HELLO, {"role": "assistant"}) == [HELLO]
    silence = {"role": "assistant", "content": None}
    assert messages_of(HELLO, silence) == [HELLO, silence]


def test_tools_become_functions() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"name": "find", "description": "Finds.", "input_schema": schema}, {"type": "web"}]
    assert chat_of(tools=tools)["tools"] == [
        {
            "type": "function",
            "function": {"name": "find", "description": "Finds.", "parameters": schema},
        },
        {"type": "function", "function": {"name": "", "description": "", "parameters": {}}},
    ]
    assert chat_of(tools=[])["tools"] == []
    assert chat_of(tools=None) == chat_of()


@pytest.mark.parametrize(
    ("choice", "said_as"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "find"}, "required"),
        ({"type": "none"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_choice_of_a_tool_is_what_the_server_makes_of_it(
    choice: Json | None, said_as: str | None
) -> None:
    assert chat_of(tool_choice=choice).get("tool_choice") == said_as


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, 2048),
        ({"type": "enabled", "budget_tokens": 0}, 0),
        ({"type": "enabled"}, 10_000),
        ({"type": "disabled"}, None),
        (None, None),
    ],
)
def test_thinking_gets_a_budget_only_when_it_is_wanted(
    thinking: Json | None, budget: int | None
) -> None:
    assert chat_of(thinking=thinking).get("thinking_budget_tokens") == budget


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"[1]", "the request body: Expected object, got array"),
        (b"{bad", "not valid JSON"),
        (b'{"messages":"\xff"}', "not valid JSON"),
        (b'{"messages":' + b"[" * 100_000, "not valid JSON"),
        (b"{}", "'messages' must be a non-empty list"),
        (b'{"messages":[]}', "'messages' must be a non-empty list"),
        (b'{"messages":5}', "'messages': Expected array | null, got int"),
        (b'{"messages":["x"]}', "'messages[0]': Expected object, got str"),
        (b'{"messages":[{"content":"x"}]}', "'messages[0]': Object missing required field role"),
        (b'{"messages":[{"role":"user"}]}', "'messages[0]': .* needs 'content'"),
        (b'{"messages":[{"role":"system"}]}', "'messages[0]': .* needs 'content'"),
        (b'{"messages":[{"role":"user","content":5}]}', r"'messages\[0\].content': Expected"),
    ],
)
def test_a_malformed_request_is_refused_with_a_reason(body: bytes, complaint: str) -> None:
    with pytest.raises(ClientFault, match=complaint.replace("[0]'", r"\[0\]'")) as refused:
        to_chat(body)
    assert refused.value.status_hint == 400


@pytest.mark.parametrize(
    ("block", "place"),
    [
        (5, "messages[0].content[0]"),
        ({"type": 5}, "messages[0].content[0].type"),
        ({"type": "text"}, "messages[0].content[0]"),
        ({"type": "text", "text": 5}, "messages[0].content[0].text"),
        ({"type": "thinking", "thinking": 5}, "messages[0].content[0].thinking"),
        ({"type": "image", "source": {"url": 5}}, "messages[0].content[0].source.url"),
        ({"type": "tool_use", "name": 5}, "messages[0].content[0].name"),
        ({"type": "tool_result", "content": 5}, "messages[0].content[0].content"),
        (
            {"type": "tool_result", "content": [{"type": "text"}]},
            "messages[0].content[0].content[0]",
        ),
    ],
)
def test_a_block_of_the_wrong_type_is_named(block: object, place: str) -> None:
    with pytest.raises(ClientFault) as refused:
        chat_of(messages=[{"role": "user", "content": [block]}])
    assert str(refused.value).startswith(f"'{place}': ")


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("system", 5, "system"),
        ("system", [{"type": "text", "text": 5}], "system[0].text"),
        ("tools", [5], "tools[0]"),
        ("tools", [{"name": 5}], "tools[0].name"),
        ("tool_choice", "auto", "tool_choice"),
        ("stop_sequences", [5], "stop_sequences[0]"),
        ("stream", "yes", "stream"),
        ("thinking", {"budget_tokens": "many"}, "thinking.budget_tokens"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(name: str, value: object, place: str) -> None:
    with pytest.raises(ClientFault) as refused:
        chat_of(**{name: value})
    assert str(refused.value).startswith(f"'{place}': ")
