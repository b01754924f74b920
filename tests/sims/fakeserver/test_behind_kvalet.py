"""kvalet in front of the simulated server: chats that outgrow the pool, with real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvalet.actors.http import serve_http
from kvalet.sims.fakeserver.options import read_options
from kvalet.sims.fakeserver.server import open_sim
from tests.real.clients import PROMPTS, Heard, alone, chat_body, kvalet, listen

CHATS = range(4)
TOKENS = 200


@pytest.mark.parametrize("build", ["G0", "G3"])
async def test_four_chats_of_a_small_pool_end_as_if_each_were_alone(
    tmp_path: Path, build: str
) -> None:
    saved = tmp_path / "slots"
    saved.mkdir()
    argv = ("-np", "4", "-kvu", "-c", "512", "-cram", "0", "--slot-save-path", str(saved))
    env = {"KVALET_SIM_BUILD": build, "KVALET_SIM_NEIGHBOURS": "0"}
    env |= {"KVALET_SIM_TOKENS_PER_S": "400"}
    heard = [Heard() for _ in CHATS]
    async with open_sim(read_options(argv, env)) as server, trio.open_nursery() as nursery:
        await server.loaded.wait()
        ((host, port),) = await nursery.start(serve_http, server, ("127.0.0.1", 0))
        async with kvalet(tmp_path / "state", attach=f"http://{host}:{port}") as handle:
            async with trio.open_nursery() as chats:
                for chat in CHATS:
                    body = chat_body(PROMPTS[chat], TOKENS)
                    chats.start_soon(
                        listen, handle.url, body, "/v1/chat/completions", None, heard[chat]
                    )
            for chat in CHATS:
                lone = await alone(handle, chat_body(PROMPTS[chat], TOKENS))
                assert heard[chat].text == lone.text
        nursery.cancel_scope.cancel()
    assert [(one.status, one.done, one.error) for one in heard] == [(200, True, "")] * 4
    assert sum(one.comments["preempt-paused"] for one in heard) >= 1
