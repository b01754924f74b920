"""Answers about windows from outside of a file: how they are read, fitted and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.kept import ContextBytes, context_bytes
from kvalet.actors.decisions.plan.layers import Hint, Pattern, layers_of, periodic
from kvalet.actors.decisions.plan.price import Model, Offer, price
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.weights import Weights
from kvalet.actors.decisions.plan.windows import (
    ANSWERS_MAX,
    answers_in,
    fitted,
    key_of,
    pattern_in,
    recallable,
    unanswered,
    with_answer,
)

MIB: Final = 1 << 20
RECORDED: Final = Path(__file__).parents[2] / "data" / "transformers_defaults.json"
OLD, NEW = "4.57.6", "5.7.0"
S, F = "sliding_attention", "full_attention"
GEMMA_270M: Final = ModelShape(
    arch="gemma3",
    layers=18,
    context=32768,
    embd=640,
    heads=(4,) * 18,
    kv_heads=(1,) * 18,
    key_length=256,
    value_length=256,
    window=512,
)
NEWCOMER: Final = evolve(GEMMA_270M, arch="newcomer")


def recorded() -> dict[str, dict[str, Any]]:
    documents: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    return documents


@pytest.mark.parametrize(
    ("arch", "old", "new"),
    [
        ("gemma3", 6, 6),
        ("gemma2", 2, 2),
        ("cohere2", 4, 4),
        ("gpt_oss", 2, 2),
        ("gemma3n", 5, 5),
        ("gemma4", None, 6),
        ("qwen2", 1, 1),
        ("phi3", None, None),
        ("mistral", None, None),
        ("llama", None, None),
        ("deepseek_v3", None, None),
        ("falcon_h1", None, (False,) * 32),
    ],
)
def test_pln_13_the_defaults_of_two_versions_are_read_as_expected(
    arch: str, old: Pattern | None, new: Pattern | None
) -> None:
    documents = recorded()
    assert pattern_in(documents[OLD][arch]) == old
    assert pattern_in(documents[NEW][arch]) == new


@pytest.mark.parametrize(
    ("document", "pattern"),
    [
        ({"sliding_window_pattern": 6}, 6),
        ({"text_config": {"sliding_window_pattern": 4}, "sliding_window_pattern": 6}, 4),
        ({"text_config": {"hidden_size": 8}, "sliding_window_pattern": 6}, 6),
        ({"text_config": {"layer_types": [S, S, F] * 2}}, 3),
        ({"layer_types": [S, S, F, S]}, 3),
        ({"layer_types": [F, F]}, 1),
        ({"layer_types": [F, S, F, S]}, (False, True, False, True)),
        ({"layer_types": [S, F, F, S]}, (True, False, False, True)),
        ({"layer_types": [S, S]}, (True, True)),
        ({"layer_types": ["chunked_attention", F]}, 2),
        ({"layer_types": [S, "linear_attention"]}, (True, False)),
    ],
)
def test_layer_types_become_a_period_or_stay_a_mask(document: object, pattern: Pattern) -> None:
    assert pattern_in(document) == pattern


@pytest.mark.parametrize("value", [True, 0, -6, 6.0, "6", "LLLG", 1 << 70, [], {}, None])
def test_a_pattern_of_an_odd_type_is_no_answer(value: object) -> None:
    assert pattern_in({"sliding_window_pattern": value}) is None
    assert pattern_in({"text_config": value, "layer_types": value}) is None
    assert pattern_in(value) is None


@pytest.mark.parametrize("types", [[S, 1], [None], [[S]], [S] * 5000])
def test_layer_types_that_are_no_words_are_no_answer(types: object) -> None:
    assert pattern_in({"layer_types": types}) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([S, F, "mamba"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(["text_config", "layer_types", "sliding_window_pattern"]), inner
        )
    ),
)


@given(ANYTHING)
def test_no_document_can_break_its_reader(document: object) -> None:
    pattern = pattern_in(document)
    if pattern is not None:
        kept = answers_in(with_answer({}, "a", pattern))
        assert kept == {"a": pattern}


def test_a_mask_of_another_depth_is_refused_unless_it_repeats() -> None:
    assert fitted((True, False, False, True), NEWCOMER) is None
    assert fitted((True, True, False), NEWCOMER) is not None
    odd = tuple(il % 5 == 0 for il in range(18))
    assert fitted(odd, NEWCOMER) == odd
    assert fitted(6, NEWCOMER) == 6


def test_next_token_layers_that_a_configuration_does_not_count_see_everything() -> None:
    ahead = evolve(NEWCOMER, nextn_layers=1)
    odd = tuple(il % 5 == 0 for il in range(17))
    assert fitted(odd, ahead) == (*odd, False)


def test_only_a_window_that_no_one_explains_is_asked_about() -> None:
    assert unanswered(NEWCOMER)
    assert not unanswered(GEMMA_270M)
    assert not unanswered(evolve(NEWCOMER, window=None))
    assert not unanswered(evolve(NEWCOMER, swa_pattern=6))
    assert not unanswered(evolve(NEWCOMER, arch="llama"))
    assert not unanswered(evolve(NEWCOMER, layers=0))


def test_what_was_kept_counts_before_the_table_and_after_the_header() -> None:
    assert recallable(GEMMA_270M)
    assert recallable(NEWCOMER)
    assert not recallable(evolve(GEMMA_270M, swa_pattern=6))
    assert not recallable(evolve(GEMMA_270M, window=None))


def test_models_of_another_depth_or_origin_share_no_answer() -> None:
    models = [
        NEWCOMER,
        evolve(NEWCOMER, layers=19),
        evolve(NEWCOMER, arch="other"),
        evolve(NEWCOMER, repositories=("a/b",)),
        evolve(NEWCOMER, repositories=("a/c",)),
    ]
    assert len({key_of(model) for model in models}) == len(models)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_kept_file_of_garbage_holds_nothing(raw: bytes) -> None:
    assert answers_in(raw) == {}


def test_one_odd_entry_does_not_void_the_others() -> None:
    raw = b'{"a": 6, "b": true, "c": [true, 1], "d": [true, false], "e": 0, "f": "6", "g": []}'
    assert answers_in(raw) == {"a": 6, "d": (True, False)}


def test_the_oldest_answers_are_let_go() -> None:
    full: dict[str, Pattern] = {f"m{number}": 2 for number in range(ANSWERS_MAX)}
    kept = answers_in(with_answer(full, "m1", 3))
    assert len(kept) == ANSWERS_MAX
    assert list(kept)[-1] == "m1"
    more = answers_in(with_answer(kept, "new", 4))
    assert len(more) == ANSWERS_MAX
    assert "m0" not in more


def older(shape: ModelShape, hint: Hint | None = None) -> ContextBytes:
    flags = ServerFlags(ctx=32768, parallel=1)
    return context_bytes(shape, flags, rules="legacy", hint=hint)


def test_pln_29_a_pattern_saves_a_quarter_of_a_small_gemma_at_32k() -> None:
    guessed, told = older(NEWCOMER), older(NEWCOMER, Hint(6, "transformers"))
    assert (guessed.layers.tier, told.layers.tier) == ("estimate", "transformers")
    assert told.bytes == older(GEMMA_270M).bytes == 111 * MIB
    assert guessed.bytes == 142 * MIB

    def undoubled(plan: ContextBytes) -> int:
        """One window a slot, as it was counted before the second was found."""
        return plan.of_kind("non_swa") + plan.of_kind("swa") // 2

    before, after = undoubled(guessed), undoubled(told)
    assert (before // 10**6, after // 10**6) == (141, 108)
    assert round(100 * (after - before) / before) == -23


def test_a_drafter_goes_by_its_own_answer_and_not_by_the_targets() -> None:
    flags = ServerFlags(ctx=8192, parallel=1, spec_types=("draft-simple",), draft_model="d.gguf")
    none = Weights(tensors=())
    target = Model(shape=NEWCOMER, weights=none, hint=Hint(6, "hub"))
    drafter = Model(shape=evolve(NEWCOMER, layers=18), weights=none)
    priced = price(Offer(model=target, drafter=drafter), flags)
    assert priced.draft is not None
    assert (priced.context.layers.tier, priced.draft.layers.tier) == ("hub", "estimate")
    again = price(Offer(model=target, drafter=evolve(drafter, hint=Hint(2, "cache"))), flags)
    assert again.draft is not None
    assert len(again.draft.layers.windowed) == 9


def test_a_mask_counts_layer_by_layer() -> None:
    mask = (*periodic(6, 17), True)
    layers = layers_of(NEWCOMER, Hint(mask, "hub"))
    assert tuple(layer.windowed for layer in layers.attention) == mask
