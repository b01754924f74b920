"""All bytes that one context keeps between requests: caches and state, and where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal

from attrs import evolve, field, frozen

from kvalet.actors.decisions.plan import arch
from kvalet.actors.decisions.plan.closed_form import closed_form
from kvalet.actors.decisions.plan.kv_cache import Cache, CacheTypes, Kind, caches_of, refusal
from kvalet.actors.decisions.plan.layers import Hint, Layers, layers_of
from kvalet.actors.decisions.plan.placement import Placement
from kvalet.actors.decisions.plan.recurrent import State, state_of
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.sizes import Sizes, sizes
from kvalet.actors.decisions.plan.speculation import draft_max_of
from kvalet.protocol.errors import ConfigFault

Rules = Literal["b11434", "legacy", "larger"]

MODEL_DRAFTERS: Final = frozenset({"draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"})
"""Kinds of drafting that need the state to roll back."""


NGRAM_AHEAD: Final = {
    "ngram-simple": 48,
    "ngram-map-k": 48,
    "ngram-map-k4v": 48,
    "ngram-mod": 64,
    "ngram-cache": 8,
}
"""Tokens that drafting from the text itself proposes at most, by the server's defaults."""


@frozen(kw_only=True)
class ContextBytes:
    """What one context allocates. ``rules`` names the rules that gave these figures."""

    sizes: Sizes
    layers: Layers
    caches: tuple[Cache, ...] = ()
    state: State = field(factory=State)
    rules: Literal["b11434", "legacy"] = "b11434"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the attention caches."""
        return sum(cache.bytes for cache in self.caches)

    @property
    def bytes(self) -> int:
        """Bytes in all, without a device's padding."""
        return self.kv_bytes + self.state.bytes

    def of_kind(self, kind: Kind) -> int:
        """Bytes of the caches of one kind."""
        return sum(cache.bytes for cache in self.caches if cache.kind == kind)

    def per_device(self, placement: Placement) -> Mapping[str, int]:
        """Bytes on each device, padding included; devices that hold nothing are left out."""
        return self.caches_per_device(placement) + self.state_per_device(placement)

    def caches_per_device(self, placement: Placement) -> Counter[str]:
        """The part of ``per_device`` that the caches take."""
        held = Counter[str]()
        for cache in self.caches:
            for layer in cache.layers:
                device = placement.cache(layer.index)
                held[device] += layer.on(cuda=device in placement.cuda)
        return held

    def state_per_device(self, placement: Placement) -> Counter[str]:
        """The part of ``per_device`` that recurrent state takes."""
        held = Counter[str]()
        for index in self.state.layers:
            held[placement.cache(index)] += self.state.layer_bytes
        return held


def target_sizes(shape: ModelShape, flags: ServerFlags) -> Sizes:
    """The sizes of the target's context, with what drafting adds to them."""
    return sizes(shape, flags, drafted=drafted(flags), snapshots=snapshots(shape, flags))


def drafted(flags: ServerFlags) -> int:
    """Tokens drafted ahead at most, by the longest kind of drafting that is on."""
    by_model = max(0, draft_max_of(flags))
    ahead = (
        by_model if kind.startswith("draft-") else NGRAM_AHEAD.get(kind, 0)
        for kind in flags.spec_types
    )
    return max(ahead, default=0)


def snapshots(shape: ModelShape, flags: ServerFlags) -> int:
    """Copies of the state that each slot keeps to take rejected drafts back."""
    if shape.arch not in arch.ROLLS_BACK or not MODEL_DRAFTERS.intersection(flags.spec_types):
        return 0
    return max(0, draft_max_of(flags))


def cache_types(flags: ServerFlags) -> CacheTypes:
    """Types of the target's caches."""
    return CacheTypes(keys=flags.type_k, values=flags.type_v, flash=flags.flash_attn != "off")


def context_bytes(
    shape: ModelShape,
    flags: ServerFlags,
    *,
    rules: Rules = "b11434",
    hint: Hint | None = None,
) -> ContextBytes:
    """Bytes of the target's context under ``rules``; "larger" is for a build that is not known.

    Raises ConfigFault where the server would refuse to start.
    """
    layers = layers_of(shape, hint)
    exact = allocated(shape, layers, target_sizes(shape, flags), cache_types(flags), flags)
    if rules == "b11434":
        return exact
    legacy = evolve(
        exact,
        caches=closed_form(shape, layers, exact.sizes, cache_types(flags), flags),
        rules="legacy",
    )
    if rules == "legacy":
        return evolve(legacy, state=State())
    return legacy if legacy.bytes > exact.bytes else exact


def allocated(
    shape: ModelShape, layers: Layers, size: Sizes, types: CacheTypes, flags: ServerFlags
) -> ContextBytes:
    """What ``layers`` allocate at ``size``. Raises ConfigFault where the server would refuse."""
    refused = refusal(layers, types)
    if refused is not None:
        raise ConfigFault(refused)
    return ContextBytes(
        sizes=size,
        layers=layers,
        caches=caches_of(shape, layers, size, types, swa_full=flags.swa_full),
        state=state_of(shape, layers.recurrent, rows=size.slots * (1 + size.snapshots)),
    )
