"""How wide a graph is at its widest: floats that one token of a micro-batch needs at once.

The forms were fitted to buffers that build b11434 reserved; a width is in f32 elements and does
not count masks. What an architecture adds to the common form stands in the tables below.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan import arch
from kvalet.actors.decisions.plan.kept import ContextBytes
from kvalet.actors.decisions.plan.kv_cache import CacheTypes
from kvalet.actors.decisions.plan.quants import quantised
from kvalet.actors.decisions.plan.recurrent import state_row
from kvalet.actors.decisions.plan.shape import ModelShape

STREAMS_OF_EMBD: Final = 4
"""Embedding-wide tensors alive at the widest point of the common form."""

ONE_MORE_EMBD: Final = frozenset(
    {"cohere2", "cohere2moe", "llama4", "smallthinker", "step35", "afmoe", "mimo2", "gemma3n"}
)
ROTATED_QUERY_EMBD: Final = frozenset({"gemma2", "gemma3"})
GATED_QUERY: Final = arch.INTERVAL
RWKV_EMBDS: Final = 15
DELTA_NET_INNER: Final = 7
ENCODER_EMBDS: Final = {True: 6, False: 5}
ENCODER_EMBDS_HOST: Final = {True: 9, False: 7}
"""By whether flash attention is on."""

PER_LAYER_EMBDS: Final = 4
PLAIN_MORE_EMBDS: Final = {"gemma4": 2, "gemma3n": 3}
WIDE_MASK: Final = frozenset({"afmoe"})
WIDE_MASK_EMBDS: Final = 3
HOST_WITHOUT_EMBD: Final = frozenset({"smallthinker"})
SELECTIVE_SCAN: Final = frozenset({"mamba"})
DELTA_NET: Final = arch.INTERVAL
MOE_SCATTER: Final = frozenset({"nemotron_h_moe"})

INDEX: Final = 3
HOST_INDEX: Final = 2
ROTATION: Final = 64
F32: Final = 4


@frozen
class Width:
    """Floats a token; ``known`` is False where the figure is a bound and not a fit."""

    floats: int
    known: bool = True


def device_width(
    shape: ModelShape, context: ContextBytes, types: CacheTypes, *, dense: bool = True
) -> Width:
    """The graph on a device that computes everything, above the four embedding-wide tensors;
    ``dense`` is False where the leading dense layers lie on another device."""
    if shape.arch in arch.NO_MEMORY:
        return _encoder_width(shape, context, types, ENCODER_EMBDS[types.flash])
    forward = _forward(shape, dense=dense)
    if shape.arch in ROTATED_QUERY_EMBD and (quantised(types.keys) or quantised(types.values)):
        forward += shape.embd or 0
    return _widest(shape, context, types, forward)


def _forward(shape: ModelShape, *, dense: bool) -> int:
    forward = feed_forward(shape, dense=dense) + _per_layer_inputs(shape)
    return forward + (PER_LAYER_EMBDS * (shape.embd or 0) if shape.embd_per_layer else 0)


def _widest(shape: ModelShape, context: ContextBytes, types: CacheTypes, forward: int) -> Width:
    """The widest of the stages of a graph whose feed-forward is ``forward`` wide."""
    if context.layers.latent:
        forward = max(forward, _latent(shape))
    state = state_stage(shape, context)
    widest = max(forward, state.floats, _logits(shape, context))
    if not types.flash:
        widest = max(widest, plain_attention(shape, context, types))
    known = state.known or state.floats < forward
    if _wide_mask(shape, context):
        return Width(widest + WIDE_MASK_EMBDS * (shape.embd or 0), False)
    return Width(widest, known)


def host_only_width(shape: ModelShape, context: ContextBytes, types: CacheTypes) -> Width:
    """The same graph when no device takes part: the embedding look-up joins it."""
    embd = shape.embd or 0
    if shape.arch in arch.NO_MEMORY:
        return _encoder_width(shape, context, types, ENCODER_EMBDS_HOST[types.flash])
    forward = _host_forward(shape)
    width = _widest(shape, context, types, forward)
    if shape.arch in SELECTIVE_SCAN:
        row, inner = _state_floats(shape, context), shape.ssm.inner_size or 0
        return Width(5 * inner + embd + row[0] + row[1], width.known)
    floats = (
        width.floats + (0 if types.flash and shape.arch in HOST_WITHOUT_EMBD else embd) + HOST_INDEX
    )
    if context.caches and types.flash and _unevenly_placed(shape, context, types):
        return Width(floats + embd, False)
    return Width(floats, width.known)


def _unevenly_placed(shape: ModelShape, context: ContextBytes, types: CacheTypes) -> bool:
    """Whether casts of the caches may keep one more tensor alive than the common form has."""
    if "f32" in (types.keys, types.values):
        return True
    odd = shape.experts_used or context.state.layers or shape.arch in ONE_MORE_EMBD
    return types.keys != types.values and bool(odd)


def _host_forward(shape: ModelShape) -> int:
    inputs = _per_layer_inputs(shape)
    if shape.arch == "gemma3n":
        return feed_forward(shape) + 2 * inputs
    return feed_forward(shape) + inputs


def host_inputs(shape: ModelShape) -> int:
    """What the host keeps for the devices, above the four embedding-wide tensors."""
    extra = _per_layer_inputs(shape) + (shape.embd or 0 if shape.embd_per_layer else 0)
    return extra + (shape.embd or 0 if shape.arch in arch.NO_MEMORY else 0)


def index_floats(context: ContextBytes, *, flash: bool = True) -> int:
    """Positions, row numbers and output numbers of one token. Without flash attention each
    element of a row of values has a number of its own."""
    each = 2 if context.layers.latent else 4
    if not flash and context.caches and not context.layers.latent:
        each = 2 + 2 * context.layers.value_row
    return INDEX + each * max(1, len(context.caches))


def feed_forward(shape: ModelShape, *, dense: bool = True) -> int:
    """The widest feed-forward block, of experts or dense (if ``dense`` ones count)."""
    embd, wide = shape.embd or 0, max(shape.ff, default=0)
    more = embd if shape.arch in ONE_MORE_EMBD else 0
    more += STREAMS_OF_EMBD * embd if shape.arch in arch.SHARES_TARGET_CACHE else 0
    if shape.arch in arch.FEED_FORWARD_APART and not shape.experts:
        return 2 * wide + embd
    if not shape.experts_used:
        return 3 * wide + more
    expert = shape.expert_ff or wide
    if shape.arch in MOE_SCATTER:
        return embd + shape.experts_used * (embd + expert)
    routed = 3 * shape.experts_used * expert
    routed += shape.experts_used * embd if embd > 2 * expert else 0
    mixed = shape.moe_every > 1 or (dense and shape.leading_dense)
    return max(routed, 3 * wide if mixed else 0) + more


def plain_attention(shape: ModelShape, context: ContextBytes, types: CacheTypes) -> int:
    """Attention without flash: every head's scores over the largest cache."""
    embd, heads = shape.embd or 0, max(shape.heads, default=0)
    cells = max((cache.cells for cache in context.caches), default=0)
    if not cells:
        return 0
    if context.layers.latent:
        return heads * cells + _latent(shape)
    query = flash_query(shape, context, types)
    query += PLAIN_MORE_EMBDS.get(shape.arch, 0) * embd
    return heads * cells + query + _per_layer_inputs(shape)


