"""The disk refuses the journal while answers run: nobody hangs, everybody is told."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.actors.stage import chat, stage, until

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


@pytest.mark.parametrize("after", list(range(1, 36, 2)))
async def test_every_answer_ends_once_when_the_disk_is_full(
    tmp_path: Path, autojump_clock: MockClock, after: int
) -> None:
    async with stage(tmp_path, cells=240) as it:
        guests = [it.invite(chat(name)) for name in ("one", "two", "six")]
        guests.append(it.invite(chat("ten", stream=False)))
        await until(lambda: it.ledger.journal.seq >= after or all(guest.done for guest in guests))
        full = os.open("/dev/full", os.O_RDWR | os.O_APPEND)
        os.dup2(full, it.ledger.journal._descriptor)  # pyright: ignore[reportPrivateUsage]
        os.close(full)
        began = trio.current_time()
        await until(lambda: all(guest.done for guest in guests))
        assert trio.current_time() - began < 60
        for guest in guests[:3]:
            guest.check_ended_once()
            assert guest.status == 503 or guest.whole
        if it.ledger.failure is None:
            return
        late = [it.invite(chat(stream=flag)) for flag in (True, False)]
        status = it.invite(path="/kvalet/status", method="GET")
        health = it.invite(path="/health", method="GET")
        await trio.sleep(1)
        assert [guest.status for guest in late] == [503, 503]
        assert health.status == 503
        warnings = msgspec.json.decode(status.body)["warnings"]
        assert "journal_failed" in {warning["code"] for warning in warnings}
        assert it.mailboxes == 0
