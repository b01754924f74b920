"""A client may leave between any two steps of its request: nothing of it stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.actors.stage import Stage, chat, stage, until

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

STRIDE = int(os.environ.get("KVALET_TEST_STRIDE", "23"))
"""1 tries every step, which takes minutes."""


class Guillotine(trio.abc.Instrument):
    """Cancels ``scope`` when the tasks have made so many steps in all."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope = scope
        self._left = steps
        self.made = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.made += 1
        if self.made == self._left:
            self._scope.cancel()


async def leave_at(it: Stage, step: int, victim: int, fields: dict[str, object]) -> int:
    """Three clients, one of whom leaves; how many steps there were in all."""
    guests = [it.invite(chat(name, **fields)) for name in ("one", "two", "six")]
    blade = Guillotine(guests[victim].scope, step)
    trio.lowlevel.add_instrument(blade)
    try:
        await it.all_gone()
    finally:
        trio.lowlevel.remove_instrument(blade)
    for number, guest in enumerate(guests):
        if number != victim or not guest.scope.cancelled_caught:
            guest.check_ended_once()
            assert guest.content == it.server.answer.decode()
    await trio.sleep(5)
    it.check_empty()
    return blade.made


@pytest.mark.parametrize("method", ["save", "recompute"])
@pytest.mark.parametrize("victim", [0, 2])
async def test_a_client_who_leaves_between_any_two_steps(
    tmp_path: Path, autojump_clock: MockClock, method: str, victim: int
) -> None:
    async with stage(tmp_path / "whole", cells=240, method=method) as it:
        total = await leave_at(it, 0, victim, {})
        assert it.house.totals.parks > 0
    for step in range(1, total, STRIDE):
        try:
            async with stage(tmp_path / str(step), cells=240, method=method) as it:
                await leave_at(it, step, victim, {})
        except BaseException as error:
            error.add_note(f"the client left after step {step}")
            raise


async def test_an_erase_that_the_server_has_set_aside_for_good_is_woken(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stage(tmp_path, seats=1) as it:
        it.server.forgets_erases = True
        leaver = it.invite(chat())
        await it.ledger.wait_for(lambda house: bool(house.holders))
        await until(lambda: len(leaver.chunks) > 5)
        leaver.scope.cancel()
        await it.all_gone()
        assert it.server.slots[0].tokens == []
        it.server.forgets_erases = False
        next_one = it.invite(chat())
        await it.all_gone()
        assert next_one.content == it.server.answer.decode()
        it.check_empty()
