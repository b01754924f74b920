"""Which layers of a model keep keys and values, which have a window, which keep a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from attrs import frozen

from kvalet.actors.decisions.plan import arch
from kvalet.actors.decisions.plan.shape import ModelShape

Path = Literal["mla", "hybrid", "swa", "gqa", "legacy"]
Tier = Literal["header", "cache", "table", "transformers", "hub", "estimate", "none"]
Pattern = tuple[bool, ...] | int

GLOBAL_SHARE: Final = 4
"""Without any answer, one layer of so many is taken to see the whole context."""


@frozen
class Hint:
    """A window pattern from outside of the file, and the tier that found it."""

    pattern: Pattern
    tier: Literal["cache", "transformers", "hub"]


@frozen(kw_only=True)
class KvLayer:
    """Keys and values of one layer: heads, and elements of one head. ``value`` is 0 where the
    values are read out of the keys."""

    index: int
    heads: int
    key: int
    value: int
    windowed: bool


@frozen(kw_only=True)
class Layers:
    """The layers of one context. ``window`` is in tokens, 0 when no layer has one;
    ``value_row`` is the widest row of values of all layers of the file, in elements."""

    attention: tuple[KvLayer, ...]
    indexer: tuple[int, ...]
    recurrent: tuple[int, ...]
    window: int
    value_row: int
    latent: bool
    path: Path
    tier: Tier

    @property
    def windowed(self) -> tuple[KvLayer, ...]:
        """Attention layers with a window."""
        return tuple(layer for layer in self.attention if layer.windowed)

    @property
    def whole(self) -> tuple[KvLayer, ...]:
        """Attention layers that see the whole context."""
        return tuple(layer for layer in self.attention if not layer.windowed)


def layers_of(shape: ModelShape, hint: Hint | None = None) -> Layers:
    """The layers of the target's own context (next-token layers left out)."""
    trunk = _trunk(shape)
    recurrent = _recurrent(shape, trunk)
    window, mask, tier = window_of(shape, hint)
    latent = is_latent(shape)
    keeping = [] if shape.arch in arch.NO_MEMORY else _keeping(shape, trunk, recurrent)
    return Layers(
        attention=tuple(kv_layer(shape, il, windowed=mask[il]) for il in keeping),
        indexer=_indexer(shape, trunk),
        recurrent=() if shape.arch in arch.NO_MEMORY else recurrent,
        window=window if any(mask[il] for il in keeping) else 0,
        value_row=_widest_values(shape, mask),
        latent=latent,
        path=path_of(shape),
        tier=tier,
    )


def nextn_layers_of(shape: ModelShape, hint: Hint | None = None) -> Layers:
    """The layers of the embedded drafter's context: the next-token layers alone."""
    window, mask, tier = window_of(shape, hint)
    indices = range(shape.layers - shape.nextn_layers, shape.layers)
    kept = tuple(kv_layer(shape, il, windowed=mask[il]) for il in indices)
    return Layers(
        attention=kept,
        indexer=tuple(indices) if _indexer(shape, 1) else (),
        recurrent=(),
        window=window if any(layer.windowed for layer in kept) else 0,
        value_row=_widest_values(shape, mask),
        latent=is_latent(shape),
        path=path_of(shape),
        tier=tier,
    )


def is_latent(shape: ModelShape) -> bool:
    """Whether the cache holds compressed keys only. Files made before the split lengths were
    written keep ordinary keys and values."""
    return bool(shape.key_length_mla and shape.value_length_mla)


def kv_layer(shape: ModelShape, index: int, *, windowed: bool) -> KvLayer:
    """Heads and head sizes of one layer."""
    first = next((heads for heads in shape.heads if heads), 0)
    default = (shape.embd or 0) // first if first else 0
    key = default if shape.key_length is None else shape.key_length
    value = default if shape.value_length is None else shape.value_length
    if is_latent(shape):
        return KvLayer(index=index, heads=1, key=key, value=0, windowed=windowed)
    if windowed:
        key = key if shape.key_length_swa is None else shape.key_length_swa
        value = value if shape.value_length_swa is None else shape.value_length_swa
    heads = shape.kv_heads[index] if index < len(shape.kv_heads) else 0
    return KvLayer(index=index, heads=heads, key=key, value=value, windowed=windowed)


def path_of(shape: ModelShape) -> Path:
    """The name of the closed form that this header calls for."""
    if shape.kv_lora_rank or is_latent(shape):
        return "mla"
    if shape.ssm.inner_size and shape.full_attention_interval:
        return "hybrid"
    lengths = shape.key_length is not None and shape.value_length is not None
    if shape.window and lengths:
        return "swa"
    return "gqa" if lengths else "legacy"


def window_of(shape: ModelShape, hint: Hint | None) -> tuple[int, tuple[bool, ...], Tier]:
    """The window in tokens, which layers have it, and where that was learnt."""
    none: tuple[int, tuple[bool, ...], Tier] = (0, (False,) * shape.layers, "none")
    window = _window(shape)
    if not window:
        return none
    mask, tier = _pattern(shape, hint)
    return (window, mask, tier) if any(mask) else (0, mask, tier)


def periodic(period: int, layers: int, *, dense_first: bool = False) -> tuple[bool, ...]:
    """A mask of ``layers`` by period; period 0 puts the window on each layer."""
    if period == 0:
        return (True,) * layers
    if dense_first:
        return tuple(il % period != 0 for il in range(layers))
    return tuple(il % period < period - 1 for il in range(layers))


