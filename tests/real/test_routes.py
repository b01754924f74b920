"""The routes beside the chats: status, events, health, and what is passed on to llama-server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import trio

from kvalet.actors.app import Handle
from tests.real.clients import PROMPTS, chat_body, events_in, forced, get, kvalet, listen

pytestmark = [
    pytest.mark.real,
    # httpx leaves its generators to the collector when a stream is not read to its end.
    pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning"),
]

STATUS_KEYS = {
    "version": str,
    "mode": str,
    "park_method": str,
    "exact_concurrency": str,
    "server": {
        "state": str,
        "pid": int,
        "generation": int,
        "build": str,
        "url": str,
        "model": str,
        "slots": int,
        "n_ctx": int,
    },
    "pool": dict.fromkeys(("cells", "granted", "resident", "parked", "idle", "headroom"), int),
    "leases": list,
    "queue": list,
    "speculative": {"requested": str, "effective": str, "fallback_reason": type(None)},
    "totals": dict.fromkeys(
        ("requests", "finished", "failed", "parks", "resumes", "recomputes", "restarts"), int
    ),
    "warnings": list,
    "journal": {"path": str, "seq": int},
}
LEASE_KEYS = {
    "lease": int,
    "request": str,
    "surface": str,
    "state": str,
    **dict.fromkeys(("prompt", "generated", "granted", "parks", "resumes", "recomputes"), int),
    "age_s": float,
    "parked_s": float,
}


def check_shape(document: dict[str, Any], keys: dict[str, Any]) -> None:
    """Every key is there, with a value of its type; more keys are welcome."""
    for name, kind in keys.items():
        assert name in document, name
        if isinstance(kind, dict):
            check_shape(document[name], cast("dict[str, Any]", kind))
        else:
            assert isinstance(document[name], kind), (name, document[name])


async def read_events(
    front: Handle, wanted: int, query: str = "", headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """The first ``wanted`` events of the event stream."""
    events: list[dict[str, Any]] = []
    lines: dict[str, str] = {}
    async with (
        httpx.AsyncClient(timeout=30, trust_env=False) as client,
        client.stream("GET", front.url + "/kvalet/events" + query, headers=headers) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                lines[name] = value
                continue
            if "data" in lines:
                event = json.loads(lines["data"])
                assert (lines["id"], lines["event"]) == (str(event["seq"]), event["kind"])
                events.append(event)
            lines = {}
            if len(events) == wanted:
                break
    return events


async def test_the_status_document_has_the_shape_that_was_promised(tmp_path: Path) -> None:
    async with kvalet(tmp_path, ctx=512, parallel=2) as front:
        async with trio.open_nursery() as nursery:
            for prompt in PROMPTS[:3]:
                body = chat_body(prompt, 60)
                nursery.start_soon(lambda body: listen(front.url, body, headers=forced(25)), body)
            with trio.fail_after(30):
                await front.ledger.wait_for(lambda house: bool(house.queue))
            busy = (await get(front.url + "/kvalet/status")).json()
        check_shape(busy, STATUS_KEYS)
        assert len(busy["leases"]) == 2
        check_shape(busy["leases"][0], LEASE_KEYS)
        check_shape(busy["queue"][0], {"request": str, "position": int, "waiting_s": float})
        with trio.fail_after(30):
            await front.ledger.wait_for(lambda house: not house.leases)
        quiet = (await get(front.url + "/kvalet/status")).json()
        check_shape(quiet, STATUS_KEYS)
        assert quiet["totals"]["finished"] == 3
        assert (quiet["pool"]["cells"], quiet["pool"]["headroom"]) == (512, 2)
        assert 0 < quiet["journal"]["seq"] <= front.ledger.journal.seq


async def test_the_event_stream_can_be_taken_up_anywhere(tmp_path: Path) -> None:
    async with kvalet(tmp_path, parallel=2) as front:
        await listen(front.url, chat_body(PROMPTS[0], 8), headers=forced(3))
        with trio.fail_after(30):
            await front.ledger.wait_for(lambda house: not house.leases)
            count = len(events_in(tmp_path))
            everything = await read_events(front, count)
            assert [event["kind"] for event in everything][:2] == ["house.opened", "server.planned"]
            assert {"lease.parked", "lease.resumed", "lease.released"} <= {
                event["kind"] for event in everything
            }
            middle = everything[count // 2]["seq"]
            later = [event for event in everything if event["seq"] > middle]
            assert await read_events(front, len(later), f"?after={middle}") == later
            again = {"Last-Event-ID": str(middle)}
            assert await read_events(front, len(later), headers=again) == later
            # Whoever waits at the end hears what comes next.
            next_up: list[dict[str, Any]] = []

            async def follow() -> None:
                next_up.extend(await read_events(front, 1, f"?after={everything[-1]['seq']}"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow)
                await listen(front.url, chat_body(PROMPTS[0], 2))
            assert next_up[0]["kind"] == "request.arrived"
        assert "fox" not in (tmp_path / "journal.jsonl").read_text()


async def test_read_only_routes_of_the_server_are_passed_on_and_no_other(tmp_path: Path) -> None:
    async with (
        kvalet(tmp_path, parallel=2) as front,
        httpx.AsyncClient(base_url=front.url, timeout=30, trust_env=False) as client,
    ):
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/v1/models")).json()["data"][0]["object"] == "model"
        assert (await client.get("/props")).json()["total_slots"] == 2
        assert [slot["id"] for slot in (await client.get("/slots")).json()] == [0, 1]
        tokens = await client.post("/tokenize", json={"content": "A fox."})
        assert len(tokens.json()["tokens"]) >= 3
        words = await client.post("/detokenize", json=tokens.json())
        assert words.json() == {"content": "A fox."}
        await listen(front.url, chat_body(PROMPTS[0], 8))
        for path in (
            "/slots/0?action=erase",
            "/slots/0?action=save",
            "/slots/0/?action=erase",
            "//slots/0?action=erase",
            "/x/../slots/0?action=erase",
            "/tokenize/../slots/0?action=erase",
            "/completion",
            "/infill",
            "/lora-adapters",
            "/props",
        ):
            refused = await client.post(path, json={"filename": "x", "prompt": "x"})
            assert refused.status_code == 404, path
        held = [slot["n_prompt_tokens"] for slot in (await client.get("/slots")).json()[:1]]
        assert held[0] > 0
        assert (await client.head("/health")).status_code == 200
