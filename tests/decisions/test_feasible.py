"""Whether capped requests can all grow to their ends, against a token-by-token count."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalet.actors.decisions.feasible import peak
from kvalet.protocol import events as e
from kvalet.protocol.commands import Settings
from kvalet.protocol.ids import Cells
from tests.decisions.driver import World

growers = st.lists(st.tuples(st.integers(0, 60).map(Cells), st.integers(0, 40)), max_size=6)


def counted(growing: list[tuple[Cells, int]]) -> int:
    """The most cells ever held, by letting everybody decode a token a step."""
    held = [[int(cells), left] for cells, left in growing]
    most = sum(cells for cells, _ in held)
    while held:
        held = [[cells + 1, left - 1] for cells, left in held if left > 0]
        most = max(most, sum(cells for cells, _ in held))
    return most


@given(growers)
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_the_peak_is_that_of_a_count_token_by_token(growing: list[tuple[Cells, int]]) -> None:
    assert peak(growing) == counted(growing)


def test_nobody_holds_nothing() -> None:
    assert peak([]) == 0


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 300)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
def test_chats_that_fit_to_their_ends_are_never_parked(chats: list[tuple[int, int]]) -> None:
    world = World(cells=1024, slots=4).open()
    for prompt, cap in chats:
        world.arrive(prompt, cap, cap)
    grants = [event for event in world.log if isinstance(event, e.LeaseGranted)]
    fits = len(grants) == len(chats) and all(event.feasible for event in grants)
    world.run()

    if fits:
        assert world.house.totals.parks == 0
    assert {chat.outcome for chat in world.chats.values()} <= {"finished"}


@pytest.mark.parametrize(
    "chats",
    [
        [(1, 212), (176, 212), (200, 220)],
        [(1, 255), (1, 192), (1, 204), (163, 207)],
    ],
)
@pytest.mark.parametrize("block_min", [4, 8, 16, 32])
def test_credit_that_others_have_not_spent_yet_parks_nobody_who_fits(
    chats: list[tuple[int, int]], block_min: int
) -> None:
    world = World(cells=1024, slots=4, settings=Settings(block_min=block_min)).open()
    for prompt, cap in chats:
        world.arrive(prompt, cap, cap)
    world.run()

    assert world.house.totals.parks == 0
    assert {chat.outcome for chat in world.chats.values()} == {"finished"}


@pytest.mark.parametrize(
    "chats",
    [
        [(156, 290), (132, 146), (82, 253), (199, 56)],
        [(159, 256), (69, 195), (153, 250), (189, 70)],
        [(159, 290), (67, 252), (141, 193), (172, 67)],
        [(1, 278), (181, 176), (150, 216), (183, 100)],
    ],
)
def test_a_newcomers_first_credit_leaves_what_lets_another_reach_its_end(
    chats: list[tuple[int, int]],
) -> None:
    world = World(cells=1024, slots=4).open()
    for prompt, cap in chats:
        world.arrive(prompt, cap, cap)
    world.run()

    assert {chat.outcome for chat in world.chats.values()} == {"finished"}
    assert world.house.totals.parks == 0
