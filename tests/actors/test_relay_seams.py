"""A seam at every token: the client cannot see where one leg ended and the next began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from trio.testing import MockClock

from tests.actors.stage import TEXT, Guest, Stage, chat, stage, text_of

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

CUTS = [1, 2, 3, 4, 5, 6, 7, 9, 11, 13]
WORDS = "naïve 😀 über €5 → 日本語 für alle"


async def ask(it: Stage, cut: int, path: str = "", **fields: Any) -> Guest:
    asked = text_of(**fields) if path else chat(**fields)
    guest = it.invite(asked, path=path or "/v1/chat/completions", headers=cut_every(cut))
    await it.all_gone()
    guest.check_ended_once()
    it.check_empty()
    assert guest.status == 200
    assert not guest.errors
    return guest


def cut_every(tokens: int) -> dict[str, str]:
    return {"kvalet-park-every": str(tokens)}


def check_one_message(guest: Guest) -> None:
    assert len({(chunk["id"], chunk["created"]) for chunk in guest.chunks}) == 1
    deltas = [chunk["choices"][0].get("delta", {}) for chunk in guest.chunks if chunk["choices"]]
    assert sum("role" in delta for delta in deltas) <= 1
    finishes = [c["choices"][0]["finish_reason"] for c in guest.chunks if c["choices"]]
    assert [finish is not None for finish in finishes].count(True) == 1


@pytest.mark.parametrize("method", ["save", "recompute"])
@pytest.mark.parametrize("path", ["", TEXT])
@pytest.mark.parametrize("cut", CUTS)
async def test_characters_of_many_bytes_are_never_cut_or_doubled(
    tmp_path: Path, autojump_clock: MockClock, cut: int, path: str, method: str
) -> None:
    async with stage(tmp_path, debug=True, method=method) as it:
        it.server.answer = WORDS.encode()
        guest = await ask(it, cut, path)
        assert it.house.totals.parks > 0
        assert guest.content == WORDS
        check_one_message(guest)
        assert guest.chunks[-1]["timings"]["predicted_n"] >= len(WORDS.encode())


@pytest.mark.parametrize("cut", CUTS)
async def test_an_answer_whose_first_leg_says_nothing_has_one_name(
    tmp_path: Path, autojump_clock: MockClock, cut: int
) -> None:
    async with stage(tmp_path, debug=True) as it:
        it.server.answer = "日本語".encode()
        guest = await ask(it, cut, TEXT)
        assert guest.content == "日本語"
        check_one_message(guest)


@pytest.mark.parametrize("cut", CUTS)
async def test_a_thought_and_what_follows_it_are_whole_at_every_cut(
    tmp_path: Path, autojump_clock: MockClock, cut: int
) -> None:
    async with stage(tmp_path, debug=True) as it:
        it.server.thought, it.server.answer = "hmm, naïve 😀".encode(), b"So be it."
        guest = await ask(it, cut)
        assert guest.spoken("reasoning_content") == "hmm, naïve 😀"
        assert guest.content == "So be it."
        check_one_message(guest)


STOPS = [
    ("abcSTOPdef", ["STOP"], "abc"),
    ("abSTabSTOabSTOPx", ["STOP"], "abSTabSTOab"),
    ("ab\n\nUser: x", ["\n\nUser:", "zzz"], "ab"),
    ("aaaab", ["aaab"], "a"),
    ("ab😀😀c", ["😀😀"], "ab"),
    ("abSTO", ["STOP"], "abSTO"),
    ("abcdef", ["", "xyz"], "abcdef"),
]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("answer", "stop", "left"), STOPS)
async def test_a_stop_string_is_found_wherever_the_seam_is(
    tmp_path: Path,
    autojump_clock: MockClock,
    answer: str,
    stop: list[str],
    left: str,
    cut: int,
    streaming: bool,
) -> None:
    async with stage(tmp_path, debug=True) as it:
        it.server.answer = answer.encode()
        guest = it.invite(chat(stop=stop, stream=streaming), headers=cut_every(cut))
        await it.all_gone()
        assert guest.content == left
        if streaming:
            assert guest.chunks[-1]["choices"][0]["finish_reason"] == "stop"
            check_one_message(guest)
        else:
            whole = msgspec.json.decode(guest.body)
            found = [s for s in stop if s and s in answer]
            said = left + found[0] if found else left
            assert whole["usage"]["completion_tokens"] == len(said.encode())
            assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("cap", [1, 2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("cut", [1, 3, 4, 7])
async def test_a_cap_counts_over_all_legs(
    tmp_path: Path, autojump_clock: MockClock, cap: int, cut: int
) -> None:
    async with stage(tmp_path, debug=True) as it:
        guest = await ask(it, cut, max_tokens=cap)
        assert guest.content == it.server.answer[:cap].decode()
        assert guest.chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("cap", [1, 4, 6, 7, 9, 30])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_cap_in_the_middle_of_a_stop_string_loses_no_text(
    tmp_path: Path, autojump_clock: MockClock, cap: int, cut: int
) -> None:
    async with stage(tmp_path, debug=True) as it:
        it.server.answer, it.server.keeps_half_stops = b"abSTabSTOabcdef", False
        guest = await ask(it, cut, max_tokens=cap, stop="STOP")
        assert guest.content == it.server.answer[:cap].decode()


@pytest.mark.parametrize("cut", CUTS)
async def test_a_stop_string_inside_a_thought_is_found_wherever_the_seam_is(
    tmp_path: Path, autojump_clock: MockClock, cut: int
) -> None:
    async with stage(tmp_path, debug=True) as it:
        it.server.thought, it.server.answer = b"hm STO hm STOP no", b"never said"
        guest = await ask(it, cut, stop="STOP")
        assert (guest.spoken("reasoning_content"), guest.content) == ("hm STO hm ", "")
