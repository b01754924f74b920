"""What is read of a request, what is refused, and what keeps an answer in one leg."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalet.protocol.errors import ClientFault
from kvalet.protocol.openai import CHAT, COMPLETIONS, ParsedRequest, parse_request

USER = '"messages":[{"role":"user","content":"hi"}]'


def chat(more: str = "") -> ParsedRequest:
    return parse_request(CHAT, ("{" + USER + more + "}").encode())


def text(prompt: str = '"Once"', more: str = "") -> ParsedRequest:
    return parse_request(COMPLETIONS, f'{{"prompt":{prompt}{more}}}'.encode())


def refusal(surface: str, body: str | bytes) -> str:
    with pytest.raises(ClientFault) as caught:
        parse_request(surface, body.encode() if isinstance(body, str) else body)
    assert caught.value.status_hint == 400
    return str(caught.value)


def test_a_plain_chat_is_continuable_and_has_no_wishes() -> None:
    request = chat()
    assert (request.surface, request.streaming, request.include_usage) == (CHAT, False, False)
    assert (request.cap, request.seats, request.stops) == (None, 1, ())
    assert (request.model, request.seed, request.prompts) == (None, None, ())
    assert request.continuable


def test_every_wish_is_read() -> None:
    request = chat(
        ',"stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"model":"m",'
        '"stop":["a","b"],"seed":3'
    )
    assert (request.streaming, request.include_usage, request.cap) == (True, True, 7)
    assert (request.model, request.stops, request.seed) == ("m", ("a", "b"), 3)


def test_null_is_the_same_as_nothing() -> None:
    names = ["stream", "stream_options", "max_tokens", "n_predict", "model", "stop", "seed"]
    names += ["n", "n_cmpl", "tools"]
    request = chat("".join(f',"{name}":null' for name in names))
    assert request.fields.keys() == {"messages", *names}
    assert msgspec.structs.replace(request, fields={}) == msgspec.structs.replace(chat(), fields={})


def test_unread_fields_keep_their_bytes() -> None:
    request = chat(',"extra": {"b" : 1.50,"a":[ ]} , "big":123456789012345678901234567890')
    assert bytes(request.fields["extra"]) == b'{"b" : 1.50,"a":[ ]}'
    assert bytes(request.fields["big"]) == b"123456789012345678901234567890"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{b", b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":' + b"[" * 99999]
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    assert "not valid JSON" in refusal(CHAT, body)


@pytest.mark.parametrize("body", ["[]", "null", '"x"', "3"])
def test_what_is_no_object_is_refused(body: str) -> None:
    assert refusal(CHAT, body) == "the request body must be a JSON object"


@pytest.mark.parametrize("cut", range(len(USER) + 1))
def test_no_cut_of_a_request_is_a_request(cut: int) -> None:
    assert "not valid JSON" in refusal(CHAT, "{" + USER[:cut])


@pytest.mark.parametrize(
    "messages", ["null", "[]", "{}", '"hi"', "[1]", '[{"role":1}]', '["user"]']
)
def test_messages_must_be_messages(messages: str) -> None:
    assert refusal(CHAT, f'{{"messages":{messages}}}').startswith("'messages' must be")
    assert refusal(CHAT, "{}").startswith("'messages' must be")


@pytest.mark.parametrize(
    "prompt",
    ["null", "[]", "3", "{}", "[null]", "[[]]", '["a",[]]', "[1,[2]]", "[1.5]", '[{"p":1}]'],
)
def test_a_prompt_must_be_text_or_tokens(prompt: str) -> None:
    assert refusal(COMPLETIONS, f'{{"prompt":{prompt}}}').startswith("'prompt' must be")
    assert refusal(COMPLETIONS, "{}").startswith("'prompt' must be")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ('"Once"', (b'"Once"',)),
        ('""', (b'""',)),
        ("[2, 3]", (b"[2, 3]",)),
        ('[2,"Once"]', (b'[2,"Once"]',)),
        ('["a"]', (b'"a"',)),
        ('["a", "b"]', (b'"a"', b'"b"')),
        ('["a",[1, "x"]]', (b'"a"', b'[1, "x"]')),
        ("[[1],[2]]", (b"[1]", b"[2]")),
    ],
)
def test_prompts_are_told_apart_as_the_server_does(prompt: str, prompts: tuple[bytes, ...]) -> None:
    request = text(prompt)
    assert request.prompts == prompts
    assert request.seats == len(prompts)
    assert request.continuable == (len(prompts) == 1)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ('"stream":1', "'stream' must be true or false"),
        ('"stream_options":[]', "'stream_options' must be an object"),
        ('"n":0', "'n' must be a positive integer"),
        ('"n":"2"', "'n' must be an integer"),
        ('"n_cmpl":-1', "'n_cmpl' must be a positive integer"),
        ('"max_tokens":"3"', "'max_tokens' must be an integer"),
        ('"max_tokens":true', "'max_tokens' must be an integer"),
        ('"max_tokens":1.5', "'max_tokens' must be an integer"),
        ('"max_tokens":-2', "'max_tokens' must be between -1 and 2147483647"),
        ('"n_predict":2147483648', "'n_predict' must be between -1 and 2147483647"),
        ('"max_tokens":1,"n_predict":-5', "'n_predict' must be between"),
        ('"stop":1', "'stop' must be a string or a list of strings"),
        ('"stop":["a",1]', "'stop' must be a string or a list of strings"),
        ('"model":1', "'model' must be a string"),
        ('"seed":"3"', "'seed' must be an integer"),
    ],
)
@pytest.mark.parametrize("surface", [CHAT, COMPLETIONS])
def test_an_ill_typed_field_is_named(surface: str, field: str, problem: str) -> None:
    assert refusal(surface, "{" + USER + ',"prompt":"x",' + field + "}").startswith(problem)


@pytest.mark.parametrize(
    ("fields", "cap"),
    [
        ('"max_tokens":5', 5),
        ('"max_tokens":5.0', 5),
        ('"n_predict":6', 6),
        ('"max_tokens":5,"max_completion_tokens":4,"n_predict":6', 6),
        ('"max_tokens":5,"max_completion_tokens":null', 5),
        ('"max_completion_tokens":-1,"max_tokens":5', None),
        ('"max_tokens":0', 1),
        ('"max_tokens":2147483647', 2**31 - 1),
    ],
)
def test_the_cap_is_the_first_limit_present(fields: str, cap: int | None) -> None:
    assert chat("," + fields).cap == cap


@pytest.mark.parametrize(
    ("value", "seed"),
    [("0", 0), ("-1", None), ("4294967295", None), ("4294967299", 3), ("7.0", 7)],
)
def test_a_seed_counts_only_where_the_server_would_use_it(value: str, seed: int | None) -> None:
    assert chat(f',"seed":{value}').seed == seed


def test_one_stop_may_be_bare() -> None:
    assert chat(',"stop":"a"').stops == ("a",)


def test_each_answer_and_each_prompt_takes_a_seat() -> None:
    assert chat(',"n":3').seats == 3
    assert chat(',"n":3,"n_cmpl":2').seats == 2
    assert text('["a","b"]', ',"n":2').seats == 4


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ('"n":2', "several answers at once"),
        ('"grammar":"root ::= x"', "grammar"),
        ('"mirostat":2', "mirostat"),
        ('"xtc_probability":0.5', "xtc_probability"),
        ('"t_max_predict_ms":100', "t_max_predict_ms"),
        ('"echo":true', "echo"),
        ('"tools":[{}]', "tools"),
        ('"tools":[{}],"tool_choice":"auto"', "tools"),
        ('"continue_final_message":true', "the answer's beginning is the client's"),
    ],
)
def test_a_chat_that_text_alone_cannot_carry_is_not_continued(field: str, why: str) -> None:
    request = chat("," + field)
    assert (request.continuable, request.why_not) == (False, why)


def test_a_chat_that_ends_with_the_assistants_words_is_not_continued() -> None:
    body = b'{"messages":[{"role":"user"},{"role":"assistant","content":"I"}]}'
    assert not parse_request(CHAT, body).continuable


@pytest.mark.parametrize(
    "field",
    [
        '"tools":[ ]',
        '"tools":[{}],"tool_choice":"none"',
        '"grammar":""',
        '"mirostat":0',
        '"xtc_probability":0.0',
        '"echo":false',
        '"continue_final_message":false',
        '"response_format":{"type":"json_schema","json_schema":{}}',
        '"json_schema":{}',
        '"logprobs":true,"top_logprobs":3',
        '"id_slot":3,"n_keep":4,"cache_prompt":false',
    ],
)
def test_a_chat_with_a_harmless_wish_is_continued(field: str) -> None:
    assert chat("," + field).continuable


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ('"json_schema":{}', "json_schema"),
        ('"suffix":"x"', "suffix"),
        ('"response_format":{"type":"json_object"}', "response_format"),
        ('"grammar":"root ::= x"', "grammar"),
    ],
)
def test_a_text_under_a_grammar_is_not_continued(field: str, why: str) -> None:
    assert text(more="," + field).why_not == why


@pytest.mark.parametrize(
    "field",
    [
        '"response_format":{"type":"text"}',
        '"response_format":null,"json_schema":null,"suffix":null',
        '"logprobs":3,"tools":[{}]',
    ],
)
def test_a_text_with_a_harmless_wish_is_continued(field: str) -> None:
    assert text(more="," + field).continuable


def test_a_response_format_of_no_shape_is_refused() -> None:
    body = '{"prompt":"x","response_format":[1]}'
    assert refusal(COMPLETIONS, body) == "'response_format' must be an object"


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:mesgp0 ', max_size=40).map(str.encode))
def test_any_bytes_are_a_request_or_the_clients_fault(body: bytes) -> None:
    for surface in (CHAT, COMPLETIONS):
        with suppress(ClientFault):
            parse_request(surface, body)
