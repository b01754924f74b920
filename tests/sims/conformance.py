"""One script for a real llama-server and for the simulated one: what it hears, as shapes.

A shape is what a client's code depends on: status, keys and types, and the order of a
stream's lines. Values are left out. ``GOLDEN`` holds the shapes that the real server has.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, cast

import httpx
import trio

GOLDEN = Path(__file__).with_name("conformance.json")
Json = dict[str, Any]
Shapes = dict[str, Any]

HI: Json = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
SAY: Json = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
FEW: Json = {"n_predict": 4}
PATIENCE_S = 60
CHATS = 4
ENOUGH_LINES = 6

PROPS = (
    *("default_generation_settings", "total_slots", "model_path", "modalities", "build_info"),
    *("chat_template", "chat_template_caps", "bos_token", "eos_token", "is_sleeping"),
)
REFUSALS: dict[str, tuple[str, bytes]] = {
    "no prompt": ("/completion", b'{"n_predict":3}'),
    "a word for a number": ("/completion", b'{"prompt":"x","top_k":"bad"}'),
    "a bound below -1": ("/completion", b'{"prompt":"x","n_predict":-5}'),
    "an invalid token": ("/completion", b'{"prompt":[999999999]}'),
    "no messages": ("/v1/chat/completions", b"{}"),
    "no input": ("/v1/responses", b"{}"),
    "an unknown path": ("/nope", b"{}"),
    "no embeddings": ("/v1/embeddings", b'{"input":"x"}'),
    "an unknown action": ("/slots/0?action=zzz", b""),
    "a slot without a number": ("/slots/x?action=erase", b""),
    "a file outside": ("/slots/0?action=save", b'{"filename":"../a.bin"}'),
    "a file that is not there": ("/slots/0?action=restore", b'{"filename":"none.bin"}'),
}
WHOLE: dict[str, tuple[str, Json]] = {
    "tokenize": ("/tokenize", {"content": "Hello world"}),
    "tokenize in pieces": ("/tokenize", {"content": "Hi", "with_pieces": True}),
    "detokenize": ("/detokenize", {"tokens": [100, 101]}),
    "apply-template": ("/apply-template", HI),
    "completion": ("/completion", {**SAY, **FEW, "return_tokens": True}),
    "text": ("/v1/completions", {**SAY, "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {**HI, "max_tokens": 4}),
    "messages": ("/v1/messages", {**HI, "max_tokens": 4}),
    "count": ("/v1/messages/count_tokens", HI),
}
STREAMS: dict[str, tuple[str, Json]] = {
    "completion, streamed": ("/completion", {**SAY, **FEW}),
    "completion, each token timed": ("/completion", {**SAY, **FEW, "timings_per_token": True}),
    "completion with odds": ("/completion", {**SAY, **FEW, "n_probs": 1}),
    "text, streamed": ("/v1/completions", {**SAY, "max_tokens": 4}),
    "chat, streamed": ("/v1/chat/completions", {**HI, "max_tokens": 4, "ignore_eos": True}),
    "chat with its usage": (
        "/v1/chat/completions",
        {**HI, "max_tokens": 4, "ignore_eos": True, "stream_options": {"include_usage": True}},
    ),
    "responses, streamed": ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    "messages, streamed": ("/v1/messages", {**HI, "max_tokens": 4}),
}


def shape(value: Any) -> Any:
    """Keys in their order and types; of a list what its first entry is."""
    match value:
        case dict():
            return {name: shape(part) for name, part in cast(Json, value).items()}
        case []:
            return []
        case [first, *_]:
            return [shape(first)]
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case _:
            return "null"


def line_shape(line: str) -> Any:
    """One line of a stream: a name, a shape, or a word that is always the same."""
    name, _, payload = line.partition(": ")
    return {name: shape(json.loads(payload))} if payload.startswith("{") else line


async def hear(client: httpx.AsyncClient, limits: tuple[int, int]) -> Shapes:
    """The whole script. ``limits``: the context of a slot, and cells of the pool."""
    heard: Shapes = {"health": whole(await client.get("/health"))}
    props = (await client.get("/props")).json()
    heard["props"] = {name: shape(props[name]) for name in PROPS}
    heard["slots at first"] = shape((await client.get("/slots")).json()[:1])
    for name, (path, body) in WHOLE.items():
        heard[name] = whole(await client.post(path, json=body))
    for name, (path, body) in STREAMS.items():
        heard[name] = await stream(client, path, {**body, "stream": True})
    for name, (path, raw) in REFUSALS.items():
        heard[name] = whole(await client.post(path, content=raw))
    broken = await client.post("/completion", content=b"{broken")
    heard["broken JSON"] = {"refused": broken.status_code in (400, 500), **whole(broken)["body"]}
    too_long = {"prompt": [100] * limits[0], "stream": True}
    heard["too long"] = whole(await client.post("/completion", json=too_long))
    heard["slots afterwards"] = shape([await used_slot(client)])
    heard |= await act(client)
    heard |= await leave(client)
    heard["overflow"] = await overflow(client, limits[1])
    heard["after the overflow"] = whole(await client.post("/completion", json={**SAY, **FEW}))
    return heard


def whole(response: httpx.Response) -> Json:
    """The shape of an answer that is not a stream."""
    return {"status": response.status_code, "body": shape(response.json())}


async def stream(client: httpx.AsyncClient, path: str, body: Json) -> Json:
    """The shapes of a stream's lines, those that repeat said once."""
    async with client.stream("POST", path, json=body) as response:
        lines = [line async for line in response.aiter_lines()]
        kind = response.headers["content-type"]
    pairs = [list(group) for _, group in itertools.groupby(lines, bool)]
    events = [[line_shape(line) for line in group] for group in pairs if group[0]]
    told = [event for event, _ in itertools.groupby(events)]
    return {"status": response.status_code, "type": kind, "events": told}


