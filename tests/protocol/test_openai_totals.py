"""The figures of an answer made in several legs, and the events that carry them."""

from __future__ import annotations

import json

import pytest

from kvalet.protocol.errors import ServerFault
from kvalet.protocol.llama import Timings
from kvalet.protocol.openai import KvaletUsage, Totals, final_event, rename

FIRST = Timings(cache_n=20, prompt_n=5, prompt_ms=22.5, predicted_n=3, predicted_ms=20.0)
SECOND = Timings(cache_n=27, prompt_n=1, prompt_ms=7.5, predicted_n=5, predicted_ms=40.0)
BOTH = Totals().after(FIRST).after(SECOND)
KVALET = KvaletUsage(parks=1, resumes=1, waited_s=0.5, parked_s=2.0)
KVALET_JSON = {"parks": 1, "resumes": 1, "recomputes": 0, "waited_s": 0.5, "parked_s": 2.0}

Json = dict[str, object]


def final(payload: bytes, totals: Totals | None = BOTH) -> Json:
    event = final_event(payload, totals, KVALET)
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    read: Json = json.loads(event[6:])
    return read


def test_the_prompt_is_the_first_legs_and_the_work_is_everybodys() -> None:
    both = Totals().after(FIRST).after(SECOND)
    assert both == Totals(
        prompt=25,
        completion=8,
        cached=20,
        cache_n=20,
        prompt_n=6,
        prompt_ms=30.0,
        predicted_n=8,
        predicted_ms=60.0,
        legs=2,
    )


def test_rates_are_derived_as_the_server_derives_them() -> None:
    timings = BOTH.timings()
    assert timings["prompt_per_token_ms"] == 5.0
    assert timings["prompt_per_second"] == 200.0
    # Six steps: the first token of each leg comes before the clock starts.
    assert timings["predicted_per_token_ms"] == 10.0
    assert timings["predicted_per_second"] == 100.0
    assert "draft_n" not in timings


def test_one_token_has_no_rate() -> None:
    timings = Totals().after(Timings(predicted_n=1, predicted_ms=0.001)).timings()
    assert (timings["predicted_per_token_ms"], timings["predicted_per_second"]) == (0.0, 0.0)
    assert (timings["prompt_per_token_ms"], timings["prompt_per_second"]) == (0.0, 0.0)


def test_drafts_are_counted_where_there_are_any() -> None:
    timings = Totals().after(Timings(draft_n=6, draft_n_accepted=4)).timings()
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (6, 4)


def test_a_usage_chunk_tells_the_whole_answer() -> None:
    chunk = final(
        b'{"choices":[],"id":"c","usage":{"completion_tokens":5,"prompt_tokens":28,'
        b'"total_tokens":33,"prompt_tokens_details":{"cached_tokens":27,"audio":0},"x":1},'
        b'"timings":{"cache_n":27,"predicted_n":5,"odd":true}}'
    )
    assert chunk["usage"] == {
        "completion_tokens": 8,
        "prompt_tokens": 25,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 20, "audio": 0},
        "x": 1,
        "kvalet": KVALET_JSON,
    }
    assert chunk["timings"] == {**BOTH.timings(), "odd": True}
    assert "kvalet" not in chunk


def test_a_usage_without_details_gains_them() -> None:
    for details in (b"", b',"prompt_tokens_details":null'):
        chunk = final(b'{"usage":{"completion_tokens":5' + details + b"}}")
        usage = chunk["usage"]
        assert isinstance(usage, dict)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 20}


def test_a_finish_chunk_without_usage_tells_it_beside_its_timings() -> None:
    choices = b'"choices":[{"finish_reason":"stop","index":0,"delta":{}}]'
    chunk = final(b"{" + choices + b',"usage":null,"timings":{"cache_n":27}}')
    assert chunk["kvalet"] == KVALET_JSON
    assert chunk["timings"] == BOTH.timings()
    assert chunk["usage"] is None


def test_a_finish_chunk_with_no_figures_stays_as_it_is() -> None:
    payload = b'{"choices":[{"finish_reason":"stop"}], "timings":null}'
    assert final_event(payload, BOTH, KVALET) == b"data: " + payload + b"\n\n"


def test_without_totals_the_servers_own_figures_stand() -> None:
    usage = b'{"completion_tokens":5,"total_tokens":33}'
    chunk = final(b'{"usage":' + usage + b',"timings":{"cache_n":27}}', totals=None)
    assert chunk == {
        "usage": {"completion_tokens": 5, "total_tokens": 33, "kvalet": KVALET_JSON},
        "timings": {"cache_n": 27},
    }


@pytest.mark.parametrize("payload", [b"", b"null", b"[DONE]", b'{"usage":3}', b'{"timings":[]}'])
def test_figures_of_no_shape_are_the_servers_fault(payload: bytes) -> None:
    with pytest.raises(ServerFault, match="not understood"):
        final_event(payload, BOTH, KVALET)


def test_a_chunk_is_renamed_at_its_top_level_only() -> None:
    payload = (
        b'{"choices":[{"delta":{"content":"\\"id\\":\\"old\\" \\"created\\":7","id":"old"}}],'
        b'"created":7, "id" : "old","n":1.50}'
    )
    assert rename(payload, "new", 9) == (
        b'{"choices":[{"delta":{"content":"\\"id\\":\\"old\\" \\"created\\":7","id":"old"}}],'
        b'"created":9,"id":"new","n":1.50}'
    )


@pytest.mark.parametrize("payload", [b"[DONE]", b"null", b'{"error":{"id":"old"}}', b"{}"])
def test_a_chunk_without_a_name_gets_none(payload: bytes) -> None:
    assert rename(payload, "new", 9) == payload
