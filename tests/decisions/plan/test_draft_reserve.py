"""What a drafter costs. G0, G1 and G2 are named with each figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvalet.actors.decisions.plan.devices import DEFAULT, GIB, MIB
from kvalet.actors.decisions.plan.draft_reserve import (
    NO_DRAFTER,
    HeadShape,
    draft_depth,
    head_kv,
    overhead,
    overhead_g0,
    overhead_g1,
    overhead_g2,
    reserve_of,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "vram_vectors.json").read_text()
)["mtp_27b"]
HEAD: Final = HeadShape(layers=1, kv_heads=4, key=256, value=256)
EMBD: Final = 5120
ROLLBACK: Final = 156_893_184
MEASURED: Final[Mapping[tuple[int, int], int]] = {
    (4096, 2): 468,
    (8192, 2): 466,
    (16384, 2): 528,
    (65536, 2): 692,
    (131072, 2): 1012,
    (262144, 2): 1652,
    (4096, 6): 1108,
    (8192, 6): 1100,
    (16384, 6): 1168,
    (65536, 6): 1408,
    (131072, 6): 1646,
    (262144, 6): 2286,
}


@pytest.mark.parametrize("row", VECTORS["rows"], ids=str)
def test_every_generation_prices_a_27b_head_as_its_vectors_say(row: dict[str, Any]) -> None:
    kv, depth = head_kv(HEAD, row["ctx"]), row["n_max"]
    assert kv == row["draft_kv"]
    assert overhead_g0(kv, EMBD, depth) == row["g0"]
    assert overhead_g1(kv) == row["g1"]
    assert overhead_g2(kv, depth, rollback=ROLLBACK) == row["head_1slot"]
    assert overhead_g2(kv, depth, rollback=4 * ROLLBACK) == row["head_4slots"]


@pytest.mark.parametrize(
    ("ctx", "depth", "mib"),
    [
        (8192, 2, 488),
        (65536, 2, 768),
        (131072, 2, 1088),
        (262144, 2, 1728),
        (8192, 6, 1128),
        (131072, 6, 1728),
        (262144, 6, 2368),
    ],
)
def test_g0_predicts_what_the_table_says(ctx: int, depth: int, mib: int) -> None:
    kv = head_kv(HEAD, ctx)
    predicted = overhead_g0(kv, EMBD, depth) / MIB
    assert predicted == mib
    assert MEASURED[ctx, depth] <= predicted <= MEASURED[ctx, depth] + 150


def test_pln_33_our_reserve_covers_every_measured_point_closely() -> None:
    """The rollback copies grow with depth, the mask and KV with the cells. What spread is
    left is the server's own: its graph took 130, 105 or 50 MiB."""
    for (ctx, depth), measured in MEASURED.items():
        kv = head_kv(HEAD, ctx)
        reserve = overhead(kv, ctx, depth, embd=EMBD, ubatch=512, rollback=ROLLBACK)
        assert measured <= reserve / MIB <= measured + 90


def test_g0_without_a_width_keeps_its_constant() -> None:
    assert overhead_g0(0, None, 2) == 128 * MIB


def test_g2_a_quantised_head_is_priced_at_f16_on_each_axis() -> None:
    assert head_kv(HEAD, 65536, "q4_0", "q4_0") == head_kv(HEAD, 65536) == 268_435_456
    assert head_kv(HEAD, 65536, "f32", "f32") == 536_870_912
    assert head_kv(HEAD, 65536, "f32", "q8_0") == 402_653_184


@pytest.mark.parametrize(
    ("ctx", "total"),
    [(65536, 6_106_906_624), (262144, 24_427_626_496), (1048576, 97_710_505_984)],
)
def test_g2_an_mla_target_is_kept_twice(ctx: int, total: int) -> None:
    head, target = 34_816 * ctx, 58_368 * ctx
    assert overhead_g2(head, 2, target_copy=target) == total
    assert overhead_g2(34_816 * 65536, 2) == 2_281_701_376


def test_pln_45_what_can_be_sized_is_kept_and_the_flat_reserve_stays_for_the_rest() -> None:
    weights_only = reserve_of(weights=3 * GIB)
    assert (weights_only.growing(8192), weights_only.flat, weights_only.known) == (
        3 * GIB,
        True,
        True,
    )
    assert weights_only.flat_tensor == 2 * GIB
    assert weights_only.budget(DEFAULT).permille == 900
    nothing = reserve_of()
    assert (nothing.growing(8192), nothing.flat, nothing.known) == (0, True, False)
    sized = reserve_of(kv=lambda ctx: ctx * 4, copies=lambda _: 7)
    assert (sized.growing(100), sized.flat, sized.flat_tensor) == (407, False, 0)


def test_pln_35_without_a_drafter_not_a_byte_changes() -> None:
    assert NO_DRAFTER.growing(262144) == 0
    assert NO_DRAFTER.flat_tensor == 0
    assert NO_DRAFTER.budget(DEFAULT) is DEFAULT


def test_g2_the_depth_is_the_flag_then_the_servers_own_then_the_setting() -> None:
    assert draft_depth(7, owns_spec_type=True, setting=4) == 7
    assert draft_depth(None, owns_spec_type=True, inherited=5, build_default=3, setting=4) == 5
    assert draft_depth(None, owns_spec_type=True, build_default=3, setting=4) == 3
    assert draft_depth(None, owns_spec_type=True, setting=4) == 16
    assert draft_depth(None, inherited=5, setting=4) == 4
    assert draft_depth(None) == 2
    assert draft_depth(None, on_gpu=False) == 3
    assert draft_depth(None, mode="draft-dspark") == 3
