"""Cells and bytes of the attention caches of one context, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from kvalet.actors.decisions.plan.layers import KvLayer, Layers
from kvalet.actors.decisions.plan.quants import block_of, cuda_padding, quantised, row_bytes
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.sizes import Sizes, padded

Kind = Literal["non_swa", "swa", "indexer"]


@frozen(kw_only=True)
class LayerBytes:
    """Bytes of one layer's keys and values in all streams; ``padding`` is what CUDA adds."""

    index: int
    keys: int
    values: int
    padding: int = 0

    def on(self, *, cuda: bool) -> int:
        """Bytes of this layer on a device."""
        return self.keys + self.values + (self.padding if cuda else 0)


@frozen(kw_only=True)
class Cache:
    """One cache: so many cells in each of its streams."""

    kind: Kind
    cells: int
    streams: int
    layers: tuple[LayerBytes, ...]

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys."""
        return sum(layer.keys for layer in self.layers)

    @property
    def value_bytes(self) -> int:
        """Bytes of all values."""
        return sum(layer.values for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes of the cache, without a device's padding."""
        return self.key_bytes + self.value_bytes


@frozen(kw_only=True)
class CacheTypes:
    """Element types of keys and values, and whether flash attention is on."""

    keys: str = "f16"
    values: str = "f16"
    flash: bool = True


def swa_cells(window: int, sizes: Sizes, *, full: bool) -> int:
    """Cells of one stream of a windowed cache; ``full`` is the server's ``--swa-full``."""
    if full:
        return sizes.ctx_seq
    sequences = sizes.slots if sizes.unified else 1
    return padded(min(sizes.ctx_seq, window * sequences + sizes.ubatch))


def caches_of(
    shape: ModelShape, layers: Layers, sizes: Sizes, types: CacheTypes, *, swa_full: bool
) -> tuple[Cache, ...]:
    """The caches of one context; those without layers are left out.

    Without flash attention the values lie transposed, and each layer's row is as wide as the
    widest of the model, whichever context that one belongs to.
    """
    widest = 0 if types.flash else layers.value_row
    found = [_cache("non_swa", layers.whole, sizes.ctx_seq, sizes, types, widest)]
    if layers.windowed:
        cells = swa_cells(layers.window, sizes, full=swa_full)
        found.append(_cache("swa", layers.windowed, cells, sizes, types, widest))
    if layers.indexer:
        width = shape.indexer_key_length or 0
        rows = tuple(
            KvLayer(index=il, heads=1, key=width, value=0, windowed=False) for il in layers.indexer
        )
        found.append(_cache("indexer", rows, sizes.ctx_seq, sizes, types, 0))
    return tuple(cache for cache in found if cache.layers)


def refusal(layers: Layers, types: CacheTypes) -> str | None:
    """Why the server would not start with ``types``; None when it would."""
    if layers.latent and types.keys != types.values:
        return f"this model needs one cache type, not keys {types.keys} and values {types.values}"
    if not types.flash:
        if quantised(types.values):
            return f"values of type {types.values} need flash attention"
        return None
    for name, kind, lengths in (
        ("keys", types.keys, [layer.key for layer in layers.attention]),
        ("values", types.values, [layer.value for layer in layers.attention]),
    ):
        odd = next((length for length in lengths if length % block_of(kind)), None)
        if odd is not None:
            return f"{name} of type {kind} need heads of whole blocks, not {odd} elements"
    return None


def _cache(
    kind: Kind,
    layers: Sequence[KvLayer],
    cells: int,
    sizes: Sizes,
    types: CacheTypes,
    widest: int,
) -> Cache:
    count = cells * sizes.streams
    return Cache(
        kind=kind,
        cells=cells,
        streams=sizes.streams,
        layers=tuple(_layer_bytes(layer, count, types, widest) for layer in layers),
    )


def _layer_bytes(layer: KvLayer, cells: int, types: CacheTypes, widest: int) -> LayerBytes:
    key_row = layer.heads * layer.key
    value_row = max(layer.heads * layer.value, widest if layer.value else 0)
    padding = cuda_padding(types.keys, key_row) + cuda_padding(types.values, value_row)
    return LayerBytes(
        index=layer.index,
        keys=cells * row_bytes(types.keys, key_row),
        values=cells * row_bytes(types.values, value_row),
        padding=padding,
    )
