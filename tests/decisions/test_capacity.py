"""What the scheduler is for: chats that outgrow the pool together all finish."""

from __future__ import annotations

import pytest

from kvalet.actors.decisions.preemption import POLICIES
from kvalet.protocol import events as e
from kvalet.protocol.commands import Settings
from tests.decisions.driver import World


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cap", [None, 900])
def test_four_chats_of_900_tokens_all_finish_in_2048_cells(policy: str, cap: int | None) -> None:
    world = World(settings=Settings(policy=policy)).open()
    chats = [world.arrive(20, 900, cap) for _ in range(4)]

    world.run()

    assert [chat.outcome for chat in chats] == ["finished"] * 4
    first = next(event for event in world.log if isinstance(event, e.LeaseParked))
    assert first.pool_granted >= 0.98 * 2048


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eight_chats_on_four_slots_all_finish(policy: str) -> None:
    world = World(settings=Settings(policy=policy)).open()
    chats = [world.arrive(20, 900, 900) for _ in range(8)]

    world.run()

    assert [chat.outcome for chat in chats] == ["finished"] * 8


def test_a_chat_alone_needs_five_legs_at_most() -> None:
    world = World().open()
    chat = world.arrive(20, 900, 900)

    world.run()

    assert chat.legs <= 5
    assert chat.outcome == "finished"


def test_sixteen_long_chats_share_a_large_pool() -> None:
    world = World(cells=8192, slots=16, headroom=16).open()
    chats = [world.arrive(100 + 7 * number, 900, None) for number in range(16)]

    world.run()

    assert {chat.outcome for chat in chats} == {"finished"}
