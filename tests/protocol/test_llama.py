"""llama-server's answers, as a b10434 gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvalet.protocol import llama
from kvalet.protocol.errors import ServerFault
from kvalet.protocol.llama import ErrorReport, SlotAction, SlotState

PROPS = b"""{"default_generation_settings":{"params":{"seed":4294967295},"n_ctx":2048},
"total_slots":2,"model_alias":"gemma","model_ftype":"Q4_K - Medium","model_path":"/m/gemma.gguf",
"modalities":{"vision":false},"chat_template":"{%- x -%}","chat_template_caps":
{"supports_tools":false},"build_info":"b1-7e4c0a9","is_sleeping":false}"""

SLOTS = b"""[{"id":0,"n_ctx":4096,"speculative":false,"is_processing":false},
{"id":1,"n_ctx":4096,"is_processing":true,"id_task":51,"n_prompt_tokens":27,
"n_prompt_tokens_processed":7,"n_prompt_tokens_cache":20,"params":{},"next_token":[{}]}]"""

COMPLETION = b"""{"index":0,"content":", there","tokens":[236764,993],"id_slot":3,"stop":true,
"tokens_predicted":2,"tokens_evaluated":5,"prompt":"<bos>Once","truncated":false,
"stop_type":"limit","tokens_cached":6,"timings":{"cache_n":1,"prompt_n":4,"prompt_ms":15.944,
"predicted_n":2,"predicted_ms":10.961,"draft_n":3,"draft_n_accepted":1}}"""


def test_props_tell_slots_and_the_limit_of_one() -> None:
    props = llama.decode_props(PROPS)
    assert (props.n_ctx, props.slots, props.build) == (2048, 2, "b1-7e4c0a9")
    assert (props.model_alias, props.model_path) == ("gemma", "/m/gemma.gguf")
    assert props.template_caps == {"supports_tools": False}
    assert not props.sleeping


def test_props_without_an_alias_have_an_empty_one() -> None:
    assert llama.decode_props(PROPS.replace(b'"gemma"', b"null")).model_alias == ""


def test_a_model_is_called_by_its_alias_and_else_by_its_file() -> None:
    assert llama.decode_props(PROPS).model == "gemma"
    assert llama.decode_props(PROPS.replace(b'"gemma"', b"null")).model == "gemma"
    unnamed = llama.Props(model_alias="/m/other.gguf", model_path="/m/other.gguf")
    assert unnamed.model == "other"


def test_props_of_another_build_are_read_as_far_as_they_go() -> None:
    assert llama.decode_props(b"{}") == llama.Props()


def test_a_slot_that_never_ran_holds_no_cells() -> None:
    idle, busy = llama.decode_slots(SLOTS)
    assert idle == SlotState(id=0, n_ctx=4096)
    assert (busy.n_prompt_tokens, busy.is_processing) == (27, True)
    assert (busy.n_prompt_tokens_cache, busy.n_prompt_tokens_processed) == (20, 7)


def test_tokens_are_read_with_and_without_their_pieces() -> None:
    assert llama.decode_tokens(b'{"tokens":[2,9259]}') == [2, 9259]
    pieces = b'{"tokens":[{"id":2,"piece":"<bos>"},{"id":478,"piece":[240]}]}'
    assert llama.decode_tokens(pieces) == [2, 478]


def test_a_rendered_template_is_its_prompt() -> None:
    assert llama.decode_template(b'{"prompt":"<|im_start|>user\\nhi"}') == "<|im_start|>user\nhi"


@pytest.mark.parametrize(
    ("body", "action"),
    [
        (
            b'{"id_slot":0,"filename":"a","n_saved":249,"n_written":4597,"timings":{"save_ms":2}}',
            SlotAction(id_slot=0, n_saved=249, n_written=4597),
        ),
        (
            b'{"id_slot":1,"filename":"a","n_restored":249,"n_read":4597}',
            SlotAction(id_slot=1, n_restored=249, n_read=4597),
        ),
        (b'{"id_slot":0,"n_erased":249}', SlotAction(id_slot=0, n_erased=249)),
    ],
)
def test_each_slot_action_tells_what_it_moved(body: bytes, action: SlotAction) -> None:
    assert llama.decode_slot_action(body) == action


def test_a_completion_tells_its_tokens_and_its_work() -> None:
    completion = llama.decode_completion(COMPLETION)
    assert completion.tokens == [236764, 993]
    assert (completion.stop_type, completion.tokens_cached) == ("limit", 6)
    assert (completion.timings.cache_n, completion.timings.draft_n) == (1, 3)


DECODERS: list[Callable[[bytes], object]] = [
    llama.decode_props,
    llama.decode_slots,
    llama.decode_tokens,
    llama.decode_template,
    llama.decode_slot_action,
    llama.decode_completion,
]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"tokens":3,"id":"x"}', b'"\xff"', b"[" * 9999])
@pytest.mark.parametrize("decode", DECODERS)
def test_an_answer_of_another_shape_is_the_servers_fault(
    decode: Callable[[bytes], object], body: bytes
) -> None:
    if decode is llama.decode_completion and body.startswith(b"{"):
        body = b'{"tokens":"none"}'
    if decode is llama.decode_props and body.startswith(b"{"):
        body = b'{"total_slots":"none"}'
    with pytest.raises(ServerFault, match="is not understood"):
        decode(body)


@pytest.mark.parametrize("decode", DECODERS)
def test_no_cut_of_an_answer_passes_for_a_whole_one(decode: Callable[[bytes], object]) -> None:
    for whole in (PROPS, SLOTS, COMPLETION):
        for cut in range(len(whole)):
            with pytest.raises(ServerFault):
                decode(whole[:cut])


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (
            b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error",'
            b'"n_prompt_tokens":4200,"n_ctx":4096}}',
            ErrorReport(
                message="too long",
                type="exceed_context_size_error",
                code=400,
                n_prompt_tokens=4200,
                n_ctx=4096,
            ),
        ),
        (b'{"code":500,"message":"bare"}', ErrorReport(message="bare", code=500)),
        (b'{"error":"just text"}', ErrorReport(message="just text")),
        (b"Bad Gateway \xff", ErrorReport(message="Bad Gateway \N{REPLACEMENT CHARACTER}")),
        (b'{"detail":"odd"}', ErrorReport(message='{"detail":"odd"}')),
        (b"", ErrorReport()),
    ],
)
def test_an_error_always_says_something(body: bytes, report: ErrorReport) -> None:
    assert llama.decode_error(body) == report


@pytest.mark.parametrize(
    ("said", "exact"),
    [("", None), (',"exact_concurrency":true', True), (',"exact_concurrency":false', False)]
    + [(f',"exact_concurrency":{odd}', False) for odd in ('"on"', "1", "{}")],
)
def test_the_mere_presence_of_the_exact_key_tells_a_build_that_gives_notices(
    said: str, exact: bool | None
) -> None:
    props = llama.decode_props(f'{{"total_slots":4{said}}}'.encode())
    assert (props.slots, props.exact) == (4, exact)


def test_a_parked_slot_occupies_nothing_and_one_that_is_being_copied_all_it_has() -> None:
    body = b"""[{"id":0,"n_prompt_tokens":9},
        {"id":1,"n_prompt_tokens":9,"is_processing":true,"is_preempted":true},
        {"id":2,"n_prompt_tokens":9,"is_preempted":false,"is_transferring":true},
        {"id":3,"n_prompt_tokens":9,"is_preempted":true,"is_transferring":true}]"""
    assert [slot.resident for slot in llama.decode_slots(body)] == [9, 0, 9, 9]
