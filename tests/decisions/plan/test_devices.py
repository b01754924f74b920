"""What a card lends, and which cards are taken. G1 and G2 are named with each figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.devices import (
    DEFAULT,
    G1,
    G2,
    MIB,
    Budget,
    Gpu,
    budget_of,
    ranked,
    select_gpus,
    split_need,
)
from kvalet.protocol.errors import ConfigFault

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "vram_vectors.json").read_text()
)
GPUS = st.builds(
    Gpu,
    index=st.integers(0, 7),
    free_mib=st.integers(0, 100_000),
    total_mib=st.none() | st.integers(1, 200_000),
)


def g2_at(fraction: float | None) -> Budget:
    permille = 970 if fraction is None else round(fraction * 1000)
    return Budget(permille=permille, floor_mib=512, floor_permille=30)


@pytest.mark.parametrize("row", VECTORS["usable_mib"], ids=str)
def test_g2_a_card_lends_what_the_vectors_say(row: dict[str, Any]) -> None:
    gpu = Gpu(0, row["free"], row["total"] or None)
    budget = g2_at(row["frac"])
    assert budget.usable(gpu) / MIB == pytest.approx(row["usable"], abs=0.006)
    assert budget.usable(gpu, pooled=True) / MIB == pytest.approx(row["pooled"], abs=0.006)


@pytest.mark.parametrize(
    ("free", "total", "fraction", "usable"),
    [(81000, 81920, 1.0, 80488), (500, 8192, 0.97, 254.24)],
)
def test_g2_a_card_lends_what_the_table_says(
    free: int, total: int, fraction: float, usable: float
) -> None:
    assert g2_at(fraction).usable(Gpu(0, free, total)) / MIB == pytest.approx(usable, abs=0.006)


def test_g1_the_cushion_is_of_the_total_and_does_not_shrink_as_the_card_fills() -> None:
    assert G1.usable(Gpu(0, 24000, 24576)) == 24000 * MIB - -(-24576 * MIB * 50 // 1000)
    assert G1.usable(Gpu(0, 6000, 81920)) == 1904 * MIB
    assert G1.usable(Gpu(0, 24000)) == 22800 * MIB


@given(GPUS)
def test_the_default_equals_g1_on_every_card(gpu: Gpu) -> None:
    assert DEFAULT.usable(gpu) == G1.usable(gpu)


def test_the_fraction_is_a_setting_with_bounds() -> None:
    assert budget_of(0.95) == DEFAULT
    assert budget_of(0.97) == G2
    assert budget_of(0.91249).permille == 912
    for wrong in (0.79, 1.01, float("nan")):
        with pytest.raises(ConfigFault, match="between"):
            budget_of(wrong)


def test_a_flat_draft_reserve_takes_five_points_off() -> None:
    assert G2.without_flat_draft().usable(Gpu(0, 24000, 24576)) == int(22033.92 * MIB)


def test_a_card_of_unknown_total_keeps_its_cushion_in_a_mixed_pool() -> None:
    known, unknown = Gpu(0, 24000, 24576), Gpu(1, 10000)
    assert DEFAULT.pool([known, unknown]) == DEFAULT.usable(known) + 9500 * MIB


def test_an_overfull_card_owes_the_pool_nothing() -> None:
    assert G1.usable(Gpu(1, 100, 81920)) < 0
    assert G1.pool([Gpu(0, 20000, 20480), Gpu(1, 100, 81920)]) == 18976 * MIB


def test_cards_rank_by_room_and_then_by_index() -> None:
    busy, idle = Gpu(0, 30000, 81920), Gpu(1, 29000, 32607)
    assert [gpu.index for gpu in ranked([busy, idle], G2)] == [1, 0]
    twins = [Gpu(2, 8000, 8192), Gpu(1, 8000, 8192)]
    assert [gpu.index for gpu in ranked(twins, DEFAULT)] == [1, 2]


def chosen(row: dict[str, Any], budget: Budget) -> tuple[int, ...] | None:
    gpus = [Gpu(index, free, row["totals"].get(str(index))) for index, free in row["gpus"]]
    return select_gpus(
        split_need(row["model_mib"] * MIB, 0),
        gpus,
        budget,
        extra_card=row["overhead_mib"] * MIB,
        min_gpus=row["min_gpus"],
    )


@pytest.mark.parametrize("row", VECTORS["select_gpus"], ids=str)
def test_g2_and_g1_choose_the_cards_of_the_vectors(row: dict[str, Any]) -> None:
    cards = row["head"][0]
    assert chosen(row, g2_at(row["frac"])) == (None if cards is None else tuple(cards))
    if row["g1"] is not None:
        older = G1 if row["frac"] is None else Budget(permille=round(row["frac"] * 1000))
        cards = row["g1"][0]
        assert chosen(row, older) == (None if cards is None else tuple(cards))


def test_g2_the_last_row_of_the_table_does_not_fit() -> None:
    twins = [Gpu(0, 24000, 24576), Gpu(1, 24000, 24576)]
    assert select_gpus(lambda _: 45600 * MIB, twins, G2, extra_card=1024 * MIB) is None


def test_a_need_that_grows_when_split_is_asked_of_every_card() -> None:
    cards = [Gpu(index, 24000, 24576) for index in range(3)]
    need = split_need(40000 * MIB, 3000 * MIB)
    assert select_gpus(need, cards[:2], G2, extra_card=1024 * MIB) is None
    assert select_gpus(need, cards, G2, extra_card=1024 * MIB) == (0, 1, 2)
    assert select_gpus(split_need(23000 * MIB, 3000 * MIB), cards, G2) == (0,)


def test_a_small_second_card_is_left_alone_when_one_is_enough() -> None:
    cards = [Gpu(0, 16384), Gpu(1, 3072)]
    assert select_gpus(lambda _: 14 * 1024 * MIB, cards, G2, extra_card=1024 * MIB) == (0,)


def test_without_cards_nothing_is_chosen() -> None:
    assert select_gpus(lambda _: 0, [], DEFAULT) is None


@given(st.lists(GPUS, min_size=1, max_size=5, unique_by=lambda gpu: gpu.index), st.integers(0, 90))
def test_more_free_memory_never_turns_a_fit_into_none(gpus: list[Gpu], need_gib: int) -> None:
    need = split_need(need_gib * 1024 * MIB, 100 * MIB)
    richer = [Gpu(gpu.index, gpu.free_mib + 500, gpu.total_mib) for gpu in gpus]
    if select_gpus(need, gpus, DEFAULT, extra_card=1024 * MIB) is not None:
        assert select_gpus(need, richer, DEFAULT, extra_card=1024 * MIB) is not None
