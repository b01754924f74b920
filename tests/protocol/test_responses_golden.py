"""Recorded answers of llama-server (b10434): our events must be those of its own surface.

Each file holds one request's answer on both surfaces, as events and whole; times are zero.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest

from kvalet.protocol.responses import whole
from tests.protocol.responses_truth import (
    GOLDEN,
    REQUESTS,
    Json,
    differences,
    payloads,
    read,
    told,
)

EVERY = pytest.mark.parametrize("name", REQUESTS)


def test_every_recording_belongs_to_a_request() -> None:
    names = {path.stem.removeprefix("responses_") for path in GOLDEN.glob("responses_*.json")}
    assert names == set(REQUESTS)


@EVERY
def test_a_streamed_answer_is_told_in_the_servers_own_events(name: str) -> None:
    ours = payloads(b"".join(told(read(name)["chat"])))
    assert differences(read(name)["events"], ours) == []


@EVERY
def test_a_whole_answer_is_the_servers_own(name: str) -> None:
    ours = json.loads(whole(json.dumps(read(name)["chat_answer"]).encode()))
    assert differences([read(name)["answer"]], [ours]) == []


@EVERY
def test_events_are_numbered_and_say_where_they_belong(name: str) -> None:
    events = payloads(b"".join(told(read(name)["chat"])))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == list(range(len(added)))
    places = {event["item"]["id"]: event["output_index"] for event in added}
    for event in events:
        name_of_item = event.get("item_id") or event.get("item", {}).get("id")
        assert event.get("output_index") == places.get(name_of_item)
        in_content = event["type"].rpartition(".")[0].endswith(("_text", "content_part"))
        assert event.get("content_index") == (0 if in_content else None)


@EVERY
def test_a_piece_of_text_is_sent_with_its_chunk(name: str) -> None:
    chat = read(name)["chat"]
    for chunk, sent in zip(chat, told(chat), strict=False):
        deltas = [event["delta"] for event in payloads(sent) if "delta" in event]
        assert deltas == pieces(chunk)


def pieces(chunk: Json) -> list[str]:
    """What a chat's chunk adds to the answer."""
    found: list[str] = []
    for choice in chunk["choices"]:
        delta = choice["delta"]
        found += [delta[name] for name in ("reasoning_content", "content") if delta.get(name)]
        found += [call["function"]["arguments"] for call in delta.get("tool_calls", ())]
    return found


SPOILT: list[Callable[[list[Json]], object]] = [
    lambda events: events[3].update(delta="["),
    lambda events: events.pop(4),
    lambda events: events[5].pop("item_id"),
    lambda events: events[5].update(more=1),
    lambda events: events[6].update(item_id="fc_other"),
    lambda events: events[-1]["timings"].pop("cache_n"),
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_comparison_notices_what_is_not_the_same(
    spoil: Callable[[list[Json]], object],
) -> None:
    real = read("tools")["events"]
    ours = copy.deepcopy(real)
    assert differences(real, ours) == []
    spoil(ours)
    assert differences(real, ours) != []