async def used_slot(client: httpx.AsyncClient) -> Json:
    slots: list[Json] = (await client.get("/slots")).json()
    return next(slot for slot in slots if "id_task" in slot)


async def act(client: httpx.AsyncClient) -> Shapes:
    """Save, erase, restore, and go on from what was restored."""
    first = await client.post("/completion", json={**SAY, **FEW, "id_slot": 0})
    saved = await client.post("/slots/0?action=save", json={"filename": "a.bin"})
    erased = await client.post("/slots/0?action=erase")
    empty = await client.post("/slots/0?action=erase")
    restored = await client.post("/slots/0?action=restore", json={"filename": "a.bin"})
    cells = first.json()["tokens_cached"]
    return {
        "save": {**whole(saved), "all": saved.json()["n_saved"] == cells},
        "erase": {**whole(erased), "all": erased.json()["n_erased"] == cells},
        "erase nothing": empty.json(),
        "restore": {**whole(restored), "all": restored.json()["n_restored"] == cells},
    }


async def leave(client: httpx.AsyncClient) -> Shapes:
    """A stream is closed after some tokens; its slot becomes idle and keeps its cells."""
    body = {**SAY, "n_predict": 400, "stream": True, "id_slot": 0}
    with trio.CancelScope() as client_is_here:
        async with client.stream("POST", "/completion", json=body) as response:
            heard = 0
            async for _ in response.aiter_lines():
                heard += 1
                if heard == ENOUGH_LINES:
                    client_is_here.cancel()
    with trio.fail_after(PATIENCE_S):
        while (slot := (await client.get("/slots")).json()[0])["is_processing"]:  # noqa: ASYNC110
            await trio.sleep(0.2)
    kept = slot["n_prompt_tokens"] > 0
    return {"left": {"cells stay": kept, "decoded": slot["next_token"][0]["n_decoded"]}}


async def overflow(client: httpx.AsyncClient, cells: int) -> list[Any]:
    """Chats that outgrow the pool together: how each of them ends."""
    ends: list[Any] = []

    async def chat(number: int) -> None:
        body = {**HI, "max_tokens": cells, "ignore_eos": True, "stream": True, "seed": number}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        ends.append([response.status_code, json.loads(lines[-1].removeprefix("data: "))])

    async with trio.open_nursery() as nursery:
        for number in range(CHATS):
            nursery.start_soon(chat, number)
    return ends