def mask_of(pattern: Pattern, layers: int) -> tuple[bool, ...] | None:
    """``pattern`` for ``layers``; None for a mask of another length that repeats nowhere."""
    if isinstance(pattern, int):
        return periodic(pattern, layers)
    if len(pattern) == layers:
        return pattern
    period = period_of(pattern)
    return periodic(period, layers) if period is not None else None


def period_of(mask: Sequence[bool]) -> int | None:
    """The period that ``mask`` repeats with; None when it does not (an all-windowed one too)."""
    first = next((il for il, windowed in enumerate(mask) if not windowed), None)
    if first is None:
        return None
    return first + 1 if tuple(mask) == periodic(first + 1, len(mask)) else None


def _window(shape: ModelShape) -> int:
    if shape.arch in arch.WINDOW_IGNORED:
        return 0
    if shape.arch == "llama4":
        return 0 if shape.window == 0 else arch.LLAMA4_CHUNK
    if shape.arch == "exaone4" and shape.layers != arch.EXAONE4_WINDOWED_LAYERS:
        return 0
    if shape.arch in arch.ALWAYS_WINDOW:
        return arch.ALWAYS_WINDOW[shape.arch]
    return shape.window or arch.DEFAULT_WINDOW.get(shape.arch, 0)


def _pattern(shape: ModelShape, hint: Hint | None) -> tuple[tuple[bool, ...], Tier]:
    named, count = shape.arch, shape.layers
    if named in arch.ALL_WINDOWED:
        return (True,) * count, "table"
    if shape.swa_pattern is not None:
        return _header_mask(shape, shape.swa_pattern), "header"
    outside = None if hint is None else mask_of(hint.pattern, count)
    if hint is not None and outside is not None and hint.tier == "cache":
        return outside, "cache"
    if named in arch.PERIODS:
        return periodic(arch.PERIODS[named], count), "table"
    if named in arch.DENSE_FIRST:
        return periodic(arch.DENSE_FIRST[named], count, dense_first=True), "table"
    if hint is not None and outside is not None:
        return outside, hint.tier
    return _estimated(count), "estimate"


def _header_mask(shape: ModelShape, pattern: Pattern) -> tuple[bool, ...]:
    if isinstance(pattern, int):
        return periodic(pattern, shape.layers, dense_first=shape.arch in arch.DENSE_FIRST)
    return (pattern + (False,) * shape.layers)[: shape.layers]


def _estimated(layers: int) -> tuple[bool, ...]:
    """A quarter of the layers, at least one, sees everything."""
    mask = periodic(GLOBAL_SHARE, layers)
    return mask if not all(mask) else mask[:-1] + (False,) * min(1, layers)


def _widest_values(shape: ModelShape, mask: Sequence[bool]) -> int:
    rows = (kv_layer(shape, il, windowed=windowed) for il, windowed in enumerate(mask))
    return max((row.heads * row.value for row in rows), default=0)


def _trunk(shape: ModelShape) -> int:
    inside = shape.arch in arch.NEXTN_IN_TRUNK
    return max(0, shape.layers - (0 if inside else shape.nextn_layers))


def _keeping(shape: ModelShape, trunk: int, recurrent: Sequence[int]) -> list[int]:
    named = shape.arch
    if named in arch.ALL_RECURRENT:
        return []
    if named == "gemma3n":
        trunk = min(trunk, arch.GEMMA3N_KV_LAYERS)
    elif shape.shared_kv_layers:
        trunk = max(1, trunk - shape.shared_kv_layers)
    if named in arch.FEED_FORWARD_APART:
        return [il for il in range(trunk) if _at(shape.kv_heads, il) and not _at(shape.ff, il)]
    if named in arch.BOTH_IN_EACH:
        return list(range(trunk))
    stateful = frozenset(recurrent)
    return [il for il in range(trunk) if il not in stateful]


def _recurrent(shape: ModelShape, trunk: int) -> tuple[int, ...]:
    named, indices = shape.arch, range(trunk)
    if named in arch.ALL_RECURRENT or named in arch.BOTH_IN_EACH:
        return tuple(indices)
    if shape.recurrent_layers is not None:
        return tuple(il for il in indices if _at(shape.recurrent_layers, il))
    if named in arch.FEED_FORWARD_APART:
        return tuple(il for il in indices if not _at(shape.kv_heads, il) and not _at(shape.ff, il))
    if named in arch.ZERO_HEADS_RECUR:
        return tuple(il for il in indices if not _at(shape.kv_heads, il))
    if named in arch.INTERVAL or (shape.full_attention_interval and _keeps_state(shape)):
        every = shape.full_attention_interval or arch.FULL_ATTENTION_INTERVAL
        return tuple(il for il in indices if (il + 1) % every)
    return _recurrent_by_heads(shape, indices)


def _recurrent_by_heads(shape: ModelShape, indices: Sequence[int]) -> tuple[int, ...]:
    """An architecture that no table names: state where state is declared and heads are not."""
    if not _keeps_state(shape):
        return ()
    return tuple(il for il in indices if not _at(shape.kv_heads, il))


def _keeps_state(shape: ModelShape) -> bool:
    return bool(
        shape.ssm.inner_size or shape.shortconv_cache or shape.wkv_head_size or shape.kda_head_dim
    )


def _indexer(shape: ModelShape, trunk: int) -> tuple[int, ...]:
    if shape.arch not in arch.INDEXED or not shape.indexer_key_length:
        return ()
    if shape.indexer_full is None:
        return tuple(range(trunk))
    return tuple(il for il in range(trunk) if _at(shape.indexer_full, il))


def _at(values: Sequence[int] | Sequence[bool], index: int) -> int:
    return int(values[index]) if index < len(values) else 0
