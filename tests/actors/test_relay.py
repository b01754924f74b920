"""One answer between its client and a scripted server, whatever goes wrong on either side."""

from __future__ import annotations

from pathlib import Path

from trio.testing import MockClock

from tests.actors.stage import chat, stage


async def test_three_answers_in_a_pool_for_two_are_parked_and_all_whole(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, cells=240) as it:
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        await it.all_gone()
        for guest in guests:
            guest.check_ended_once()
            assert guest.content == it.server.answer.decode()
            assert len({chunk["id"] for chunk in guest.chunks}) == 1
        assert it.house.totals.parks > 0
        assert it.house.totals.resumes > 0
        it.check_empty()
