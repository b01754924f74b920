"""The real ``openai`` package as a client, whose answers are parked half way."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from openai import OpenAI

from kvalet.actors.app import Handle
from tests.real.clients import PROMPTS, kvalet

pytestmark = pytest.mark.real

MODEL = "whatever"
TOKENS = 30
GREEDY = {"ignore_eos": True}
PARKED = {"Kvalet-Park-Every": "8"}


@contextmanager
def sdk(url: str, key: str = "none") -> Generator[OpenAI]:
    """A client of the SDK, closed afterwards."""
    with OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


def talk(url: str) -> None:
    """Everything a program would do with the SDK; a park lies in every answer."""
    with sdk(url) as client:
        streamed, usage = stream_chat(client)
        assert usage["completion_tokens"] == TOKENS
        assert usage["kvalet"]["parks"] >= 3
        whole = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            max_tokens=TOKENS,
            temperature=0,
            extra_body=GREEDY,
            extra_headers=PARKED,
        )
        assert whole.choices[0].message.content == streamed
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == TOKENS
        check_text(client)
        assert client.models.list().data[0].object == "model"
        with pytest.raises(openai.BadRequestError, match="cells"):
            client.completions.create(model=MODEL, prompt="word " * 600, max_tokens=5)


def stream_chat(client: OpenAI) -> tuple[str, dict[str, Any]]:
    """One streamed chat: its text and its usage."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPTS[0]}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=GREEDY,
        extra_headers=PARKED,
    )
    text, finish, names = "", None, set[str]()
    usage: dict[str, Any] = {}
    for chunk in stream:
        names.add(chunk.id)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage.model_dump() if chunk.usage else usage
    assert (finish, len(names)) == ("length", 1)
    return text, usage


def check_text(client: OpenAI) -> None:
    """A text completion, streamed and whole, says the same."""
    whole = client.completions.create(
        model=MODEL,
        prompt="The fox went to the river and",
        max_tokens=TOKENS,
        temperature=0,
        extra_body=GREEDY,
        extra_headers=PARKED,
    )
    stream = client.completions.create(
        model=MODEL,
        prompt="The fox went to the river and",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body=GREEDY,
        extra_headers=PARKED,
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == (
        whole.choices[0].text
    )
    assert whole.choices[0].finish_reason == "length"


def talk_beside_others(url: str) -> None:
    """A chat as long as half the pool, for several at once."""
    with sdk(url) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPTS[1]}],
            max_tokens=200,
            temperature=0,
            extra_body=GREEDY,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 200


async def test_the_openai_sdk_does_not_notice_that_its_answers_are_parked(tmp_path: Path) -> None:
    async with kvalet(tmp_path, parallel=4) as front:
        await trio.to_thread.run_sync(talk, front.url)
        parks = front.ledger.house.totals.parks
        assert parks >= 12
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(in_thread, front)
        assert front.ledger.house.totals.parks > parks


async def in_thread(front: Handle) -> None:
    await trio.to_thread.run_sync(talk_beside_others, front.url)
