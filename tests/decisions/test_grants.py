"""Who gets cells, how many, and in which order."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvalet.actors.decisions.room import honest_price
from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells, RequestId, SlotId
from tests.decisions.driver import Chat, World


def kinds(events: list[e.AnyEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def spend(world: World, chat: Chat, *, stuck: bool = False) -> list[e.AnyEvent]:
    """The chat stands at the end of its credit."""
    lease = world.house.leases[chat.request]
    cells = lease.cells if stuck else lease.granted
    chat.generated = cells - chat.prompt
    return world.tell(
        c.CreditSpent(
            request=chat.request, cells=Cells(cells), generated=chat.generated, stuck=stuck
        )
    )


def granted(world: World) -> list[RequestId]:
    return [event.request for event in world.log if isinstance(event, e.LeaseGranted)]


def test_a_counted_prompt_is_granted_its_cells_and_a_block() -> None:
    world = World().open()

    world.arrive(48, 100)

    lease = world.house.leases[RequestId("r1")]
    assert world.log[-2:] == [
        e.PromptMeasured(request=lease.request, prompt=Cells(48)),
        e.LeaseGranted(
            request=lease.request,
            lease=lease.lease,
            slots=(SlotId(0),),
            granted=Cells(48 + 499),
            credit=Cells(499),
        ),
    ]


def test_no_leg_takes_more_than_half_of_what_is_free() -> None:
    world = World(slots=1, headroom=1).open()
    chat = world.arrive(20, 2000)
    free = world.cells - world.headroom - 20
    for event in world.log:
        if isinstance(event, e.LeaseGranted):
            assert event.credit <= free / 2
    while world.house.free > 2 * world.settings.block_min:
        before = world.house.free
        spend(world, chat)
        assert before - world.house.free <= before / 2


def test_a_chat_alone_in_a_pool_of_2048_takes_five_legs_at_most() -> None:
    world = World().open()
    chat = world.arrive(20, 900, 900)

    world.run()

    assert (chat.outcome, chat.generated) == ("finished", 900)
    assert chat.legs <= 5


def test_a_leg_is_never_longer_than_what_the_client_allows() -> None:
    world = World().open()
    world.arrive(20, 900, 7)

    assert world.house.leases[RequestId("r1")].granted == 27


def test_waiting_requests_are_granted_in_the_order_of_their_arrival() -> None:
    world = World(slots=2, headroom=2).open()
    for target in (40, 30, 20, 10, 5):
        world.arrive(10, target, 50)

    world.run()

    assert granted(world) == [f"r{number}" for number in range(1, 6)]


def test_a_small_newcomer_does_not_pass_a_large_head_of_the_queue() -> None:
    world = World(slots=4).open()
    first = world.arrive(1000, 900)
    world.arrive(1500, 10, 10)
    small = world.arrive(10, 10, 10)

    assert kinds(world.log)[-1] == "LeaseQueued"
    assert world.house.queue == ("r2", "r3")
    world.leave(first)
    world.run()
    assert granted(world) == ["r1", "r2", "r3"]
    assert small.outcome == "finished"


def test_a_queued_request_is_told_its_position() -> None:
    world = World(slots=1).open()
    for _ in range(3):
        world.arrive(10, 10)

    queued = [event for event in world.log if isinstance(event, e.LeaseQueued)]
    assert [(event.request, event.position) for event in queued] == [("r2", 1), ("r3", 2)]


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    world = World(cells=512, headroom=4).open()

    chat = world.arrive(508, 1)

    assert world.log[-1] == e.LeaseRefused(
        request=chat.request, code="prompt_too_large", needed=Cells(509), limit=Cells(508)
    )
    assert world.house.leases == {}


def test_the_largest_prompt_that_fits_is_served() -> None:
    world = World(cells=512, headroom=4).open()

    chat = world.arrive(507, 1)
    world.run()

    assert chat.outcome == "finished"


def test_more_choices_than_slots_are_refused_with_both_numbers() -> None:
    world = World(slots=4).open()

    chat = world.arrive(10, 10, 10, seats=5)

    assert world.log[-1] == e.LeaseRefused(
        request=chat.request, code="too_many_choices", needed=Cells(5), limit=Cells(4)
    )


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_a_full_queue_refuses_but_a_free_slot_does_not(longest: int) -> None:
    world = World(slots=1, settings=c.Settings(queue_max=longest)).open()
    world.arrive(10, 100)
    *_, last = [world.arrive(10, 10) for _ in range(longest + 1)]

    assert len(world.house.queue) == longest
    assert world.house.holders == {0: "r1"}
    assert world.log[-1] == e.LeaseRefused(
        request=last.request, code="queue_full", needed=Cells(longest + 1), limit=Cells(longest)
    )


def test_an_answer_of_several_choices_takes_a_slot_and_a_full_price_for_each() -> None:
    world = World().open()

    world.arrive(50, 20, 100, seats=3)

    lease = world.house.leases[RequestId("r1")]
    assert lease.slots == (0, 1, 2)
    assert lease.granted == 3 * 150
    assert not lease.pausable
    world.run()
    assert world.house.residue == {}


def test_what_cannot_be_parked_pays_for_everything_that_it_may_generate() -> None:
    world = World().open()

    world.arrive(100, 300, 400, pausable=False)

    assert world.house.leases[RequestId("r1")].granted == 500


def test_three_requests_without_a_park_never_may_generate_more_than_is_reserved() -> None:
    world = World(cells=16384, slots=4, headroom=4).open()
    world.arrive(1000, 10_000, 13_000, pausable=False)
    world.arrive(1000, 10_000, pausable=False)
    world.arrive(1000, 10_000, pausable=False)

    leases = [lease for lease in world.house.leases.values() if lease.granted]
    assert [lease.granted for lease in leases] == [14_000]
    world.leave(world.chats[RequestId("r1")])
    world.run()
    last = [event for event in world.log if isinstance(event, e.LeaseGranted)]
    assert [(event.request, event.granted) for event in last[1:]] == [("r2", 4095), ("r3", 4095)]
    assert [chat.outcome for chat in world.chats.values()][1:] == ["context-full"] * 2
    assert world.chats[RequestId("r2")].generated == 3095


def test_the_honest_price_never_passes_the_pool() -> None:
    world = World(cells=512, headroom=4).open()
    chat = world.arrive(100, 10)
    lease = world.house.leases[chat.request]

    for cap in (None, 0, 1, 10_000):
        for seats in (1, 2, 4):
            for prompt in (1, 100, 126):
                asker = replace(lease, cap=cap, seats=seats, prompt=Cells(prompt))
                price = honest_price(world.house, asker)
                assert seats * (prompt + 1) <= price <= world.house.limit


def test_without_preemption_everybody_gets_a_share_and_nobody_is_parked() -> None:
    world = World(settings=c.Settings(preempt=False)).open("recompute")
    chats = [world.arrive(20, 900) for _ in range(6)]

    world.run()

    assert {chat.outcome for chat in chats} == {"context-full"}
    assert {chat.generated for chat in chats} == {511 - 20}
    assert not any(isinstance(event, e.LeaseParking | e.PoolPressed) for event in world.log)


def test_a_slot_with_the_longest_common_prefix_is_preferred() -> None:
    world = World().open()
    world.tell(
        c.Arrive(request=RequestId("r1"), surface="openai.chat", streaming=True, cap=None),
    )
    world.chats[RequestId("r1")] = Chat(RequestId("r1"), 30, 10, None)
    events = world.tell(
        c.PromptCounted(
            request=RequestId("r1"),
            prompt=Cells(30),
            affinity=((SlotId(1), Cells(4)), (SlotId(3), Cells(20))),
        )
    )

    assert [event.slots for event in events if isinstance(event, e.LeaseGranted)] == [(3,)]


def test_a_tight_cap_is_marked_as_one_that_needs_no_park() -> None:
    world = World().open()
    world.arrive(100, 300, 300)
    world.arrive(100, 300, 300)
    world.arrive(100, 300, 3000)

    grants = [event for event in world.log if isinstance(event, e.LeaseGranted)]
    assert [event.feasible for event in grants] == [True, True, False]


def test_a_repeated_arrival_or_count_changes_nothing() -> None:
    world = World().open()
    chat = world.arrive(20, 100)

    assert world.tell(c.Arrive(request=chat.request, surface="openai.chat", streaming=True)) == []
    assert world.tell(c.PromptCounted(request=chat.request, prompt=Cells(99))) == []


def test_residue_is_erased_least_recently_used_first_when_its_cells_are_needed() -> None:
    world = World(cells=1024, slots=4).open()
    for target in (10, 20, 30):
        world.arrive(190, target, target)
    world.run()
    assert world.house.residue_total == 3 * 190 + 60

    chat = world.arrive(700, 10, 10)

    grant = world.log[-1]
    assert isinstance(grant, e.LeaseGranted)
    assert (grant.slots, grant.erase) == ((3,), (0, 1))
    assert world.house.erasing == {0: "r4", 1: "r4"}
    world.run()
    assert chat.outcome == "finished"
    assert sorted(world.house.residue) == [2, 3]
    assert world.purges == 0


def test_a_slot_that_is_being_erased_is_nobodys_until_it_is_empty() -> None:
    world = World(cells=1024, slots=2, headroom=2).open()
    world.arrive(400, 10, 10)
    world.run()
    first = world.arrive(700, 10, 10)
    second = world.arrive(20, 10, 10)

    assert world.house.erasing == {0: first.request}
    assert world.house.queue == (second.request,)
    world.run()
    assert second.outcome == "finished"


def test_a_slot_whose_eraser_has_left_is_free_again() -> None:
    world = World(cells=1024, slots=2, headroom=2).open()
    world.arrive(400, 10, 10)
    world.run()
    world.leave(world.arrive(700, 10, 10))

    assert world.house.erasing == {}
    chat = world.arrive(20, 10, 10)
    assert world.house.holders[SlotId(0)] == chat.request
    assert world.tell(c.SlotErased(slot=SlotId(0), cells=Cells(410))) == []
