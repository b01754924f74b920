"""What goes upstream at a seam: each continuation starts from what its client holds by then."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.real.clients import PROMPTS, Heard, chat_body, forced, kvalet, listen, llama_server
from tests.real.recorder import tapped

pytestmark = pytest.mark.real

CATCH_UP_S = 5.0


class Seams:
    """Compares the partial answer of every continuation with what its client has read."""

    def __init__(self) -> None:
        self.hearers: dict[str, Heard] = {}
        self.partials: dict[str, list[str]] = {}
        self.differences: list[tuple[str, str]] = []

    def hear(self, prompt: str) -> Heard:
        """The client that sends ``prompt``."""
        self.partials[prompt] = []
        return self.hearers.setdefault(prompt, Heard())

    async def look(self, path: str, body: dict[str, Any]) -> None:
        """A request is on its way to the server."""
        if path != "/v1/chat/completions" or body["messages"][-1]["role"] != "assistant":
            return
        heard = self.hearers[body["messages"][0]["content"]]
        held = body["messages"][-1]["content"]
        # What has been sent may still be on its way to the client; more cannot come.
        with trio.move_on_after(CATCH_UP_S):
            await heard.bell.wait_for(lambda: len(heard.text) >= len(held))
        self.partials[body["messages"][0]["content"]].append(held)
        if heard.text != held:
            self.differences.append((held, heard.text))


@pytest.mark.parametrize("park_method", ["auto", "recompute"])
async def test_beside_neighbours_no_character_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, park_method: str
) -> None:
    seams = Seams()
    async with llama_server(tmp_path / "server") as server:
        monkeypatch.setenv("KVALET_UPSTREAM_KEY", server.api_key)
        async with (
            tapped(server.url, seams.look) as url,
            kvalet(tmp_path, attach=url, park_method=park_method) as front,
        ):
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    for prompt, every in zip(PROMPTS[:3], (3, 6, 9), strict=True):
                        body = chat_body(prompt, 40)
                        ask = partial(listen, heard=seams.hear(prompt), headers=forced(every))
                        nursery.start_soon(ask, front.url, body)
    assert seams.differences == []
    for prompt, heard in seams.hearers.items():
        parks = heard.usage["kvalet"]["parks"]
        assert heard.error == ""
        assert heard.finish == "length"
        assert heard.usage["completion_tokens"] == 40
        assert parks >= 4
        assert len(seams.partials[prompt]) >= parks
        assert heard.text.startswith(seams.partials[prompt][-1])
        assert (heard.usage["kvalet"]["recomputes"] > 0) == (park_method == "recompute")
