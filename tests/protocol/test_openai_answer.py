"""A streamed answer put together must look like the one the server gives unstreamed."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvalet.protocol.errors import ServerFault
from kvalet.protocol.llama import Timings
from kvalet.protocol.openai import CHAT, COMPLETIONS, Assembler, KvaletUsage, Totals

TOTALS = Totals().after(
    Timings(cache_n=20, prompt_n=5, prompt_ms=22.423, predicted_n=3, predicted_ms=22.385)
)
END = b'"created":7,"id":"chatcmpl-1","model":"m.gguf","system_fingerprint":"b1","object":"o"}'

Json = dict[str, object]


def answer(surface: str, *choices: bytes) -> Json:
    assembler = Assembler(surface)
    for choice in choices:
        assembler.add(b'{"choices":[' + choice + b"]," + END)
    assembler.add(b"[DONE]")
    read: Json = json.loads(assembler.result(TOTALS, KvaletUsage()))
    return read


def all_choices(surface: str, *choices: bytes) -> list[Json]:
    return msgspec.convert(answer(surface, *choices)["choices"], list[Json])


def only_choice(surface: str, *choices: bytes) -> Json:
    (choice,) = all_choices(surface, *choices)
    return choice


def test_a_chat_equals_the_servers_own_unstreamed_answer() -> None:
    whole = answer(
        CHAT,
        b'{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}',
        b'{"finish_reason":null,"index":0,"delta":{"content":"<|"}}',
        b'{"finish_reason":null,"index":0,"delta":{"content":"im"}}',
        b'{"finish_reason":"length","index":0,"delta":{}}',
    )
    server = json.loads(
        '{"choices":[{"finish_reason":"length","index":0,"message":{"role":"assistant",'
        '"content":"<|im"}}],"created":7,"model":"m.gguf","system_fingerprint":"b1",'
        '"object":"chat.completion","usage":{"completion_tokens":3,"prompt_tokens":25,'
        '"total_tokens":28,"prompt_tokens_details":{"cached_tokens":20}},"id":"chatcmpl-1",'
        '"timings":{"cache_n":20,"prompt_n":5,"prompt_ms":22.423,'
        '"prompt_per_token_ms":4.4845999999999995,"prompt_per_second":222.9853275654462,'
        '"predicted_n":3,"predicted_ms":22.385,"predicted_per_token_ms":11.1925,'
        '"predicted_per_second":89.34554389099843}}'
    )
    server["usage"]["kvalet"] = {
        "parks": 0,
        "resumes": 0,
        "recomputes": 0,
        "waited_s": 0.0,
        "parked_s": 0.0,
    }
    assert whole == server
    assert list(whole) == list(server)


def test_a_text_equals_the_servers_own_unstreamed_answer() -> None:
    whole = answer(
        COMPLETIONS,
        b'{"text":", ","index":0,"logprobs":null,"finish_reason":null}',
        b'{"text":"there","index":0,"logprobs":null,"finish_reason":null}',
        b'{"text":"","index":0,"logprobs":null,"finish_reason":"stop"}',
    )
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [
        {"text": ", there", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]


def test_thoughts_stand_beside_the_text() -> None:
    choice = only_choice(
        CHAT,
        b'{"index":0,"delta":{"reasoning_content":"I th"}}',
        b'{"index":0,"delta":{"reasoning_content":"ink"}}',
        b'{"index":0,"delta":{"content":"Yes"},"finish_reason":"stop"}',
    )
    assert choice == {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": "Yes", "reasoning_content": "I think"},
    }


def test_tool_calls_are_merged_by_their_index() -> None:
    choice = only_choice(
        CHAT,
        b'{"index":0,"delta":{"tool_calls":[{"index":1,"id":"b","type":"function",'
        b'"function":{"name":"two","arguments":"{}"}}]}}',
        b'{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"name":"one"}}]}}',
        b'{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\""}},'
        b'{"index":0,"function":{"arguments":":1}"}},{"index":0}]}}',
        b'{"index":0,"delta":{},"finish_reason":"tool_calls"}',
    )
    assert choice == {
        "finish_reason": "tool_calls",
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "one", "arguments": '{"a":1}'}},
                {"type": "function", "function": {"name": "two", "arguments": "{}"}, "id": "b"},
            ],
        },
    }


@pytest.mark.parametrize("surface", [CHAT, COMPLETIONS])
def test_log_probabilities_are_strung_together(surface: str) -> None:
    choice = only_choice(
        surface,
        b'{"index":0,"logprobs":{"content":[{"id":1,"logprob":-0.50}]}}',
        b'{"index":0,"logprobs":{"content":null}}',
        b'{"index":0,"logprobs":{"content":[{"id":2}]}}',
    )
    assert choice["logprobs"] == {"content": [{"id": 1, "logprob": -0.5}, {"id": 2}]}


def test_choices_come_in_the_order_of_their_index() -> None:
    choices = all_choices(COMPLETIONS, b'{"text":"b","index":1}', b'{"text":"a","index":0}')
    assert [choice["text"] for choice in choices] == ["a", "b"]


def test_the_first_leg_names_the_answer_and_the_last_one_ends_it() -> None:
    assembler = Assembler(CHAT)
    assembler.add(b'{"id":"one","created":1,"choices":[{"finish_reason":"length","delta":{}}]}')
    assembler.add(b'{"id":"two","created":2,"choices":[{"finish_reason":"stop","delta":{}}]}')
    assembler.add(b'{"id":"two","choices":[],"usage":{},"timings":{},"__verbose":{"a":1}}')
    whole = json.loads(assembler.result(TOTALS, KvaletUsage()))
    assert (whole["id"], whole["created"]) == ("one", 1)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["__verbose"] == {"a": 1}


def test_events_without_an_answer_in_them_are_passed_over() -> None:
    assembler = Assembler(CHAT)
    for payload in (b"null", b"{}", b'{"choices":null,"error":null,"prompt_progress":{}}'):
        assembler.add(payload)
    whole = json.loads(assembler.result(Totals(), KvaletUsage()))
    assert (whole["choices"], whole["id"], whole["created"]) == ([], "", 0)
    assert "error" not in whole


def test_an_error_among_the_chunks_is_the_servers_fault() -> None:
    with pytest.raises(ServerFault, match=r"Context size has been exceeded\."):
        Assembler(CHAT).add(b'{"error":{"message":"Context size has been exceeded."}}')


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"choices":[3]}'])
def test_garbage_among_the_chunks_is_the_servers_fault(payload: bytes) -> None:
    with pytest.raises(ServerFault, match="not understood"):
        Assembler(CHAT).add(payload)