def flash_query(shape: ModelShape, context: ContextBytes, types: CacheTypes) -> int:
    """Queries that are alive while a device converts a cache to f16."""
    key = max((layer.key for layer in context.layers.attention), default=0)
    query = max(shape.heads, default=0) * key
    gates = 0 if shape.arch not in GATED_QUERY else 1 if types.keys == "f16" else 2
    return _query(query, shape.embd or 0) + gates * query


def rotation_bytes(context: ContextBytes, types: CacheTypes) -> int:
    """Rotation matrices of quantised keys and values, one pair a cache, whatever the batch."""
    if context.layers.latent:
        return 0
    total = 0
    for group in (context.layers.whole, context.layers.windowed):
        if group:
            total += _matrix(group[0].key, largest=True) if quantised(types.keys) else 0
            total += _matrix(group[0].value, largest=False) if quantised(types.values) else 0
    return total


def state_stage(shape: ModelShape, context: ContextBytes) -> Width:
    """A recurrent layer with the rows of all slots in the graph; 0 wide without such layers."""
    if not context.state.layers:
        return Width(0)
    summed, rolling = _state_floats(shape, context)
    embd, inner = shape.embd or 0, shape.ssm.inner_size or 0
    if shape.wkv_head_size:
        late = embd if 2 * summed > embd else 0
        return Width(RWKV_EMBDS * embd + summed + late, summed <= embd)
    if not inner:
        return Width(0)
    if shape.arch in SELECTIVE_SCAN or not shape.ssm.group_count:
        step = shape.ssm.time_step_rank or 0
        return Width(4 * inner + 2 * step + 2 * (shape.ssm.state_size or 0) + summed)
    if shape.arch in DELTA_NET:
        return _delta_net(context, inner, summed, rolling)
    return _grouped_scan(shape, inner, summed, rolling)


