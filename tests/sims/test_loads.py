"""Another model or other settings at run time, a ladder after crashes: over real sockets."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from kvalet.actors.app import Handle
from kvalet.actors.decisions.replay import audit
from kvalet.actors.journal import read_journal
from kvalet.protocol.events import LoadOrdered, ServerExited, ServerFellBack
from tests.real.clients import Bell, Heard, alone, ask, chat_body, events_in, get, listen
from tests.sims.test_restarts import SLOWLY, TOKENS, next_server, said_by_all
from tests.sims.test_server_mode import MODEL, PROMPTS, house

# httpx leaves its generators to the collector when a request is cancelled.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")

MTP = MODEL.with_name("mini-qwen35-mtp.gguf")
SETTING = "/kvalet/settings/exact-concurrency"


async def post(handle: Handle, path: str, body: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return await client.post(handle.url + path, json=body, headers=headers)


async def put(handle: Handle, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return await client.put(handle.url + SETTING, json=body)


def audited(folder: Path) -> bool:
    return audit(read_journal(folder / "state" / "journal.jsonl")).identical


def another_model(folder: Path) -> Path:
    path = folder / "another.gguf"
    shutil.copy(MODEL, path)
    return path


async def talking(handle: Handle, nursery: trio.Nursery, heard: Heard) -> None:
    body = chat_body(PROMPTS[0], TOKENS)
    nursery.start_soon(listen, handle.url, body, "/v1/chat/completions", None, heard)
    await heard.bell.wait_for(said_by_all([heard], 60))


async def test_chats_go_on_when_their_model_is_loaded_with_another_context(tmp_path: Path) -> None:
    heard = Heard(bell=Bell())
    async with house(tmp_path, "G0", env=SLOWLY) as handle:
        solo = await alone(handle, chat_body(PROMPTS[0], TOKENS))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await talking(handle, nursery, heard)
                first = await post(handle, "/kvalet/load", {"ctx": 4096})
        again = await post(handle, "/kvalet/load", {"ctx": 4096, "model": str(MODEL)})

    assert (first.status_code, first.json()["changed"]) == (200, True)
    assert first.json()["server"]["n_ctx"] == 4096
    assert (again.status_code, again.json()["changed"]) == (200, False)
    assert (heard.error, heard.text) == ("", solo.text)
    assert heard.comments["server-restarting"] == heard.comments["server-resumed"] == 1
    events = events_in(tmp_path / "state")
    assert [type(event) for event in events].count(LoadOrdered) == 1
    assert [event.planned for event in events if isinstance(event, ServerExited)][:1] == [True]
    assert audited(tmp_path)


async def test_another_model_ends_the_chats_of_the_former_one_and_serves_new_ones(
    tmp_path: Path,
) -> None:
    heard = Heard(bell=Bell())
    async with house(tmp_path, "G0", env=SLOWLY) as handle:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await talking(handle, nursery, heard)
                loaded = await post(handle, "/kvalet/load", {"model": str(another_model(tmp_path))})
        later = await listen(handle.url, chat_body("Hello.", 20))

    assert loaded.status_code == 200
    assert "another" in loaded.json()["server"]["model"]
    assert [chunk["error"]["code"] for chunk in heard.data if "error" in chunk] == ["unloaded"]
    assert (later.error, later.done) == ("", True)
    assert audited(tmp_path)


async def test_an_unload_wins_over_a_load_that_is_under_way_and_a_later_load_over_both(
    tmp_path: Path,
) -> None:
    answers: dict[str, httpx.Response] = {}

    async def load(handle: Handle, name: str, body: Any) -> None:
        answers[name] = await post(handle, "/kvalet/load", body)

    async with house(tmp_path, "G0") as handle:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load, handle, "first", {"ctx": 4096})
                await handle.ledger.wait_for(lambda house: house.server.load.ctx == 4096)
                unloaded = await post(handle, "/kvalet/unload", {})
            refused = await ask(handle.url, chat_body("Anybody there?", 5))
            pid = handle.ledger.house.server.pid
            await load(handle, "second", {"ctx": 2048})
        heard = await listen(handle.url, chat_body("Hello.", 20))

    assert answers["first"].status_code == 409
    assert (unloaded.status_code, unloaded.json()["server"]["state"]) == (200, "unloaded")
    assert pid is None
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_unavailable")
    assert answers["second"].json()["server"]["n_ctx"] == 2048
    assert (heard.error, heard.done) == ("", True)
    assert audited(tmp_path)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"model": "/no/such/model.gguf"}, {}, 400),
        ({"ctx": 0}, {}, 400),
        ({"parallel": "four"}, {}, 400),
        ({"mode": "sometimes"}, {}, 400),
        ({"exact_concurrency": "perhaps"}, {}, 400),
        ({"contxt": 4096}, {}, 400),
        ([], {}, 400),
        ({"server_args": ["--temp", "0"]}, {}, 403),
        ({"server_args": ["--port", "1"]}, {}, 400),
        ({"ctx": 4096}, {"Content-Type": "text/plain"}, 415),
    ],
    ids=str,
)
async def test_a_load_that_cannot_be_costs_nobody_anything(
    tmp_path: Path, body: Any, headers: dict[str, str], status: int
) -> None:
    async with house(tmp_path, "G0") as handle:
        generation = handle.ledger.house.server.generation
        answer = await post(handle, "/kvalet/load", body, **headers)
        assert handle.ledger.house.server.generation == generation
        assert handle.ledger.house.ready

    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_lch_14_the_stored_setting_decides_where_nobody_else_does(tmp_path: Path) -> None:
    async with house(tmp_path, "G4") as handle:
        before = (await get(handle.url + SETTING)).json()
        stored = await put(handle, {"exact_concurrency": "auto"})
        wrong = await put(handle, {"exact_concurrency": "perhaps"})
        loaded = await post(handle, "/kvalet/load", {})
        after = (await get(handle.url + SETTING)).json()
        asked = await post(handle, "/kvalet/load", {"exact_concurrency": "off"})
    async with house(tmp_path, "G4") as handle:
        next_time = (await get(handle.url + SETTING)).json()
        running = handle.ledger.house.server.exact

    assert (before["exact_concurrency"], before["level"], before["running"]) == (
        None,
        "default",
        "off",
    )
    assert stored.json()["reload_needed"] is True
    assert wrong.status_code == 400
    assert (loaded.json()["changed"], loaded.json()["exact_concurrency"]) == (True, "on")
    assert (after["level"], after["effective"], after["reload_needed"]) == ("stored", "auto", False)
    assert asked.json()["exact_concurrency"] == "off"
    assert (next_time["level"], running) == ("stored", "on")
    assert audited(tmp_path)


async def test_a_server_that_dies_with_its_drafter_comes_back_without_it(tmp_path: Path) -> None:
    """At the first decode the probe after the launch finds it, later a crash does."""
    drafting = {"model": MTP, "server_args": ("--spec-type", "draft-mtp,ngram-mod")}
    for at_token, restarts in ((1, 0), (100, 1)):
        folder = tmp_path / str(at_token)
        folder.mkdir()
        fault = f'[{{"kind": "crash", "at_token": {at_token}, "when": "mtp"}}]'
        env = {**SLOWLY, "KVALET_SIM_FAULTS": fault}
        async with house(folder, "G0", env=env, **drafting) as handle:
            with trio.fail_after(60):
                heard = await listen(handle.url, chat_body("Tell me of the sea.", 300))
            status = (await get(handle.url + "/kvalet/status")).json()

        assert (heard.error, heard.usage["completion_tokens"]) == ("", 300)
        assert status["totals"]["restarts"] == restarts
        assert status["speculative"] == {
            "requested": "draft-mtp,ngram-mod",
            "effective": "ngram-mod",
            "fallback_reason": "runtime_error",
        }
        fell = [one.given for one in events_in(folder / "state") if isinstance(one, ServerFellBack)]
        assert fell == ["no-drafter"] * restarts
        assert audited(folder)


async def test_a_request_under_which_two_servers_die_ends_alone(tmp_path: Path) -> None:
    """The second server is killed while the only one under suspicion runs."""
    bell = Bell()
    heard = [Heard(bell=bell) for _ in PROMPTS[:3]]
    async with house(tmp_path, "G0", env={**SLOWLY, "KVALET_SIM_TOKENS_PER_S": "20"}) as handle:
        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                for prompt, one in zip(PROMPTS, heard, strict=False):
                    body = chat_body(prompt, 40)
                    nursery.start_soon(listen, handle.url, body, "/v1/chat/completions", None, one)
                await bell.wait_for(said_by_all(heard, 3))
                for generation in (1, 2):
                    server = handle.ledger.house.server
                    assert server.pid is not None
                    os.kill(server.pid, signal.SIGKILL)
                    await next_server(handle, generation, runners=1)

    failed = [one for one in heard if one.error]
    assert len(failed) == 1
    assert "died twice in a row" in failed[0].error
    assert [one.usage["completion_tokens"] for one in heard if not one.error] == [40, 40]
    assert audited(tmp_path)
