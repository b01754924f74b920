"""Answers about windows from outside of a model's file: how they are read, fitted and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from kvalet.actors.decisions.plan.layers import Pattern, Tier, layers_of, mask_of, period_of
from kvalet.actors.decisions.plan.shape import LAYERS_MAX, ModelShape

WINDOWED: Final = frozenset({"sliding_attention", "chunked_attention"})
WHOLE: Final = "full_attention"
ANSWERS_MAX: Final = 1000
"""More answers than that are not kept: the oldest go."""


def unanswered(shape: ModelShape) -> bool:
    """Whether the model has a window, and neither its header nor the table says on which layers."""
    return _learnt(shape, "estimate")


def recallable(shape: ModelShape) -> bool:
    """Whether an answer that was kept counts: it comes before the table, after the header."""
    return _learnt(shape, "table", "estimate")


def pattern_in(document: object) -> Pattern | None:
    """What a configuration says, its part about text first; None for anything else.

    Types of layers are the more exact word: a period when they repeat, a mask otherwise.
    """
    for config in _levels(document):
        pattern = _types(config.get("layer_types"))
        if pattern is None:
            pattern = _period(config.get("sliding_window_pattern"))
        if pattern is not None:
            return pattern
    return None


def fitted(pattern: Pattern, shape: ModelShape) -> Pattern | None:
    """``pattern`` where it can hold for the layers of ``shape``. Next-token layers that a mask
    does not count see everything."""
    ahead = shape.nextn_layers
    if not isinstance(pattern, int) and ahead and len(pattern) == shape.layers - ahead:
        return pattern + (False,) * ahead
    return None if mask_of(pattern, shape.layers) is None else pattern


def key_of(shape: ModelShape) -> str:
    """What an answer is kept under: two models share one only where the same would be asked."""
    return " ".join((shape.arch, str(shape.layers), *shape.repositories))


def answers_in(raw: bytes) -> dict[str, Pattern]:
    """The answers that were kept, oldest first. Entries that are none are left out, and a file of
    anything else holds none."""
    try:
        document: object = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return {}
    if not isinstance(document, dict):
        return {}
    entries = cast("dict[str, Any]", document)
    kept = {key: _kept(value) for key, value in entries.items()}
    return {key: pattern for key, pattern in kept.items() if pattern is not None}


def with_answer(kept: Mapping[str, Pattern], key: str, pattern: Pattern) -> bytes:
    """A file of the answers ``kept`` and one more, which is the youngest then."""
    answers = {name: known for name, known in kept.items() if name != key}
    answers[key] = pattern
    youngest = list(answers.items())[-ANSWERS_MAX:]
    return msgspec.json.encode(dict(youngest))


def _learnt(shape: ModelShape, *tiers: Tier) -> bool:
    layers = layers_of(shape)
    return layers.tier in tiers and bool(layers.attention)


def _levels(document: object) -> Iterator[Mapping[str, Any]]:
    if not isinstance(document, Mapping):
        return
    config = cast("Mapping[str, Any]", document)
    text: object = config.get("text_config")
    if isinstance(text, Mapping):
        yield cast("Mapping[str, Any]", text)
    yield config


def _types(value: object) -> Pattern | None:
    if not isinstance(value, (list, tuple)):
        return None
    named = cast("Sequence[Any]", value)
    if not 0 < len(named) <= LAYERS_MAX or not all(isinstance(name, str) for name in named):
        return None
    mask = tuple(name in WINDOWED for name in named)
    if not all(name in WINDOWED or name == WHOLE for name in named):
        # Layers of another kind tell nothing about a model with more or fewer layers.
        return mask
    period = period_of(mask)
    return mask if period is None else period


def _period(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 1 <= value <= LAYERS_MAX else None


def _kept(value: object) -> Pattern | None:
    if not isinstance(value, list):
        return _period(value)
    mask = tuple(cast("Sequence[Any]", value))
    whole = 0 < len(mask) <= LAYERS_MAX and all(isinstance(windowed, bool) for windowed in mask)
    return mask if whole else None
