"""Every way to ask: whole answers, text completions, and what runs as one leg."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import trio

from kvalet.actors.server import Server
from tests.real.clients import (
    PROMPTS,
    alone,
    ask,
    chat_body,
    forced,
    kvalet,
    listen,
    llama_server,
)

pytestmark = pytest.mark.real

TEXT_PATH = "/v1/completions"
TEXT = "Once upon a time there was a fox who"
EVERY = forced(6)


def text_body(prompt: object, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy text completion of exactly ``tokens`` tokens."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def shape(value: Any) -> Any:
    """The value with its figures and texts left out: names and types alone."""
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value).items()
        return {name: shape(part) for name, part in parts if name != "kvalet"}
    if isinstance(value, list):
        items = cast("Sequence[Any]", value)
        return [shape(part) for part in items[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


async def ask_straight(server: Server, path: str, body: dict[str, Any]) -> Any:
    """The same request without kvalet."""
    headers = {"Authorization": f"Bearer {server.api_key}", "Connection": "close"}
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        answer = await client.post(server.url + path, json=body, headers=headers)
        return answer.json()


async def test_a_whole_answer_looks_as_llama_servers_own_though_it_was_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat_body(PROMPTS[0], 30, stream=False, stream_options=None)),
        ("/v1/chat/completions", chat_body(PROMPTS[1], 12, stream=False, logprobs=True)),
        (TEXT_PATH, text_body(TEXT, 30)),
        (TEXT_PATH, text_body(TEXT, 9, logprobs=1)),
        (TEXT_PATH, text_body([TEXT, "It rains because"], 9)),
    ]
    async with llama_server(tmp_path / "server", parallel=2) as server:
        monkeypatch.setenv("KVALET_UPSTREAM_KEY", server.api_key)
        async with kvalet(tmp_path, attach=server.url, parallel=2) as front:
            for path, body in requests:
                straight = await ask_straight(server, path, body)
                answer = await ask(front.url, body, path, EVERY)
                assert answer.status_code == 200, answer.text
                mine = answer.json()
                assert shape(mine) == shape(straight)
                assert texts(mine) == texts(straight)
                assert finishes(mine) == finishes(straight)
                if len(mine["choices"]) == 1:
                    check_usage(mine["usage"], straight["usage"])
                parks = mine["usage"]["kvalet"]["parks"]
                assert parks >= (4 if body["max_tokens"] == 30 else 0)
                if "logprobs" in body:
                    tokens = mine["choices"][0]["logprobs"]["content"]
                    assert len(tokens) == body["max_tokens"]


def check_usage(mine: dict[str, Any], straight: dict[str, Any]) -> None:
    """Both bill the same tokens."""
    for figure in ("completion_tokens", "prompt_tokens", "total_tokens"):
        assert mine[figure] == straight[figure]


def texts(answer: dict[str, Any]) -> list[str]:
    """The text of each choice."""
    return [c.get("text") or c.get("message", {}).get("content") for c in answer["choices"]]


def finishes(answer: dict[str, Any]) -> list[str]:
    """Why each choice ended."""
    return [choice["finish_reason"] for choice in answer["choices"]]


async def test_a_text_completion_is_the_same_parked_or_not_streamed_or_not(
    tmp_path: Path,
) -> None:
    async with kvalet(tmp_path, parallel=2) as front, httpx.AsyncClient(timeout=None) as client:
        tokenize = {"content": "The capital of France", "add_special": True}
        tokens = (await client.post(front.url + "/tokenize", json=tokenize)).json()["tokens"]
        for prompt in (TEXT, tokens):
            body = text_body(prompt, 40)
            stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
            await alone(front, {**stream, "max_tokens": 1}, path=TEXT_PATH)
            plain = await alone(front, stream, path=TEXT_PATH)
            parked = await alone(front, stream, path=TEXT_PATH, headers=EVERY)
            await front.ledger.wait_for(lambda house: not house.leases)
            whole = (await ask(front.url, body, TEXT_PATH, EVERY)).json()
            assert plain.text == parked.text == texts(whole)[0]
            assert plain.finish == parked.finish == finishes(whole)[0] == "length"
            for usage in (parked.usage, whole["usage"]):
                assert usage["completion_tokens"] == 40
                assert usage["kvalet"]["parks"] >= 5
                assert usage["kvalet"]["recomputes"] == 0
            assert plain.usage["kvalet"]["parks"] == 0


async def test_what_cannot_be_continued_runs_as_one_leg(tmp_path: Path) -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    single: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat_body(PROMPTS[0], 25, n=2)),
        ("/v1/chat/completions", chat_body(PROMPTS[0], 25, tools=[weather])),
        ("/v1/chat/completions", chat_body(PROMPTS[0], 25, grammar='root ::= ("ab")*')),
        (TEXT_PATH, text_body(TEXT, 25, n=2)),
        (TEXT_PATH, text_body(TEXT, 25, grammar="root ::= [a-z ]+")),
    ]
    async with kvalet(tmp_path) as front:
        for path, body in single:
            answer = await ask(front.url, body, path, EVERY)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["kvalet"]["parks"] == 0
            assert len(answer.json()["choices"]) == body.get("n", 1)
        totals = front.ledger.house.totals
        assert (totals.finished, totals.grants, totals.parks) == (len(single), len(single), 0)


async def test_a_json_schema_holds_across_parks(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "animal": {"enum": ["a red fox", "a grey wolf"]},
            "legs": {"type": "integer", "minimum": 1, "maximum": 99},
            "names": {
                "type": "array",
                "items": {"type": "string", "maxLength": 12},
                "minItems": 3,
                "maxItems": 3,
            },
        },
        "required": ["animal", "legs", "names"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    body = chat_body("Describe an animal as JSON.", 200, response_format=form)
    body["ignore_eos"] = False
    async with kvalet(tmp_path, parallel=2) as front:
        with trio.fail_after(60):
            plain = await listen(front.url, body)
            for every in (1, 4):
                parked = await listen(front.url, body, headers=forced(every))
                answer = json.loads(parked.text)
                assert set(answer) == {"animal", "legs", "names"}
                assert len(answer["names"]) == 3
                # A grammar may force tokens that the same text would not be made of again.
                assert parked.finish == plain.finish == "stop"
                assert parked.usage["kvalet"]["parks"] >= 3
