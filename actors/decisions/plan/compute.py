"""Bytes of the compute and output buffers that the server reserves at start, by device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan import arch
from kvalet.actors.decisions.plan.graph_width import (
    F32,
    HOST_INDEX,
    STREAMS_OF_EMBD,
    device_width,
    flash_query,
    host_inputs,
    host_only_width,
    index_floats,
    rotation_bytes,
)
from kvalet.actors.decisions.plan.kept import ContextBytes
from kvalet.actors.decisions.plan.kv_cache import CacheTypes
from kvalet.actors.decisions.plan.placement import HOST, Placement
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.sizes import embeds

UNFITTED: Final = "no fitted form for this model with these flags"

STAGED: Final = 2
"""Weights of the host that are on a device at once, at most."""

COPIES: Final = 3
"""Input copies that a pipeline over several devices keeps beyond the first."""

PIPELINE_STATE: Final = (5, 2)
"""What a recurrent graph may take on each device of a pipeline, over what it takes on one."""


@frozen(kw_only=True)
class ComputeBytes:
    """Compute buffers by device, and the output buffer on the host. ``known`` is False where
    no rule is known to hold: the figures then err on the large side, and ``why`` says so."""

    per_device: Mapping[str, int]
    output: int
    known: bool = True
    why: str = ""


def compute_bytes(
    shape: ModelShape,
    context: ContextBytes,
    flags: ServerFlags,
    types: CacheTypes,
    placement: Placement,
    *,
    staged: int = 0,
) -> ComputeBytes:
    """Buffers of one context; ``staged`` is the largest weight that stays on the host while a
    device computes, in bytes."""
    graph = _Graph(shape, context, types)
    output = output_bytes(shape, context, flags)
    used = [device.name for device in placement.devices if placement.uses(device.name)]
    if not used:
        whole, known = graph.alone()
        return ComputeBytes(
            per_device={HOST: whole}, output=output, known=known, why="" if known else UNFITTED
        )
    held = Counter({HOST: graph.host(), used[0]: graph.device(cuda=used[0] in placement.cuda)})
    if not placement.all_on_devices:
        _stage(held, graph, used, staged)
    if not placement.kv_offload:
        _fetch(held, graph, used, staged)
    if len(used) > 1:
        _pipeline(held, graph, used, placement)
    why = _doubt(graph, used, placement)
    return ComputeBytes(per_device=dict(held), output=output, known=not why, why=why)


def _doubt(graph: _Graph, used: list[str], placement: Placement) -> str:
    """Why no rule is known to hold; empty when one is."""
    if not placement.all_on_devices:
        return "weights are staged from the host"
    if not placement.kv_offload:
        return "caches are read from the host"
    shape, context = graph.shape, graph.context
    crossing = context.state.bytes or shares_caches(shape) or shape.arch in arch.NO_MEMORY
    if len(used) > 1 and crossing:
        return "state or shared caches in a pipeline"
    if context.layers.latent and graph.converting(cuda=used[0] in placement.cuda):
        return "latent keys are converted"
    return "" if graph.known else UNFITTED


def output_bytes(shape: ModelShape, context: ContextBytes, flags: ServerFlags) -> int:
    """Logits of one token of each slot, and its embedding where embeddings are served."""
    row = (shape.vocab or 0) + ((shape.embd or 0) if embeds(flags) else 0)
    return F32 * row * context.sizes.slots


@frozen
class _Graph:
    shape: ModelShape
    context: ContextBytes
    types: CacheTypes

    @property
    def embd(self) -> int:
        return self.shape.embd or 0

    def alone(self) -> tuple[int, bool]:
        """The whole graph on the host, and whether a rule for it is known."""
        width = host_only_width(self.shape, self.context, self.types)
        floats = STREAMS_OF_EMBD * self.embd + width.floats + self.index
        wide = max(self.tokens(floats), self.converting(cuda=False) + self.tokens(self.embd))
        return self.masks + self.rotation + wide, width.known and not self.embedded

    @property
    def embedded(self) -> bool:
        """Whether this is the graph of next-token layers alone."""
        layers, trunk = self.context.layers.attention, self.shape.layers - self.shape.nextn_layers
        return bool(layers) and self.shape.nextn_layers > 0 and layers[0].index >= trunk

    @property
    def known(self) -> bool:
        return not self.embedded and device_width(self.shape, self.context, self.types).known

    @property
    def masks(self) -> int:
        """Masks of all caches: f16 with flash attention, f32 without."""
        size = 2 if self.types.flash else F32
        cells = sum(cache.cells for cache in self.context.caches if cache.kind != "indexer")
        if self.shape.arch in arch.NO_MEMORY:
            cells = self.context.sizes.ubatch
        return size * self.context.sizes.ubatch * cells

    @property
    def rotation(self) -> int:
        return rotation_bytes(self.context, self.types)

    def tokens(self, floats: int) -> int:
        return F32 * self.context.sizes.ubatch * floats

    def host(self) -> int:
        """Inputs that the host prepares for a device."""
        floats = STREAMS_OF_EMBD * self.embd + host_inputs(self.shape)
        floats += self.index + HOST_INDEX
        return self.masks + self.rotation + self.tokens(floats)

    @property
    def index(self) -> int:
        return index_floats(self.context, flash=self.types.flash)

    def device(self, *, cuda: bool, first: bool = True) -> int:
        """The whole graph on one device; leading dense layers lie on the first one."""
        width = device_width(self.shape, self.context, self.types, dense=first).floats
        wide = self.tokens(STREAMS_OF_EMBD * self.embd + width)
        wide = max(wide, self.converting(cuda=cuda))
        return self.masks + self.rotation + wide + self.tokens(self.index)

    def layer_copy(self, *, converted: bool, cuda: bool = False) -> int:
        """The largest layer's keys and values in f16; with ``converted`` only those axes that
        attention needs in f16 first: f32 everywhere, any other type on CUDA."""
        layers = self.context.layers
        keys = values = 0
        for cache in self.context.caches:
            swa = cache.kind == "swa"
            group = layers.windowed if swa else layers.whole
            cells = 2 * cache.cells * cache.streams
            for layer in group:
                keys = max(keys, cells * layer.heads * layer.key)
                values = max(values, cells * layer.heads * layer.value)
        if not converted:
            return keys + values
        axes = ((self.types.keys, keys), (self.types.values, values))
        return sum(
            size
            for kind, size in axes
            if (kind != "f16" if cuda else kind == "f32") and kind != "bf16"
        )

    def shared_copies(self) -> int:
        """Caches that later layers read from an earlier device, in f16, once each."""
        layers = self.shape.layers - self.shape.nextn_layers
        if not shares_caches(self.shape):
            return 0
        shared = layers - len(self.context.layers.attention)
        return self.layer_copy(converted=False) * shared

    def converting(self, *, cuda: bool) -> int:
        """The stage in which a cache is copied to f16; 0 where none is."""
        copied = self.layer_copy(converted=True, cuda=cuda)
        if not copied or not self.types.flash:
            return 0
        query = flash_query(self.shape, self.context, self.types)
        if self.context.layers.latent:
            query, copied = 5 * query // 8, 3 * copied
        return self.tokens(STREAMS_OF_EMBD * self.embd + query) + copied


def shares_caches(shape: ModelShape) -> bool:
    """Whether the last layers read the caches of earlier ones."""
    return bool(shape.shared_kv_layers) or shape.arch == "gemma3n"


def _stage(held: Counter[str], graph: _Graph, used: list[str], staged: int) -> None:
    """Up to two weights at a time pass through the first device; a recurrent layer that stays on
    the host has its graph there."""
    held[used[0]] += STAGED * staged + graph.tokens(graph.shape.experts_used * graph.embd)
    if graph.context.state.layers:
        held[HOST] += STAGED * staged + graph.device(cuda=False)


def _fetch(held: Counter[str], graph: _Graph, used: list[str], staged: int) -> None:
    """One layer's cache at a time passes through the device that computes it."""
    copies = 2 if graph.context.layers.latent else 1
    held[used[0]] += copies * graph.layer_copy(converted=False) + graph.shared_copies()
    if graph.context.state.layers:
        held[used[0]] += graph.context.state.layer_bytes
        held[HOST] += STAGED * staged + graph.device(cuda=False)


def _pipeline(held: Counter[str], graph: _Graph, used: list[str], placement: Placement) -> None:
    host = held[HOST]
    up, down = PIPELINE_STATE if graph.context.state.bytes else (1, 1)
    wide = flash_query(graph.shape, graph.context, graph.types) > graph.embd
    crossing = graph.tokens(graph.embd) if wide or not graph.context.layers.attention else 0
    shared = (1 + COPIES) * graph.shared_copies()
    for name in used[1:]:
        alone = graph.device(cuda=name in placement.cuda, first=False) * up // down
        held[name] = alone + COPIES * (graph.masks + graph.tokens(graph.embd)) + crossing + shared
    held[used[0]] = held[used[0]] * up // down + COPIES * host + crossing + shared
    inputs = graph.masks + graph.tokens(2 * graph.embd + graph.index + HOST_INDEX)
    held[HOST] = host + COPIES * inputs
