"""Seams on the real server: nothing lost, nothing doubled, and the same bytes when alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvalet.actors.app import Handle
from tests.real.clients import PROMPTS, Heard, alone, chat_body, forced, kvalet

pytestmark = pytest.mark.real

CUTS = (*range(1, 13), 14, 16, 18, 20, 22, 24, 26, 28)
"""Tokens before a park: 20 different points, dense where templates and words begin."""

MORE = 4
"""Tokens that follow after the last cut."""


async def test_a_lone_chat_gives_the_same_bytes_whether_parked_or_not(tmp_path: Path) -> None:
    async with kvalet(tmp_path, ctx=512, parallel=2) as server:
        for prompt in PROMPTS:
            await compare(server, prompt, CUTS)


async def test_the_same_holds_when_the_server_counts_its_threads_itself(tmp_path: Path) -> None:
    async with kvalet(tmp_path, ctx=512, parallel=2, server_args=()) as server:
        for prompt in PROMPTS:
            await compare(server, prompt, (3, 10))


async def compare(server: Handle, prompt: str, cuts: tuple[int, ...]) -> None:
    """Park the chat at each of ``cuts`` and compare it with the one that was never parked.

    All start from the same cells: a prompt that is computed as one batch may differ in its last
    bits from one of which all but a token is there already, and near ties then fall otherwise.
    """
    await alone(server, chat_body(prompt, 1))
    whole = await alone(server, chat_body(prompt, max(cuts) + MORE))
    for cut in cuts:
        parked = await alone(server, chat_body(prompt, cut + MORE), headers=forced(cut))
        assert parked.usage["prompt_tokens_details"] == whole.usage["prompt_tokens_details"]
        assert parked.text == whole.text[: len(parked.text)]
        assert len(parked.text) > 0
        assert parked.usage["kvalet"]["parks"] >= 1
        assert parked.usage["kvalet"]["recomputes"] == 0
        assert parked.usage["completion_tokens"] == cut + MORE
        assert parked.comments["preempt-paused"] == parked.comments["preempt-resumed"]
        assert one_identity(parked)


def one_identity(heard: Heard) -> bool:
    """All legs of an answer carry one id, and one role chunk opens it."""
    roles = [c for d in heard.data for c in d["choices"] if c.get("delta", {}).get("role")]
    return len({d["id"] for d in heard.data}) == 1 and len(roles) == 1
