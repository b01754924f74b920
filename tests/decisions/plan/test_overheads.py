"""Closed forms of the compute buffers. Each test names its generation, or the requirement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvalet.actors.decisions.plan.devices import GIB, MIB
from kvalet.actors.decisions.plan.overheads import (
    GENEROUS_PERCENT,
    growing_compute,
    layer_compute,
    soft_overhead,
    tensor_compute,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "vram_vectors.json").read_text()
)
VOCAB_27B, EMBD_27B = 248320, 5120


@pytest.mark.parametrize("row", VECTORS["compute_flat"], ids=str)
def test_g2_the_flat_buffers_are_those_of_the_vectors(row: dict[str, Any]) -> None:
    """The vectors multiply by 1.15 in floating point, which can lose the last byte."""
    sizes = row["vocab"], row["embd"], row["ubatch"], row["slots"]
    layer = layer_compute(*sizes, percent=GENEROUS_PERCENT)
    tensor = tensor_compute(*sizes, percent=GENEROUS_PERCENT)
    assert layer - row["pipeline"] in (0, 1)
    assert tensor - row["tensor"] in (0, 1)


@pytest.mark.parametrize(
    ("vocab", "embd", "layer", "tensor"),
    [
        (248320, 5120, (46.0, 603.75, 1719.25, 3950.25), (649.75, 1207.5, 2323, 4554)),
        (152064, 8192, (73.6, 415.15, 1098.25, 2464.45), (488.75, 830.3, 1513.4, 2879.6)),
        (262144, 2560, (23.0, 611.8, 1789.4, 4144.6), (634.8, 1223.6, 2401.2, 4756.4)),
        (32000, 4096, (36.8, 108.67, 252.42, 539.92), (145.47, 217.35, 361.1, 648.6)),
        (128256, 4096, (36.8, 324.88, 901.02, 2053.32), (361.67, 649.75, 1225.9, 2378.2)),
    ],
)
def test_g2_the_flat_buffers_are_those_of_the_table(
    vocab: int, embd: int, layer: tuple[float, ...], tensor: tuple[float, ...]
) -> None:
    for slots, pooled, each in zip((1, 2, 4, 8), layer, tensor, strict=True):
        one = layer_compute(vocab, embd, 512, slots, percent=GENEROUS_PERCENT)
        two = tensor_compute(vocab, embd, 512, slots, percent=GENEROUS_PERCENT)
        assert one / MIB == pytest.approx(pooled, abs=0.011)
        assert two / MIB == pytest.approx(each, abs=0.06)


def test_pln_49_the_estimate_is_a_small_upper_bound_of_what_a_27b_took() -> None:
    for slots, measured in {1: 36, 2: 492, 4: 1388, 8: 3220}.items():
        estimate = layer_compute(VOCAB_27B, EMBD_27B, 512, slots) / MIB
        assert measured <= estimate <= measured * 1.12
    assert 600 <= tensor_compute(VOCAB_27B, EMBD_27B, 512, 1) / MIB <= 650


def test_pln_50_without_dimensions_both_buffers_take_the_flat_figure() -> None:
    for vocab, embd in ((None, 5120), (248320, None), (0, 5120)):
        assert layer_compute(vocab, embd, 512, 4) == 5 * GIB
        assert tensor_compute(vocab, embd, 512, 4) == 5 * GIB


def test_a_pooling_launch_pays_for_every_slot() -> None:
    chat = layer_compute(32000, 4096, 512, 3)
    assert layer_compute(32000, 4096, 512, 2, pooling=True) == chat


@pytest.mark.parametrize("row", VECTORS["compute_ctx_linear"], ids=str)
def test_g2_the_growing_buffer_is_that_of_the_vectors(row: dict[str, Any]) -> None:
    grown = growing_compute(
        row["ctx"],
        row["ubatch"],
        embd=row["embd"],
        arch=row["arch"] or "",
        quantised=row["type"] == "q8_0",
        mla=row["mla"] is not None,
        pipelined=row["layer_split"],
    )
    assert grown == row["bytes"]


def test_g2_a_quantised_mla_cache_takes_the_smaller_factor() -> None:
    """The table's 6144-wide row."""
    assert growing_compute(262144, 512, embd=6144, quantised=True, mla=True) == 1920 * MIB


def test_g2_soft_overheads_are_paid_on_a_card_only() -> None:
    assert soft_overhead(on_gpu=False, projector=MIB, drafting=True) == 0
    assert soft_overhead(on_gpu=True) == 320 * MIB
    assert soft_overhead(on_gpu=True, projector=100 * MIB, drafting=True) == 584 * MIB
