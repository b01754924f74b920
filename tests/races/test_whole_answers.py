"""Races 11 to 13: caps that are spent as a park lands, and answers that are whole at every cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from trio.testing import MockClock

from kvalet.protocol import commands as c
from kvalet.protocol import events as e
from kvalet.protocol.ids import Cells
from tests.actors.scripted import CLOSE, OPEN, Json
from tests.actors.stage import Guest, Stage, chat, stage
from tests.decisions.driver import Chat, World
from tests.races.house import decided

pytestmark = [
    # httpx leaves its generators to the collector when a request is cancelled.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


async def ask(it: Stage, every: int, **fields: Any) -> Guest:
    """One chat, to its end, parked after every so many tokens."""
    guest = it.invite(chat(**fields), headers={"kvalet-park-every": str(every)})
    await it.all_gone()
    it.check_empty()
    assert guest.status == 200
    return guest


def whole(guest: Guest) -> Json:
    """An answer that was not streamed."""
    answer: Json = msgspec.json.decode(guest.body)
    return answer


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("parks_max", [0, 1, 32], ids=["never", "once", "always"])
async def test_race_11_a_cap_that_is_spent_as_the_park_lands_ends_the_answer(
    tmp_path: Path, autojump_clock: MockClock, parks_max: int, streaming: bool
) -> None:
    for cap in range(1, 9):
        for every in range(1, cap + 1):
            folder = tmp_path / f"{cap}-{every}"
            async with stage(folder, debug=True, resume_max=parks_max) as it:
                guest = await ask(it, every, max_tokens=cap, stream=streaming)
                last = guest.chunks[-1] if streaming else whole(guest)
                legs = -(-cap // every)
                parks = min(parks_max, legs - 1)

                assert guest.content == it.server.answer[:cap].decode()
                assert last["choices"][0]["finish_reason"] == "length"
                assert last["timings"]["predicted_n"] == cap, "the work of a leg counts once"
                if not streaming:
                    assert last["usage"]["completion_tokens"] == cap
                assert (it.house.totals.parks, it.house.totals.resumes) == (parks, parks)
                assert it.server.begun == legs, "no request goes upstream for no token"
                assert [x.generated for _, x in decided(it, e.LeaseEnded)] == [cap]


def pressed_pool(cells: int, cap: int) -> tuple[World, Chat]:
    """Three chats that have no limit, and a last one with a cap whom the policy likes to park."""
    settings = c.Settings(policy="lifo", block_min=4, first_block=8, quantum=8)
    world = World(cells=cells, slots=4, headroom=4, settings=settings).open()
    for number in range(3):
        world.arrive(40 + number, 90)
    return world, world.arrive(30, 1000, cap)


@pytest.mark.parametrize("cells", [200, 300])
def test_race_11_a_victim_ends_at_its_cap_whenever_it_is_chosen(cells: int) -> None:
    ordered = 0
    for cap in range(1, 90):
        world, capped = pressed_pool(cells, cap)
        world.run()
        ends = [x for x in world.log if isinstance(x, e.LeaseEnded) and x.request == capped.request]
        parks = [x for x in world.log if isinstance(x, e.LeaseParking)]
        parks = [x for x in parks if x.request == capped.request]
        chosen = [x.victim for x in world.log if isinstance(x, e.PoolPressed)]

        assert [(x.reason, x.generated) for x in ends] == [("stop", cap)]
        assert all(x.generated < cap for x in parks)
        # Chosen more often than parked: its own end came before its park.
        ordered += chosen.count(capped.request) > len(parks)
    assert ordered >= 1


def test_race_11_a_chat_that_stands_at_its_cap_is_never_parked_or_extended() -> None:
    world = World().open()
    capped = world.arrive(20, 1000, 4, park_every=4)
    lease = world.house.leases[capped.request]
    assert lease.granted == 24
    spent = c.CreditSpent(request=capped.request, cells=Cells(24), generated=4)

    assert [type(event) for event in world.tell(spent)] == [e.LeaseEnded]


ANSWER: Final = "Café, naïve 😀 done."


@pytest.mark.parametrize("parks_max", [1, 2, 32])
async def test_race_12_an_answer_that_is_not_streamed_comes_back_whole_at_every_cut(
    tmp_path: Path, autojump_clock: MockClock, parks_max: int
) -> None:
    size = len(ANSWER.encode())
    for every in range(1, size + 1):
        for cap in (None, size - 1):
            folder = tmp_path / f"{every}-{cap}"
            async with stage(folder, debug=True, resume_max=parks_max) as it:
                it.server.answer = ANSWER.encode()
                guest = await ask(it, every, stream=False, max_tokens=cap)
                answer = whole(guest)
                said = ANSWER.encode()[:cap].decode()

                assert answer["choices"][0]["message"]["content"] == said
                assert answer["usage"]["completion_tokens"] == len(said.encode())
                assert answer["choices"][0]["finish_reason"] == ("length" if cap else "stop")
                assert answer["usage"]["kvalet"]["parks"] == it.house.totals.parks <= parks_max
                assert it.server.begun > (every < size - 1)


THOUGHT: Final = "hmm, naïve 😀"
PROSE: Final = "So be it."
SAID: Final = len(f"{OPEN}{THOUGHT}{CLOSE}{PROSE}".encode())


def check_continued(body: Json, shown: tuple[str, str]) -> None:
    """A later leg is built on exactly what the client has been shown: the thought as a thought."""
    last = body["messages"][-1]
    if last["role"] == "user":
        # Nothing has been shown yet: half of the mark that opens a thought is no thought.
        return
    thought, prose = last.get("reasoning_content", ""), last["content"]
    assert shown[0].startswith(thought)
    assert shown[1].startswith(prose)
    assert not prose or thought == shown[0], "a thought that was cut stays when prose follows it"


@pytest.mark.parametrize("streaming", [True, False])
async def test_race_13_a_thought_and_its_prose_are_whole_at_every_cut(
    tmp_path: Path, autojump_clock: MockClock, streaming: bool
) -> None:
    for every in range(1, SAID):
        async with stage(tmp_path / str(every), debug=True, resume_max=99) as it:
            it.server.thought, it.server.answer = THOUGHT.encode(), PROSE.encode()
            guest = await ask(it, every, stream=streaming)

            assert guest.spoken("reasoning_content") == THOUGHT
            assert guest.content == PROSE
            assert it.server.begun > 1
            for body in it.server.bodies[1:]:
                check_continued(body, (THOUGHT, PROSE))
            assert it.server.bodies[-1]["messages"][-1]["reasoning_content"], "it was carried on"


async def test_race_13_a_chat_with_tools_is_never_cut(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    for every in (1, 2, 5):
        async with stage(tmp_path / str(every), debug=True) as it:
            it.server.thought, it.server.answer = THOUGHT.encode(), PROSE.encode()
            tools = [{"type": "function", "function": {"name": "f"}}]
            guest = await ask(it, every, tools=tools)

            assert (guest.spoken("reasoning_content"), guest.content) == (THOUGHT, PROSE)
            assert (it.house.totals.parks, it.server.begun) == (0, 1)