def _delta_net(context: ContextBytes, inner: int, summed: int, rolling: int) -> Width:
    """Rows of the state count only once they are twice as wide as the layer itself."""
    rows = summed * (1 + context.sizes.snapshots)
    if rows < 2 * inner:
        return Width(0)
    return Width(DELTA_NET_INNER * inner + rows + rolling, not context.sizes.snapshots)


def _grouped_scan(shape: ModelShape, inner: int, summed: int, rolling: int) -> Width:
    groups = shape.ssm.group_count * (shape.ssm.state_size or 0)
    conv = inner + 2 * groups
    project = inner + conv + (shape.ssm.time_step_rank or 0)
    base = project + 2 * conv + inner
    scattered = 2 * (shape.embd or 0) if shape.arch in MOE_SCATTER else 0
    narrow = base + summed + rolling
    crowded = base - 9 * inner // 4 + 3 * summed + rolling
    late = summed >= inner
    if shape.arch in arch.BOTH_IN_EACH:
        sparse = 2 * summed < inner
        beside = feed_forward(shape) + 2 * project if sparse else 0
        return Width(max(narrow, crowded + 2 * project if late else 0, beside), False)
    fits = summed <= 2 * inner
    return Width(max(narrow, crowded) + (scattered if late else 0), fits)


def _state_floats(shape: ModelShape, context: ContextBytes) -> tuple[int, int]:
    """Summed and rolling state of all slots, spread over the tokens of a micro-batch."""
    row, sizes = state_row(shape), context.sizes
    return (
        -(-sizes.slots * row.summed // sizes.ubatch),
        -(-sizes.slots * row.rolling // sizes.ubatch),
    )


def _encoder_width(
    shape: ModelShape, context: ContextBytes, types: CacheTypes, embds: int
) -> Width:
    """Above the four that are counted apart; without flash attention the scores of a batch."""
    embd = shape.embd or 0
    if types.flash:
        return Width((embds - STREAMS_OF_EMBD) * embd)
    scores = max(shape.heads, default=0) * context.sizes.ubatch
    return Width((embds - STREAMS_OF_EMBD) * embd + scores)


def _latent(shape: ModelShape) -> int:
    lengths = 2 * (shape.key_length or 0) + (shape.key_length_mla or 0)
    return max(shape.heads, default=0) * lengths


def _per_layer_inputs(shape: ModelShape) -> int:
    return shape.layers * (shape.embd_per_layer or 0)


def _logits(shape: ModelShape, context: ContextBytes) -> int:
    sizes = context.sizes
    rows = min(sizes.outputs, sizes.ubatch)
    return -(-rows * (shape.vocab or 0) // sizes.ubatch)


def _wide_mask(shape: ModelShape, context: ContextBytes) -> bool:
    """Whether the window's mask alone is as wide as the tensors of a layer."""
    cells = next((cache.cells for cache in context.caches if cache.kind == "swa"), 0)
    return shape.arch in WIDE_MASK and cells >= 2 * STREAMS_OF_EMBD * (shape.embd or 0)


def _query(query: int, embd: int) -> int:
    return 2 * query if query > embd else query


def _matrix(length: int, *, largest: bool) -> int:
    """Bytes of one square rotation: 64 wide, for keys the largest power of two that fits."""
    if not length or length % ROTATION:
        return 0
    side = ROTATION
    while largest and length % (2 * side) == 0:
        side *= 2
    return side * side * F32
