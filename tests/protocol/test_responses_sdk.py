"""The ``openai`` package reads our responses, and puts streamed ones together."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, get_args

import httpx
import pytest
from openai import APIError, OpenAI
from openai.types.responses import Response, ResponseCompletedEvent, ResponseStreamEvent
from pydantic import ValidationError

from kvalet.protocol.errors import ServerFault
from kvalet.protocol.responses import fault_event, whole
from tests.protocol.responses_truth import REQUESTS, Json, payloads, read, told

EVERY = pytest.mark.parametrize("name", REQUESTS)
OF_A_RESPONSE = {"id", "object", "created_at", "model", "output", "status"}
"""What we say of a response; what a request asked for is not repeated, as with llama-server."""


def stream_of(name: str) -> bytes:
    """The answer as it goes over the wire."""
    return b"".join(told(read(name)["chat"]))


@contextmanager
def answering(content: bytes, kind: str) -> Generator[OpenAI]:
    """A client whose server always answers with ``content``."""
    response = httpx.Response(200, content=content, headers={"content-type": kind})
    # The package's own name for this class differs from one of its versions to the next.
    chosen: Any = httpx.Client(transport=httpx.MockTransport(lambda _: response))
    with (
        chosen as http,
        OpenAI(base_url="http://kvalet/v1", api_key="none", http_client=http) as client,
    ):
        yield client


@EVERY
def test_every_event_has_all_that_its_type_asks_for(name: str) -> None:
    for event in payloads(stream_of(name)):
        missing = unsaid(event)
        assert {place[0] for place in missing} <= {"response"}
        assert not {place[1] for place in missing} & OF_A_RESPONSE


def test_llama_servers_own_events_lack_what_was_added() -> None:
    event = read("text")["events"][4]
    added = {"sequence_number", "output_index", "content_index", "logprobs"}
    assert {place[0] for place in unsaid(event)} >= added


def unsaid(event: Json) -> set[tuple[int | str, ...]]:
    """Where the package misses something in an event."""
    union, _ = get_args(ResponseStreamEvent)
    kinds = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(union)}
    try:
        kinds[event["type"]].model_validate(event)
    except ValidationError as error:
        return {one["loc"] for one in error.errors()}
    return set()


@EVERY
def test_the_package_puts_a_streamed_response_together(name: str) -> None:
    with (
        answering(stream_of(name), "text/event-stream") as client,
        client.responses.stream(model="m", input="x") as stream,
    ):
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    recorded = read(name)["events"][-1]["response"]
    assert [item.type for item in final.output] == [item["type"] for item in recorded["output"]]
    assert final.usage is not None
    assert final.usage.output_tokens == recorded["usage"]["output_tokens"]
    assert "".join(pieces) == final.output_text


@EVERY
def test_the_package_reads_a_whole_response(name: str) -> None:
    content = whole(json.dumps(read(name)["chat_answer"]).encode())
    with answering(content, "application/json") as client:
        response = client.responses.create(model="m", input="x")
    assert isinstance(response, Response)
    recorded = read(name)["answer"]
    assert [item.type for item in response.output] == [item["type"] for item in recorded["output"]]
    assert response.status == "completed"


def test_the_package_raises_what_goes_wrong_in_a_stream() -> None:
    content = fault_event(ServerFault("llama-server is gone"))
    with (
        answering(content, "text/event-stream") as client,
        client.responses.create(model="m", input="x", stream=True) as stream,
        pytest.raises(APIError, match="llama-server is gone"),
    ):
        list(stream)


def test_the_last_event_is_the_whole_response() -> None:
    with (
        answering(stream_of("tools"), "text/event-stream") as client,
        client.responses.create(model="m", input="x", stream=True) as stream,
    ):
        *_, last = stream
    assert isinstance(last, ResponseCompletedEvent)
    assert last.response.output
