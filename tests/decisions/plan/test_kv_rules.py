"""Rules of caches and state that no measured launch stands for."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.drafting import draft_context
from kvalet.actors.decisions.plan.host import host_bytes
from kvalet.actors.decisions.plan.kept import context_bytes, drafted, snapshots, target_sizes
from kvalet.actors.decisions.plan.layers import (
    Hint,
    layers_of,
    mask_of,
    nextn_layers_of,
    period_of,
    periodic,
)
from kvalet.actors.decisions.plan.placement import HOST, Device, place
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape, Ssm
from kvalet.protocol.errors import ConfigFault

MIB = 1 << 20
PLAIN = ServerFlags(ctx=8192, parallel=1)


def shape(arch: str, layers: int = 8, kv_heads: int = 2) -> ModelShape:
    return ModelShape(
        arch=arch,
        layers=layers,
        context=32768,
        embd=1024,
        vocab=32000,
        heads=(8,) * layers,
        kv_heads=(kv_heads,) * layers,
        ff=(4096,) * layers,
        key_length=128,
        value_length=128,
    )


GEMMA_270M = evolve(
    shape("gemma3", 18, 1), key_length=256, value_length=256, heads=(4,) * 18, window=512
)


@pytest.mark.parametrize(
    ("arch", "first"),
    [
        ("plamo3", [True] * 7 + [False]),
        ("laguna", [False, True, True, True] * 2),
        ("cohere2moe", [False, True, True, True] * 2),
        ("gpt-oss", [True, False] * 4),
        ("llama4", [True, True, True, False] * 2),
        ("lfm2", [True] * 8),
    ],
)
def test_a_built_in_pattern_marks_the_layers_with_a_window(arch: str, first: list[bool]) -> None:
    layers = layers_of(evolve(shape(arch), window=512))
    assert [layer.windowed for layer in layers.attention] == first
    assert layers.tier == "table"


@pytest.mark.parametrize("arch", ["llama", "phi3", "qwen2", "mistral3", "glm4"])
def test_an_architecture_that_ignores_its_window_keeps_every_cell(arch: str) -> None:
    layers = layers_of(evolve(shape(arch), window=512))
    assert (layers.windowed, layers.window, layers.tier) == ((), 0, "none")


@pytest.mark.parametrize(
    ("arch", "said", "window"),
    [
        ("gemma2", None, 4096),
        ("gemma3", None, 0),
        ("exaone-moe", None, 128),
        ("smallthinker", 512, 4096),
        ("llama4", 512, 8192),
        ("llama4", 0, 0),
        ("exaone4", 512, 0),
    ],
)
def test_a_window_may_be_set_by_the_architecture(arch: str, said: int | None, window: int) -> None:
    assert layers_of(evolve(shape(arch), window=said)).window == window


def test_a_long_exaone_has_a_window() -> None:
    assert layers_of(evolve(shape("exaone4", 64), window=512)).window == 512


def test_the_headers_pattern_wins_over_every_other_answer() -> None:
    said = evolve(shape("gemma3"), window=512, swa_pattern=(True, False) * 4)
    layers = layers_of(said, Hint(6, "cache"))
    assert len(layers.windowed) == 4
    assert layers.tier == "header"


def test_a_cached_answer_comes_before_the_table_and_a_hub_answer_after_it() -> None:
    found = evolve(shape("gemma3"), window=512)
    assert layers_of(found, Hint(2, "cache")).tier == "cache"
    assert layers_of(found, Hint(2, "hub")).tier == "table"
    assert layers_of(evolve(found, arch="newcomer"), Hint(2, "hub")).tier == "hub"


def test_without_any_answer_a_quarter_of_the_layers_sees_everything() -> None:
    layers = layers_of(evolve(shape("newcomer"), window=512))
    assert (len(layers.whole), len(layers.windowed), layers.tier) == (2, 6, "estimate")
    assert len(layers_of(evolve(shape("newcomer", 3), window=512)).whole) == 1


def test_a_mask_of_another_length_counts_only_when_it_repeats() -> None:
    assert mask_of((True, False, True, False), 6) == (True, False) * 3
    assert mask_of((True, False, False, True), 6) is None
    assert layers_of(evolve(shape("newcomer"), window=9), Hint((True,) * 3, "hub")).tier == (
        "estimate"
    )


@given(st.integers(1, 12), st.integers(1, 60))
def test_a_period_is_found_again_in_its_mask(period: int, layers: int) -> None:
    mask = periodic(period, layers)
    found = period_of(mask)
    assert found is None if all(mask) else found == period


def test_a_sparse_model_has_a_second_cache_of_keys_for_its_indexer() -> None:
    found = evolve(
        shape("glm-dsa"),
        key_length=576,
        value_length=512,
        key_length_mla=192,
        value_length_mla=128,
        indexer_key_length=128,
    )
    plan = context_bytes(found, PLAIN)
    assert plan.of_kind("indexer") == 8 * 8192 * 128 * 2
    assert plan.of_kind("non_swa") == 8 * 8192 * 576 * 2
    half = evolve(found, indexer_full=(True, False) * 4)
    assert context_bytes(half, PLAIN).of_kind("indexer") == 4 * 8192 * 128 * 2


def test_a_delta_attention_layer_keeps_three_convolutions_and_a_square_a_head() -> None:
    found = evolve(
        shape("kimi-linear", 4),
        kv_heads=(0, 0, 0, 1),
        ssm=Ssm(conv_kernel=4),
        kda_head_dim=128,
    )
    plan = context_bytes(found, PLAIN)
    assert plan.state.layers == (0, 1, 2)
    assert plan.state.layer_bytes == (3 * 3 * 8 * 128 + 128 * 128 * 8) * 4


def test_a_next_token_layer_of_a_windowed_model_follows_its_own_entry() -> None:
    found = evolve(
        shape("step35", 5),
        nextn_layers=1,
        window=512,
        swa_pattern=(True, True, True, False, True),
    )
    flags = evolve(PLAIN, spec_types=("draft-mtp",))
    assert len(layers_of(found).attention) == 4
    assert [layer.windowed for layer in nextn_layers_of(found).attention] == [True]
    draft = draft_context(found, flags, target_sizes(found, flags))
    assert draft is not None
    assert [(cache.kind, cache.cells) for cache in draft.caches] == [("swa", 1024)]


def test_a_drafter_that_shares_the_targets_cache_costs_none() -> None:
    drafter = shape("gemma4-assistant", 2)
    draft = draft_context(GEMMA_270M, PLAIN, target_sizes(GEMMA_270M, PLAIN), drafter)
    assert draft is not None
    assert draft.bytes == 0


@pytest.mark.parametrize("arch", ["qwen35", "bailingmoe3", "lfm2", "nemotron_h"])
def test_state_is_kept_once_more_for_each_drafted_token(arch: str) -> None:
    flags = evolve(PLAIN, spec_types=("draft-mtp",))
    assert snapshots(shape(arch), flags) == 3
    assert snapshots(shape(arch), evolve(flags, draft_max=8)) == 8
    assert snapshots(shape(arch), evolve(flags, spec_types=("ngram-mod",))) == 0


def test_state_of_a_model_that_cannot_roll_back_is_kept_once() -> None:
    flags = evolve(PLAIN, spec_types=("draft-mtp",))
    assert snapshots(shape("falcon-h1"), flags) == 0
    assert drafted(flags) == 3


def test_a_cache_type_that_does_not_divide_the_heads_is_refused() -> None:
    odd = evolve(shape("llama"), key_length=80)
    with pytest.raises(ConfigFault, match="whole blocks"):
        context_bytes(odd, evolve(PLAIN, type_k="q8_0"))
    assert context_bytes(odd, evolve(PLAIN, type_k="q8_0", flash_attn="off")).bytes > 0


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_the_older_form_charges_two_windows_a_slot(slots: int) -> None:
    plan = context_bytes(GEMMA_270M, ServerFlags(ctx=8192, parallel=slots), rules="legacy")
    assert plan.bytes == (24 + 15 * slots) * MIB
    assert plan.layers.path == "swa"


def test_an_unknown_build_is_charged_the_larger_of_both_forms() -> None:
    wide = ServerFlags(ctx=8192, parallel=1, ubatch=2048)
    unified = ServerFlags(ctx=8192, parallel=4, kv_unified=True)
    assert context_bytes(GEMMA_270M, wide, rules="larger").rules == "b11434"
    assert context_bytes(GEMMA_270M, unified, rules="larger").rules == "legacy"
    for flags in (wide, unified):
        both = [context_bytes(GEMMA_270M, flags, rules=r).bytes for r in ("b11434", "legacy")]
        assert context_bytes(GEMMA_270M, flags, rules="larger").bytes == max(both)


@given(st.integers(1, 1 << 20), st.integers(1, 16), st.booleans())
def test_an_unknown_build_never_costs_less_than_a_known_one(
    ctx: int, slots: int, unified: bool
) -> None:
    flags = ServerFlags(ctx=ctx, parallel=slots, kv_unified=unified)
    known = context_bytes(GEMMA_270M, flags).bytes
    assert context_bytes(GEMMA_270M, flags, rules="larger").bytes >= known


@given(st.integers(0, 60), st.integers(0, 70), st.integers(1, 4))
def test_every_layer_lies_somewhere_and_the_last_ones_on_devices(
    layers: int, wanted: int, count: int
) -> None:
    devices = [Device(name=f"GPU{index}") for index in range(count)]
    placed = place(layers, devices, gpu_layers=wanted)
    everywhere = [*placed.layers, placed.output]
    assert len(placed.layers) == layers
    assert everywhere.count(HOST) == max(0, layers + 1 - wanted)
    assert everywhere == [HOST] * everywhere.count(HOST) + sorted(
        name for name in everywhere if name != HOST
    )


def test_a_split_by_hand_beats_free_memory() -> None:
    devices = [Device(name="GPU0", share=1.0), Device(name="GPU1", share=99.0)]
    placed = place(7, devices, split=(3.0, 1.0))
    assert placed.layers == ("GPU0",) * 6 + ("GPU1",)


def test_caches_kept_off_the_devices_lie_on_the_host() -> None:
    placed = place(8, [Device(name="GPU0")], kv_offload=False)
    assert dict(context_bytes(shape("llama"), PLAIN).per_device(placed)) == {
        HOST: 8 * 8192 * 2 * 128 * 2 * 2
    }


def test_checkpoints_are_taken_only_where_a_prefix_cannot_be_cut() -> None:
    whole = context_bytes(shape("llama"), PLAIN)
    windowed = context_bytes(GEMMA_270M, PLAIN)
    full = evolve(PLAIN, swa_full=True)
    assert host_bytes(whole, PLAIN).checkpoint == 0
    assert host_bytes(windowed, PLAIN).checkpoint == 512 * 15 * 1024
    assert host_bytes(windowed, PLAIN).checkpoints == 32 * 512 * 15 * 1024
    assert host_bytes(context_bytes(GEMMA_270M, full), full).checkpoint == 0
    assert host_bytes(whole, PLAIN).prompt_cache == 8192 * MIB
    assert host_bytes(whole, evolve(PLAIN, cache_ram_mib=-1)).prompt_cache is None
