"""What goes upstream: the client's request, cut to one leg in one slot."""

from __future__ import annotations

import json

import pytest

from kvalet.protocol.openai import (
    CHAT,
    COMPLETIONS,
    ParsedRequest,
    Partial,
    count_bodies,
    leg_body,
    parse_request,
    tokenize_body,
)

USER = '{"role":"user", "content":"hi"}'
NOTHING = Partial()
SOME = Partial(content="Hel")

Json = dict[str, object]


def chat(more: str = "") -> ParsedRequest:
    return parse_request(CHAT, f'{{"messages":[{USER} ]{more}}}'.encode())


def text(prompt: str = '"Once"', more: str = "") -> ParsedRequest:
    return parse_request(COMPLETIONS, f'{{"prompt":{prompt}{more}}}'.encode())


def body(
    request: ParsedRequest, partial: Partial = NOTHING, leg: int = 0, progress: bool = False
) -> Json:
    sent: Json = json.loads(
        leg_body(request, partial=partial, max_tokens=64, slot=2, leg=leg, progress=progress)
    )
    return sent


def test_the_first_leg_is_the_clients_request_streamed_in_our_slot() -> None:
    assert body(chat(',"temperature":0.5,"stream":false')) == {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "stream": True,
        "max_tokens": 64,
        "id_slot": 2,
        "cache_prompt": True,
    }


def test_untouched_fields_travel_as_bytes() -> None:
    sent = leg_body(
        chat(',"x": {"b" : 1.50,"a":[ ]}'),
        partial=NOTHING,
        max_tokens=1,
        slot=0,
        leg=0,
        progress=False,
    )
    assert b'"messages":[' + USER.encode() + b' ],"x":{"b" : 1.50,"a":[ ]}' in sent


def test_what_is_ours_to_say_is_not_the_clients() -> None:
    theirs = (
        ',"max_tokens":9,"max_completion_tokens":9,"n_predict":9,"id_slot":0,'
        '"sse_ping_interval":1,"return_progress":true'
    )
    assert body(chat(theirs)) == body(chat())


def test_progress_is_asked_for_when_wanted() -> None:
    assert body(chat(), progress=True)["return_progress"] is True


@pytest.mark.parametrize(("more", "kept"), [("false", False), ("true", True), ("null", True)])
def test_the_cache_is_used_unless_the_client_forbids_it(more: str, kept: bool) -> None:
    assert body(chat(f',"cache_prompt":{more}'))["cache_prompt"] is kept


def test_several_answers_at_once_find_their_own_slots() -> None:
    assert "id_slot" not in body(chat(',"n":2'))


def test_stream_options_are_left_to_the_client_on_every_leg() -> None:
    request = chat(',"stream":true,"stream_options":{"include_usage":true}')
    assert body(request)["stream_options"] == {"include_usage": True}
    assert body(request, SOME, 1)["stream_options"] == {"include_usage": True}


def test_a_later_leg_of_a_chat_continues_the_answer() -> None:
    sent = body(chat(), SOME, 1)
    assert sent["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hel"},
    ]
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)


def test_a_leg_that_ended_in_a_thought_is_continued_inside_it() -> None:
    sent = body(chat(), Partial(reasoning="Hmm"), 1)
    assert sent["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hmm"},
    ]
    assert sent["continue_final_message"] == "reasoning_content"


def test_a_leg_that_ended_after_a_thought_is_continued_behind_it() -> None:
    sent = body(chat(), Partial(content="Yes", reasoning="Hmm"), 1)
    assert sent["continue_final_message"] is True
    assert sent["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hmm"},
    ]


def test_a_later_leg_without_any_text_starts_over() -> None:
    assert body(chat(), NOTHING, 3) == body(chat())


@pytest.mark.parametrize(
    ("prompt", "extended"),
    [
        ('"On\\u00e9 "', "On\N{LATIN SMALL LETTER E WITH ACUTE} Hel"),
        ('["Once"]', "OnceHel"),
        ("[2, 3 ]", [2, 3, "Hel"]),
        ('[[2,"x"]]', [2, "x", "Hel"]),
    ],
)
def test_a_later_leg_of_a_text_continues_its_prompt(prompt: str, extended: object) -> None:
    assert body(text(prompt), SOME, 1)["prompt"] == extended


def test_what_cannot_be_continued_never_is() -> None:
    with pytest.raises(AssertionError, match="tools"):
        body(chat(',"tools":[{}]'), SOME, 1)


@pytest.mark.parametrize(
    ("seed", "leg", "sent"), [(5, 0, 5), (5, 2, 7), (2**32 - 2, 1, 0), (-1, 2, -1)]
)
def test_each_leg_draws_from_its_own_seed(seed: int, leg: int, sent: int) -> None:
    assert body(chat(f',"seed":{seed}'), leg=leg)["seed"] == sent


def test_no_seed_stays_no_seed() -> None:
    assert "seed" not in body(chat(), SOME, 1)


def test_a_chat_is_counted_by_its_template_with_all_its_fields() -> None:
    (fresh,) = count_bodies(chat(',"tools":[{"a":1}],"chat_template_kwargs":{"x":1}'), NOTHING)
    assert json.loads(fresh) == {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"a": 1}],
        "chat_template_kwargs": {"x": 1},
    }
    (later,) = count_bodies(chat(), SOME)
    assert json.loads(later)["continue_final_message"] is True


@pytest.mark.parametrize(
    ("prompt", "partial", "counted"),
    [
        ('"Once"', NOTHING, ["Once"]),
        ('"Once"', SOME, ["OnceHel"]),
        ("[2,3]", NOTHING, [[2, 3]]),
        ("[2,3]", SOME, [[2, 3, "Hel"]]),
        ('["a",[2]]', NOTHING, ["a", [2]]),
    ],
)
def test_a_text_is_counted_prompt_by_prompt(
    prompt: str, partial: Partial, counted: list[object]
) -> None:
    assert [json.loads(one) for one in count_bodies(text(prompt), partial)] == [
        {"content": content, "add_special": True, "parse_special": True} for content in counted
    ]


def test_a_rendered_prompt_is_counted_as_the_chat_would() -> None:
    assert json.loads(tokenize_body('<bos>"\n')) == {
        "content": '<bos>"\n',
        "add_special": True,
        "parse_special": True,
    }
