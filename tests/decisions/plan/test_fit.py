"""The search for a context and its cards. G1 and G2 are named with each figure."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.devices import DEFAULT, G1, G2, GIB, MIB, Budget, Gpu
from kvalet.actors.decisions.plan.draft_reserve import HeadShape, head_kv, overhead_g2
from kvalet.actors.decisions.plan.fit import (
    Choice,
    HostMemory,
    Load,
    advertised_ctx,
    auto_choice,
    explicit_choice,
    fit_ctx,
    host_choice,
    host_shortage,
    most_slots,
    shed,
    steady_choice,
    unsized_choice,
)
from kvalet.actors.decisions.plan.overheads import EXTRA_CARD, growing_compute, layer_compute

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "vram_vectors.json").read_text()
)
WHOLE: Final = Budget(permille=1000)
"""All that is free: for figures whose budget is given outright."""


def at(budget: Budget, fraction: float | None) -> Budget:
    return budget if fraction is None else evolve(budget, permille=round(fraction * 1000))


@pytest.mark.parametrize("row", VECTORS["fit_context"], ids=str)
def test_g2_and_g1_find_the_contexts_of_the_vectors(row: dict[str, Any]) -> None:
    gpu = Gpu(0, row["avail_mib"], row["total_mib"])
    for generation, budget in (("head", G2), ("g1", G1)):
        found = fit_ctx(
            row["requested"],
            at(budget, row["frac"]).usable(gpu),
            int(row["model_gib"] * GIB),
            lambda ctx: ctx * row["kv_bytes_per_token"],
        )
        assert found == row[generation]


def test_g2_weights_beyond_the_budget_leave_the_request_alone() -> None:
    found = fit_ctx(131072, G2.usable(Gpu(0, 24000)), 23 * GIB, lambda ctx: ctx * 25000)
    assert found == 131072


def test_g2_a_27b_head_is_priced_at_each_candidate_and_beats_the_flat_share() -> None:
    """The first row of the vectors again: without a drafter, sized, and flat."""
    head = HeadShape(layers=1, kv_heads=4, key=256, value=256)
    room, weights = Gpu(0, 24000), 8 * GIB

    def sized(ctx: int) -> int:
        cells = -(-ctx // 256) * 256
        return ctx * 325000 + overhead_g2(head_kv(head, cells), 2)

    assert fit_ctx(131072, G2.usable(room), weights, sized) == 47872
    flat = G2.without_flat_draft().usable(room)
    assert fit_ctx(131072, flat, weights, lambda ctx: ctx * 325000) == 44800


def plain(weights_mib: int, per_token: int, *, extra_card: int = EXTRA_CARD) -> Load:
    return Load(
        fixed=weights_mib * MIB,
        growing=lambda ctx, _: ctx * per_token,
        extra_card=extra_card,
    )


def spread(weights_mib: int, per_token: int, ubatch: int, *, arch: str = "") -> Load:
    def per_card(ctx: int, cards: int) -> int:
        return growing_compute(ctx, ubatch, arch=arch, pipelined=cards > 1)

    return Load(
        fixed=weights_mib * MIB,
        growing=lambda ctx, cards: ctx * per_token + cards * per_card(ctx, cards),
        per_card=per_card,
    )


@pytest.mark.parametrize(
    ("free", "expected"),
    [(2500, Choice(31488, (0, 1), True)), (1858, Choice(4096, (0, 1), True))],
)
def test_g2_the_smallest_card_bounds_a_split_by_what_it_must_hold_itself(
    free: int, expected: Choice
) -> None:
    cards = [Gpu(0, 40000, 49152), Gpu(1, free, 24576)]
    load = spread(20480, 20000, 2048)
    assert auto_choice(262144, cards, G2, load, min_gpus=2) == expected


def test_g2_a_card_too_small_for_its_own_part_is_left_out() -> None:
    cards = [Gpu(0, 40000, 49152), Gpu(1, 1856, 24576)]
    load = spread(20480, 20000, 2048)
    assert not auto_choice(262144, cards, G2, load, min_gpus=2).fits
    assert auto_choice(262144, cards, G2, load).cards == (0,)


def test_g2_a_reserve_with_a_large_constant_and_one_without() -> None:
    big = Gpu(0, 400000)
    steep = spread(1, 1, 512, arch="deepseek4")
    assert auto_choice(1 << 20, [big, Gpu(1, 4000)], WHOLE, steep, min_gpus=2).ctx == 13312
    assert not auto_choice(1 << 20, [big, Gpu(1, 2500)], WHOLE, steep, min_gpus=2).fits
    even = Load(fixed=1, growing=lambda ctx, _: ctx, per_card=lambda ctx, _: ctx * 16384)
    assert auto_choice(1 << 20, [big, Gpu(1, 3024)], WHOLE, even, min_gpus=2).ctx == 128000


def test_a_second_card_is_taken_only_for_a_larger_context() -> None:
    cards = [Gpu(0, 24000, 24576), Gpu(1, 24000, 24576)]
    assert auto_choice(8192, cards, DEFAULT, plain(8000, 65536)).cards == (0,)
    more = auto_choice(262144, cards, DEFAULT, plain(8000, 65536))
    assert more == Choice(262144, (0, 1), True)


def test_pln_53_an_explicit_context_pays_for_each_card_beyond_the_first() -> None:
    cards = [Gpu(0, 16000, 16384), Gpu(1, 16000, 16384)]
    load = plain(29000, 1)
    assert explicit_choice(4096, cards, G2, load) == Choice(4096, (0, 1), True)
    tight = plain(30000, 1)
    assert explicit_choice(4096, cards, G2, tight) == Choice(4096, (), False)
    assert explicit_choice(4096, cards, G2, evolve(tight, extra_card=0)).fits


def test_an_explicit_context_is_never_changed() -> None:
    assert explicit_choice(131072, [Gpu(0, 8000)], DEFAULT, plain(7000, 65536)).ctx == 131072


def test_pln_64_a_model_that_fits_no_set_of_cards_advertises_the_floor() -> None:
    card = [Gpu(0, 97000)]
    heavy = plain(131 * 1000, 325000)
    assert advertised_ctx(196608, card, DEFAULT, heavy, in_use=8192) == 4096
    assert advertised_ctx(2048, card, DEFAULT, heavy, in_use=8192) == 2048
    assert advertised_ctx(196608, [], DEFAULT, heavy, in_use=8192) == 8192
    assert advertised_ctx(196608, card, DEFAULT, None, in_use=8192) == 8192
    assert advertised_ctx(None, card, DEFAULT, heavy, in_use=8192) == 8192
    light = plain(8 * 1024, 325000)
    assert advertised_ctx(131072, [Gpu(0, 24000)], G2, light, in_use=512) == 48640


def test_an_unsized_model_is_placed_by_its_files() -> None:
    twins = [Gpu(0, 16000, 16384), Gpu(1, 16000, 16384)]
    small, large = 15000 * MIB, 60000 * MIB
    assert unsized_choice(small, twins, G2, ctx=None, native=32768) == Choice(32768, (0,), True)
    assert unsized_choice(large, twins, G2, ctx=None, native=32768) == Choice(4096, (), False)
    assert unsized_choice(large, twins, G2, ctx=9000, native=32768) == Choice(9000, (), False)


def test_slots_are_given_up_before_layers_leave_the_cards() -> None:
    card = [Gpu(0, 16000, 16384)]

    def place(slots: int) -> Choice:
        return explicit_choice(8192, card, DEFAULT, plain(12000 + 900 * slots, 4096))

    assert most_slots(8, place) == (3, Choice(8192, (0,), True))
    assert most_slots(2, place)[0] == 2

    def hopeless(_: int) -> Choice:
        return Choice(8192, (), False)

    assert most_slots(4, hopeless) == (4, Choice(8192, (), False))


def test_the_lightest_sacrifice_that_fits_is_made_and_none_in_vain() -> None:
    def place(load: Load) -> Choice:
        return auto_choice(32768, [Gpu(0, 16000, 16384)], DEFAULT, load)

    whole, on_host, alone = plain(18000, 4096), plain(16500, 4096), plain(14000, 4096)
    assert shed([whole, on_host, alone], place) == 2
    assert shed([alone, alone], place) == 0
    assert shed([whole, on_host], place) == 0


def test_without_cards_the_host_pays_for_parking_and_the_prompt_cache_too() -> None:
    load = plain(4000, 65536)
    free = HostMemory(available=16 * GIB)
    assert free.usable == 14 * GIB
    assert host_choice(None, 131072, free, load) == Choice(131072, (), True)
    shared = HostMemory(available=16 * GIB, parking=4 * GIB, prompt_cache=2 * GIB)
    smaller = host_choice(None, 131072, shared, load)
    assert smaller == Choice(67072, (), True)
    assert host_choice(131072, 131072, shared, load) == Choice(131072, (), False)
    assert host_choice(None, 131072, HostMemory(available=GIB), load) == Choice(4096, (), False)


def test_weights_that_neither_cards_nor_host_hold_are_a_shortage() -> None:
    assert host_shortage(20 * GIB, 16 * GIB, 8 * GIB) == 0
    assert host_shortage(20 * GIB, 16 * GIB, 4 * GIB) == 2 * GIB
    assert host_shortage(20 * GIB, 16 * GIB, GIB) == 4 * GIB


def priced(slots: int) -> Load:
    """A launch as the closed forms price it, with recurrent state for each slot."""

    def growing(ctx: int, cards: int) -> int:
        cells = -(-ctx // (slots * 256)) * 256 * slots
        linear = growing_compute(ctx, 512, embd=5120, quantised=True, pipelined=cards > 1)
        return cells * 65536 + slots * 150 * MIB + cards * linear

    return Load(
        fixed=20 * GIB + layer_compute(248320, 5120, 512, slots),
        growing=growing,
        per_card=lambda ctx, cards: growing_compute(
            ctx, 512, embd=5120, quantised=True, pipelined=cards > 1
        ),
    )


CARDS = st.lists(
    st.tuples(st.integers(0, 50_000), st.none() | st.integers(50_000, 90_000)),
    min_size=1,
    max_size=4,
)


@given(CARDS, st.integers(0, 3), st.integers(0, 9000), st.integers(256, 300_000))
def test_more_free_memory_never_lowers_the_context(
    cards: list[tuple[int, int | None]], which: int, more: int, native: int
) -> None:
    gpus = [Gpu(index, free, total) for index, (free, total) in enumerate(cards)]
    richer = list(gpus)
    lucky = gpus[which % len(gpus)]
    richer[lucky.index] = evolve(lucky, free_mib=lucky.free_mib + more)
    before = auto_choice(native, gpus, DEFAULT, priced(2))
    after = auto_choice(native, richer, DEFAULT, priced(2))
    assert after.ctx >= before.ctx
    assert after.fits or not before.fits


@given(CARDS, st.integers(256, 300_000))
def test_another_card_never_lowers_the_context(
    cards: list[tuple[int, int | None]], native: int
) -> None:
    gpus = [Gpu(index, free, total) for index, (free, total) in enumerate(cards)]
    fewer = auto_choice(native, gpus[:-1], DEFAULT, priced(1))
    assert auto_choice(native, gpus, DEFAULT, priced(1)).ctx >= fewer.ctx


@given(CARDS, st.integers(1, 7), st.integers(256, 300_000))
def test_more_slots_never_raise_the_context(
    cards: list[tuple[int, int | None]], slots: int, native: int
) -> None:
    gpus = [Gpu(index, free, total) for index, (free, total) in enumerate(cards)]

    def choose(count: int) -> Choice:
        return steady_choice(
            count,
            native,
            priced,
            largest=lambda limit, load: auto_choice(limit, gpus, DEFAULT, load),
            exact=lambda ctx, load: explicit_choice(ctx, gpus, DEFAULT, load),
        )

    few, many = choose(slots), choose(slots + 1)
    assert many.ctx <= few.ctx
    assert few.fits or not many.fits or many.ctx == few.ctx


def test_four_slots_that_cost_less_than_three_get_no_more_context() -> None:
    def load_of(slots: int) -> Load:
        return Load(fixed=0, growing=lambda ctx, _: -(-ctx // (slots * 256)) * 256 * slots * MIB)

    host = HostMemory(available=8192 * MIB, margin=0)

    def largest(limit: int, load: Load) -> Choice:
        return host_choice(None, limit, host, load)

    def exact(ctx: int, load: Load) -> Choice:
        return host_choice(ctx, 9000, host, load)

    assert [largest(9000, load_of(slots)).ctx for slots in (3, 4)] == [7680, 8192]
    found = steady_choice(4, 9000, load_of, largest=largest, exact=exact)
    assert found == Choice(7680, (), True)


@given(CARDS, st.integers(4096, 300_000))
def test_what_is_said_to_fit_does_and_the_next_step_does_not(
    cards: list[tuple[int, int | None]], native: int
) -> None:
    gpus = [Gpu(index, free, total) for index, (free, total) in enumerate(cards)]
    found = auto_choice(native, gpus, DEFAULT, priced(1))
    if found.fits:
        assert explicit_choice(found.ctx, gpus, DEFAULT, priced(1)).cards == found.cards
        assert found.ctx == native or found.ctx % 256 == 0
    if found.ctx < native:
        assert not explicit_choice(found.ctx + 256, gpus, DEFAULT, priced(1)).fits or (
            found.ctx + 256 > native
        )


def test_a_search_asks_for_few_prices_and_takes_milliseconds() -> None:
    asked: list[int] = []

    def counted(ctx: int, cards: int) -> int:
        asked.append(ctx)
        return ctx * 65536 + cards

    gpus = [Gpu(index, 24000, 24576) for index in range(8)]
    load = Load(fixed=150 * GIB, growing=counted)
    took: list[float] = []
    for _ in range(5):
        asked.clear()
        started = perf_counter()
        assert auto_choice(1 << 20, gpus, DEFAULT, load).fits
        took.append(perf_counter() - started)
    assert min(took) < 0.02
    assert len(asked) < 50
