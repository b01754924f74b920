"""Chunks as a b10434 streams them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalet.protocol.errors import ServerFault
from kvalet.protocol.llama import Timings
from kvalet.protocol.openai import Chunk, Progress, StopTail, Usage, read_chunk
from kvalet.protocol.openai_stream import CachedTokens

END = b'"created":7,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk"'
TIMINGS = b'"timings":{"cache_n":20,"prompt_n":5,"prompt_ms":22.4,"predicted_n":3,"predicted_ms":9}'


def chat(choice: bytes, more: bytes = b"") -> Chunk:
    return read_chunk(b'{"choices":[' + choice + b"]," + END + more + b"}")


def test_the_opening_of_a_message_holds_nothing_but_its_role() -> None:
    opening = b'{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}'
    assert chat(opening) == Chunk(id="chatcmpl-1", created=7, role_only=True)


def test_a_delta_is_text_or_thought_of_its_choice() -> None:
    assert chat(b'{"index":1,"delta":{"content":"<"}}') == Chunk(
        id="chatcmpl-1", created=7, index=1, text="<"
    )
    assert chat(b'{"index":0,"delta":{"reasoning_content":"\\nI"}}').reasoning == "\nI"
    both = chat(b'{"index":0,"delta":{"role":"assistant","content":"a"}}')
    assert (both.text, both.role_only) == ("a", False)


def test_a_text_chunk_is_text() -> None:
    chunk = read_chunk(
        b'{"choices":[{"text":" there","index":0,"logprobs":null,"finish_reason":null}],'
        b'"created":7,"object":"text_completion","id":"chatcmpl-1"}'
    )
    assert chunk == Chunk(id="chatcmpl-1", created=7, text=" there")


def test_a_tool_call_is_noticed() -> None:
    call = b'{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}'
    assert chat(call).tool_call


def test_the_end_tells_its_reason_and_its_work() -> None:
    chunk = chat(b'{"finish_reason":"length","index":0,"delta":{}}', b"," + TIMINGS)
    assert (chunk.finish, chunk.role_only) == ("length", False)
    assert chunk.timings == Timings(
        cache_n=20, prompt_n=5, prompt_ms=22.4, predicted_n=3, predicted_ms=9
    )


def test_a_usage_chunk_has_no_choice() -> None:
    chunk = read_chunk(
        b'{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":25,"total_tokens":28,'
        b'"prompt_tokens_details":{"cached_tokens":20}}}'
    )
    assert chunk.usage == Usage(
        completion_tokens=3,
        prompt_tokens=25,
        total_tokens=28,
        prompt_tokens_details=CachedTokens(cached_tokens=20),
    )


def test_progress_of_the_prompt_is_no_text() -> None:
    chunk = chat(
        b'{"index":0,"delta":{"role":"assistant","content":null}}',
        b',"prompt_progress":{"total":25,"cache":20,"processed":21,"time_ms":5}',
    )
    assert chunk.progress == Progress(total=25, cache=20, processed=21)
    assert (chunk.text, chunk.role_only) == ("", True)


def test_an_error_is_kept_as_it_is() -> None:
    error = b'{"code":500, "message":"Context size has been exceeded.","type":"server_error"}'
    assert read_chunk(b'{"error":' + error + b"}").error == error
    assert read_chunk(b'{"error":null}').error is None


def test_the_end_mark_and_an_empty_event_are_chunks_too() -> None:
    assert read_chunk(b"[DONE]") == Chunk(done=True)
    assert read_chunk(b"null") == Chunk()
    assert read_chunk(b'{"id":null,"created":null,"choices":null}') == Chunk()


@pytest.mark.parametrize("payload", [b"", b"[]", b"x", b'{"choices":3}', b'"\xff"', b"[" * 9999])
def test_garbage_is_the_servers_fault(payload: bytes) -> None:
    with pytest.raises(ServerFault, match="not understood"):
        read_chunk(payload)


WHOLE = b'{"choices":[{"index":0,"delta":{"content":"a\\u00e9"}}],' + END + b"," + TIMINGS + b"}"


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_no_cut_of_a_chunk_passes_for_a_chunk(cut: int) -> None:
    with pytest.raises(ServerFault):
        read_chunk(WHOLE[:cut])


@pytest.mark.parametrize(
    ("tail", "unsettled"),
    [("", False), ("x", False), ("x<", True), ("<en", True), ("<end", False), ("a\n", True)],
)
def test_text_is_unsettled_while_it_may_become_a_stop(tail: str, unsettled: bool) -> None:
    assert StopTail(("<end", "\n\n")).unsettled(tail) is unsettled


@pytest.mark.parametrize("stops", [(), ("",), ("a",), ("a", "")])
def test_without_a_stop_of_two_characters_all_text_is_settled(stops: tuple[str, ...]) -> None:
    tail = StopTail(stops)
    assert tail.width == 0
    assert tail.keep("", "aaa") == ""
    assert not tail.unsettled("aaa")


@given(st.lists(st.text("ab", max_size=4), max_size=3), st.lists(st.text("ab", max_size=3)))
def test_a_kept_tail_judges_like_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    stop_tail = StopTail(tuple(stops))
    tail = ""
    for piece in pieces:
        tail = stop_tail.keep(tail, piece)
    assert stop_tail.unsettled(tail) == stop_tail.unsettled("".join(pieces))
    assert len(tail) <= stop_tail.width


@pytest.mark.parametrize(
    ("said", "record"),
    [
        ('{"parks":3,"recomputes":1}', (3, 1)),
        ('{"parks":0,"recomputes":0}', (0, 0)),
        ('{"parks":2}', (2, None)),
        ('{"parks":-1,"recomputes":"1"}', (None, None)),
        ('{"parks":true,"recomputes":1.5}', (None, None)),
        ("[1,2]", None),
        ("7", None),
        ("null", None),
    ],
)
def test_the_servers_own_park_counts_are_read_and_odd_ones_break_nothing(
    said: str, record: tuple[int | None, int | None] | None
) -> None:
    chunk = read_chunk(f'{{"choices":[],"preempt":{said}}}'.encode())
    found = chunk.record and (chunk.record.parks, chunk.record.recomputes)
    assert found == record
    assert read_chunk(b'{"choices":[]}').record is None
