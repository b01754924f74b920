"""Tensor splits. G1 and G2 are named with each figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.devices import DEFAULT, G1, G2, GIB, MIB, Budget, Gpu
from kvalet.actors.decisions.plan.draft_reserve import (
    HeadShape,
    head_kv,
    overhead_g2,
    reserve_of,
)
from kvalet.actors.decisions.plan.overheads import (
    GENEROUS_PERCENT,
    UNKNOWN_COMPUTE,
    growing_compute,
    soft_overhead,
    tensor_compute,
)
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.tensor_split import (
    Downgrade,
    TensorLoad,
    TensorPlan,
    admitted,
    layer_again,
    plan_tensor,
    tensor_attempt,
    tensor_or_layer,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "vram_vectors.json").read_text()
)["tensor_planner"]
PER_TOKEN: Final = 131072


def padded_kv(ctx: int) -> int:
    return -(-ctx // 256) * 256 * PER_TOKEN


def plain_kv(ctx: int) -> int:
    return ctx * PER_TOKEN


def free_kv(_ctx: int) -> int:
    return 0


def load_of(row: dict[str, Any], kv: Callable[[int], int], grows: bool) -> TensorLoad:
    asked = row["kw"]
    ubatch = asked.get("n_ubatch", 512)
    vocab = asked.get("vocab")
    load = TensorLoad(
        weights=int(row["model_gib"] * GIB),
        reserve=tensor_compute(vocab, 4096, ubatch, 1, percent=GENEROUS_PERCENT),
        kv=kv,
        soft=asked.get("soft_overhead_bytes", 0) if grows else 0,
    )
    if grows:

        def per_card(ctx: int) -> int:
            return growing_compute(ctx, ubatch)

        load = evolve(load, per_card=per_card)
    if asked.get("mtp_engaged"):
        named = "mtp_overhead_fn" in asked
        flat = bool(asked.get("mtp_flat_reserve_bytes", not named))
        weights = 3 * GIB if named else None
        draft = reserve_of(weights=weights, kv=None if flat else free_kv)
        load = evolve(load, draft=draft)
    return load


def planned(row: dict[str, Any], load: TensorLoad, budget: Budget) -> list[Any]:
    totals = row["kw"].get("total_by_idx", {})
    gpus = [Gpu(index, free, totals.get(str(index))) for index, free in row["gpus"]]
    native = row["kw"].get("max_target_ctx")
    plan = plan_tensor(load, gpus, budget, row["target"], native=native)
    split = None if plan.split is None else list(plan.split)
    return [plan.ctx, plan.max_ctx, list(plan.cards), split]


@pytest.mark.parametrize("row", VECTORS["rows"], ids=lambda row: row["name"])
def test_g2_the_plan_is_that_of_the_vectors(row: dict[str, Any]) -> None:
    assert planned(row, load_of(row, padded_kv, True), G2) == row["head"]


@pytest.mark.parametrize("row", VECTORS["rows"], ids=lambda row: row["name"])
def test_g1_the_plan_is_that_of_the_vectors(row: dict[str, Any]) -> None:
    """One vector lost a token to floating point, where the budget is met to the byte."""
    ctx, max_ctx, *rest = planned(row, load_of(row, plain_kv, False), G1)
    lost = row["name"] == "20000x2 totals 81920 18GiB"
    assert [ctx - lost, max_ctx - lost, *rest] == row["g1"]


def wide(weights_gib: float, *, reserve: int = UNKNOWN_COMPUTE) -> TensorLoad:
    return TensorLoad(
        weights=int(weights_gib * GIB),
        reserve=reserve,
        kv=padded_kv,
        per_card=lambda ctx: growing_compute(ctx, 512),
    )


UNEQUAL: Final = (Gpu(0, 48000), Gpu(1, 24000))


def test_g2_a_floor_below_the_floor_is_the_target() -> None:
    plan = plan_tensor(wide(70), UNEQUAL, G2, 1024)
    assert plan == TensorPlan(1024, 1024, (0, 1), (41439, 18159))


def test_g2_a_known_vocabulary_frees_most_of_the_reserve() -> None:
    twins = [Gpu(0, 16000), Gpu(1, 16000)]
    reserve = tensor_compute(152064, 4096, 512, 1, percent=GENEROUS_PERCENT)
    assert plan_tensor(wide(18, reserve=reserve), twins, G2, 131072).ctx == 91904


def test_pln_63_g2_two_24_gb_cards_hold_the_full_context_of_a_27b() -> None:
    head = HeadShape(layers=1, kv_heads=4, key=256, value=256)
    load = TensorLoad(
        weights=int(21.5 * GIB),
        reserve=tensor_compute(248320, 5120, 512, 1, percent=GENEROUS_PERCENT),
        kv=lambda ctx: ctx * 65536 + 156_893_184,
        per_card=lambda ctx: growing_compute(ctx, 512),
        draft=reserve_of(kv=lambda ctx: overhead_g2(head_kv(head, ctx), 2, rollback=156_893_184)),
        soft=soft_overhead(on_gpu=True, drafting=True),
    )
    twins = [Gpu(0, 23000, 24576), Gpu(1, 23000, 24576)]
    for budget in (G1, G2, DEFAULT):
        found = tensor_or_layer(load, twins, budget, 262144)
        assert found == TensorPlan(262144, 262144, (0, 1), None)


def test_pln_60_a_card_whose_usable_memory_is_below_the_reserve_stays_out() -> None:
    crowded, idle = Gpu(0, 6000, 81920), Gpu(1, 40000, 81920)
    assert admitted(wide(8), [crowded, idle], DEFAULT) == (idle,)
    assert tensor_or_layer(wide(8), [crowded, idle], DEFAULT, 8192) == Downgrade("gpu_count", 1)


def test_lch_46_fewer_than_two_cards_mean_a_layer_split() -> None:
    assert tensor_or_layer(wide(8), [], DEFAULT, 8192) == Downgrade("gpu_count", 0)


def test_lch_47_weights_beside_the_drafter_must_fit_or_a_layer_split_takes_over() -> None:
    assert tensor_or_layer(wide(70), UNEQUAL, G2, 8192) == Downgrade("capacity", 2)
    room = (46560 + 23280 - 2 * 5120) * MIB
    tight = evolve(wide(1), weights=room - 2 * GIB)
    assert isinstance(tensor_or_layer(tight, UNEQUAL, G2, 8192), TensorPlan)
    drafting = evolve(tight, draft=reserve_of())
    assert tensor_or_layer(drafting, UNEQUAL, G2, 8192) == Downgrade("capacity", 2)


def test_an_unsized_cache_gets_a_modest_context() -> None:
    load = evolve(wide(8), kv=None)
    assert plan_tensor(load, UNEQUAL, DEFAULT, 131072).ctx == 4096
    assert plan_tensor(load, UNEQUAL, DEFAULT, 512).ctx == 512
    assert plan_tensor(load, UNEQUAL, DEFAULT, 0).ctx == 4096


def test_an_equal_share_counts_the_soft_overhead_too() -> None:
    """G2 leaves it out of this check, and overfills the smaller card."""
    cards = [Gpu(0, 30000), Gpu(1, 20000)]
    room = (DEFAULT.room(cards[1]) - 5 * GIB) * 2
    grown = padded_kv(4096) + 2 * growing_compute(4096, 512)
    load = evolve(wide(0), weights=room - grown)
    assert plan_tensor(load, cards, DEFAULT, 4096).split is None
    assert plan_tensor(evolve(load, soft=2 * MIB), cards, DEFAULT, 4096).split == (23374, 13874)


@given(st.integers(6000, 60000), st.integers(6000, 60000), st.integers(0, 4000), st.integers(1, 60))
def test_more_free_memory_never_lowers_the_context(
    first: int, second: int, more: int, weights_gib: int
) -> None:
    before = plan_tensor(wide(weights_gib), [Gpu(0, first), Gpu(1, second)], DEFAULT, 131072)
    after = plan_tensor(wide(weights_gib), [Gpu(0, first + more), Gpu(1, second)], DEFAULT, 131072)
    assert after.ctx >= before.ctx


def test_lch_48_one_quantised_axis_is_enough_to_be_dropped() -> None:
    asked = ServerFlags(type_k="f16", type_v="q4_0", tensor_split=(3.0, 1.0), split_mode="tensor")
    attempt = tensor_attempt(asked)
    assert (attempt.type_k, attempt.type_v, attempt.tensor_split) == ("f16", "f16", ())
    assert tensor_attempt(ServerFlags(type_k="f32")).type_k == "f32"


def test_lch_49_a_downgrade_brings_back_all_that_was_asked_but_the_mode() -> None:
    asked = ServerFlags(
        type_k="q8_0", type_v="q4_0", split_mode="tensor", spec_types=("draft-mtp",)
    )
    assert layer_again(asked) == evolve(asked, split_mode="layer")
