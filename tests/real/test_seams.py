"""Seams on the real server: nothing lost, nothing doubled, and the same bytes when alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.clients import PROMPTS, Heard, chat_body, kvalet, listen

pytestmark = pytest.mark.real

CUTS = (*range(1, 13), 14, 16, 18, 20, 22, 24, 26, 28)
"""Tokens before a park: 20 different points, dense where templates and words begin."""


async def test_a_lone_chat_gives_the_same_bytes_whether_parked_or_not(tmp_path: Path) -> None:
    async with kvalet(tmp_path, ctx=512, parallel=2) as server:
        for prompt in PROMPTS:
            whole = await listen(server.url, chat_body(prompt, max(CUTS) + 4))
            for cut in CUTS:
                parked = await listen(
                    server.url,
                    chat_body(prompt, cut + 4),
                    headers={"Kvalet-Park-Every": str(cut)},
                )
                assert whole.text.startswith(parked.text)
                assert parked.text == whole.text[: len(parked.text)]
                assert parked.usage["kvalet"]["parks"] >= 1
                assert parked.usage["kvalet"]["recomputes"] == 0
                assert parked.usage["completion_tokens"] == cut + 4
                assert parked.comments["preempt-paused"] == parked.comments["preempt-resumed"]
                assert one_identity(parked)


def one_identity(heard: Heard) -> bool:
    """All legs of an answer carry one id, and one role chunk opens it."""
    roles = [c for d in heard.data for c in d["choices"] if c.get("delta", {}).get("role")]
    return len({d["id"] for d in heard.data}) == 1 and len(roles) == 1
