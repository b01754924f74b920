"""What a shape makes of metadata, however little or much it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.shape import (
    LAYERS_MAX,
    ModelShape,
    Value,
    repositories,
    shape_of,
)


def shape(arch: str = "llama", **keys: Value) -> ModelShape:
    metadata: dict[str, Value] = {"general.architecture": arch}
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return shape_of(metadata)


def test_nothing_said_is_nothing_known() -> None:
    assert shape_of({}) == ModelShape()


def test_one_number_of_heads_holds_for_every_layer() -> None:
    told = shape(block_count=3, attention__head_count=32, attention__head_count_kv=8)
    assert (told.heads, told.kv_heads, told.kv_heads_max) == ((32,) * 3, (8,) * 3, 8)


def test_kv_heads_may_differ_by_layer_and_the_widest_is_known() -> None:
    told = shape(block_count=4, attention__head_count=32, attention__head_count_kv=[0, 8, 4])
    assert (told.kv_heads, told.kv_heads_max) == ((0, 8, 4, 0), 8)


def test_kv_heads_that_are_not_said_are_the_heads() -> None:
    assert shape(block_count=2, attention__head_count=16).kv_heads == (16, 16)


def test_a_layer_without_kv_heads_is_not_a_silent_one() -> None:
    told = shape(block_count=2, attention__head_count=16, attention__head_count_kv=0)
    assert told.kv_heads == (0, 0)


@pytest.mark.parametrize("layers", [LAYERS_MAX + 1, 1 << 40, (1 << 53) - 1])
def test_more_layers_than_a_model_can_have_are_none(layers: int) -> None:
    told = shape(block_count=layers, attention__head_count=16)
    assert (told.layers, told.heads, told.complete) == (0, (), False)


def test_the_most_layers_that_are_believed_are_believed() -> None:
    told = shape(block_count=LAYERS_MAX, attention__head_count=1)
    assert (len(told.heads), told.complete) == (LAYERS_MAX, True)


@pytest.mark.parametrize("value", [-1, 1 << 60, 1.5, "8", True, [], ["8"], [-4]])
def test_a_count_that_nothing_can_have_is_not_said(value: Value) -> None:
    assert shape(embedding_length=value).embd is None


def test_a_window_may_be_masked_or_periodic() -> None:
    assert shape(attention__sliding_window_pattern=[True, False]).swa_pattern == (True, False)
    assert shape(attention__sliding_window_pattern=[1, 0]).swa_pattern == (True, False)
    assert shape(attention__sliding_window_pattern=6).swa_pattern == 6
    assert shape().swa_pattern is None


def test_the_vocabulary_is_told_by_its_key_its_tokens_or_its_matrix() -> None:
    tokens: dict[str, Value] = {"tokenizer.ggml.tokens.length": 20}
    said: dict[str, Value] = {"general.architecture": "llama", "llama.vocab_size": 10}
    assert shape_of(said | tokens, embd_rows=30).vocab == 10
    assert shape_of(tokens, embd_rows=30).vocab == 20
    assert shape_of({}, embd_rows=30).vocab == 30


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("general.source.huggingface.repository", "google/gemma", "google/gemma"),
        ("general.source.url", "https://huggingface.co/google/gemma", "google/gemma"),
        ("general.source.repo_url", "https://host/a/b/tree/main", "a/b"),
        ("general.base_model.0.repo_url", "https://host/a/b/", "a/b"),
        ("general.source.url", "https://host/", None),
        ("general.source.url", "gemma", None),
        ("general.source.url", 7, None),
    ],
)
def test_a_repository_is_an_owner_and_a_name(key: str, value: Value, found: str | None) -> None:
    assert repositories({key: value}) == (() if found is None else (found,))


def test_repositories_are_tried_from_the_surest_to_the_least_sure() -> None:
    metadata: dict[str, Value] = {
        "general.organization": "Some Lab",
        "general.basename": "Tiny",
        "general.base_model.0.organization": "Google",
        "general.base_model.0.name": "Gemma 3 1b",
        "general.source.url": "https://host/a/b",
        "general.base_model.0.repo_url": "https://host/a/b",
    }
    assert repositories(metadata) == ("a/b", "Google/Gemma-3-1b", "Some-Lab/Tiny")


SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=8))
KEYS = st.sampled_from(
    [
        "block_count",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.recurrent_layers",
        "attention.causal",
        "feed_forward_length",
        "ssm.conv_kernel",
        "token_shift_count",
    ]
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(KEYS, VALUES), VALUES)
def test_no_metadata_is_too_odd_to_have_a_shape(keys: dict[str, Value], source: Value) -> None:
    metadata: dict[str, Value] = {f"llama.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = "llama"
    metadata["general.source.url"] = source
    told = shape_of(metadata)
    assert told.layers <= LAYERS_MAX
    assert len(told.heads) in (0, told.layers)
    assert len(told.kv_heads) in (0, told.layers)
