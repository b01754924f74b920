"""The older closed form of cache bytes: for builds whose own rules are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvalet.actors.decisions.plan.kv_cache import Cache, CacheTypes, Kind, LayerBytes
from kvalet.actors.decisions.plan.layers import KvLayer, Layers, kv_layer
from kvalet.actors.decisions.plan.quants import row_bytes
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.sizes import Sizes, asked_cells

WINDOWS_HELD: Final = 2


def closed_form(
    shape: ModelShape, layers: Layers, sizes: Sizes, types: CacheTypes, flags: ServerFlags
) -> tuple[Cache, ...]:
    """One pool of the asked cells for layers that see everything, two windows of each slot for
    the others. Unification changes nothing here, and recurrent state is not counted."""
    cells = asked_cells(shape, flags)
    kept = _kept(shape, layers)
    whole = [layer for layer in kept if not layer.windowed]
    windowed = [layer for layer in kept if layer.windowed]
    share = cells // sizes.slots
    held = share if flags.swa_full else min(WINDOWS_HELD * layers.window, cells, share)
    found = (
        _cache("non_swa", whole, cells, 1, types),
        _cache("swa", windowed, held, sizes.slots, types),
    )
    return tuple(cache for cache in found if cache.layers)


def _kept(shape: ModelShape, layers: Layers) -> Sequence[KvLayer]:
    if layers.path == "mla":
        latent = (shape.kv_lora_rank or 0) + (shape.rope_dims or 0)
        count = max(1, shape.layers - shape.shared_kv_layers)
        row = latent if shape.rope_dims else shape.key_length or latent
        return [KvLayer(index=il, heads=1, key=row, value=0, windowed=False) for il in range(count)]
    if layers.path == "hybrid":
        every = shape.full_attention_interval or 1
        return [
            kv_layer(shape, il, windowed=False)
            for il in range(shape.layers)
            if (il + 1) % every == 0
        ]
    swa = {layer.index for layer in layers.windowed}
    owned = max(1, shape.layers - shape.shared_kv_layers)
    return [kv_layer(shape, il, windowed=il in swa) for il in range(owned)]


def _cache(
    kind: Kind, layers: Sequence[KvLayer], cells: int, streams: int, types: CacheTypes
) -> Cache:
    return Cache(
        kind=kind,
        cells=cells,
        streams=streams,
        layers=tuple(
            LayerBytes(
                index=layer.index,
                keys=cells * streams * row_bytes(types.keys, layer.heads * layer.key),
                values=cells * streams * row_bytes(types.values, layer.heads * layer.value),
            )
            for layer in layers
        ),
    )
