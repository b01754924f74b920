"""A real llama-server answers in the shapes that the simulated one is held to."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.real.clients import llama_server
from tests.sims.conformance import GOLDEN, hear

pytestmark = pytest.mark.real


async def test_a_real_server_has_the_shapes_that_are_kept(tmp_path: Path) -> None:
    async with (
        llama_server(tmp_path) as server,
        httpx.AsyncClient(
            base_url=server.url,
            timeout=None,
            trust_env=False,
            headers={"Authorization": f"Bearer {server.api_key}", "Connection": "close"},
        ) as client,
    ):
        heard = await hear(client, (512, 512))
    assert heard == json.loads(GOLDEN.read_text())
