"""Seams inside what is more than plain text: characters, thoughts, stop strings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvalet.protocol import events as e
from tests.real.clients import (
    ONE_THREAD,
    PROMPTS,
    Heard,
    alone,
    chat_body,
    events_in,
    forced,
    kvalet,
    listen,
)

pytestmark = pytest.mark.real

# Some of these characters take three or four tokens, none of which is a character by itself.
FOREIGN = ("🦙𓀀🦙", "日本語🦙")

THINKING_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<start_of_turn>model
<think>
{{ message.reasoning_content | default('', true) }}
{%- if message.content %}</think>{{ message.content }}{% endif %}<end_of_turn>
{% else -%}
<start_of_turn>user
{{ message.content }}<end_of_turn>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
<think>
{% endif -%}
"""
THOUGHT = "Question: what is 2+2?\n<think>\nTwo and two.\n</think>\nIt is four.\n\n"
"""Shown a few times, it is copied: a short thought, its end, an answer."""


def check_same(parked: Heard, whole: Heard) -> None:
    """The parked answer is the other one, to the last character and token."""
    assert (parked.error, parked.done) == ("", True)
    assert parked.reasoning == whole.reasoning
    assert parked.text == whole.text
    assert parked.finish == whole.finish
    assert parked.usage["completion_tokens"] == whole.usage["completion_tokens"]


async def test_a_character_of_many_tokens_is_whole_wherever_the_leg_ends(tmp_path: Path) -> None:
    async with kvalet(tmp_path, parallel=2) as front:
        for text in FOREIGN:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}
            body = chat_body("Say it.", 60, response_format=form, ignore_eos=False)
            whole = await listen(front.url, body)
            assert whole.text == f'"{text}"'
            tokens = whole.usage["completion_tokens"]
            assert tokens > len(whole.text)
            for cut in range(1, tokens):
                parked = await listen(front.url, body, headers=forced(cut))
                check_same(parked, whole)
                assert "\ufffd" not in parked.text
        assert front.ledger.house.totals.parks > 0
    legs = [event for event in events_in(tmp_path) if isinstance(event, e.LeaseExtended)]
    assert legs, "no leg has ended inside a character"


async def test_a_thought_and_its_answer_are_the_same_wherever_the_park_falls(
    tmp_path: Path,
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE)
    flags = ("--jinja", "--chat-template-file", str(template), "--reasoning-format", "deepseek")
    async with kvalet(tmp_path, parallel=2, server_args=(*ONE_THREAD, *flags)) as front:
        body = chat_body(3 * THOUGHT + "Question: what is 3+3?", 20)
        await alone(front, {**body, "max_tokens": 1})
        whole = await alone(front, body)
        assert whole.reasoning
        assert whole.text.strip()
        for cut in range(1, 16):
            parked = await alone(front, body, headers=forced(cut))
            check_same(parked, whole)
        assert front.ledger.house.totals.parks >= 15


async def test_a_stop_string_is_found_though_a_park_cuts_it(tmp_path: Path) -> None:
    async with kvalet(tmp_path, parallel=2) as front:
        free = await listen(front.url, chat_body(PROMPTS[0], 24))
        # Its first character is rare, so that nothing else is held back on its account.
        stop = free.text[free.text.index(".") :][:11]
        assert len(stop) == 11
        body = chat_body(PROMPTS[0], 60, stop=[stop, "@@"])
        whole = await listen(front.url, body)
        assert whole.finish == "stop"
        assert whole.text == free.text[: free.text.index(stop)]
        parks = 0
        for cut in range(1, 18):
            parked = await listen(front.url, body, headers=forced(cut))
            assert (parked.text, parked.finish) == (whole.text, "stop")
            parks += parked.usage["kvalet"]["parks"]
        assert parks >= 16
