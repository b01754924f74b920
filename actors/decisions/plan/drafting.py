"""The context of a drafter beside the target's: embedded layers, or a second model."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from kvalet.actors.decisions.plan import arch
from kvalet.actors.decisions.plan.kept import ContextBytes, allocated
from kvalet.actors.decisions.plan.kv_cache import CacheTypes, caches_of
from kvalet.actors.decisions.plan.layers import Hint, layers_of, nextn_layers_of
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.sizes import Sizes, draft_sizes

MTP: Final = "draft-mtp"


def embedded(shape: ModelShape, flags: ServerFlags) -> bool:
    """Whether the target's own next-token layers draft in this launch."""
    return MTP in flags.spec_types and shape.nextn_layers > 0 and not flags.draft_model


def draft_types(flags: ServerFlags) -> CacheTypes:
    """Types of a draft context: its own flags, f16 whatever the target has."""
    flash = flags.flash_attn != "off"
    return CacheTypes(keys=flags.draft_type_k, values=flags.draft_type_v, flash=flash)


def draft_context(
    shape: ModelShape,
    flags: ServerFlags,
    target: Sizes,
    drafter: ModelShape | None = None,
    *,
    hint: Hint | None = None,
) -> ContextBytes | None:
    """The draft context of this launch; None when nothing drafts with a cache of its own.

    ``drafter`` is the separate model that the launch names, and ``hint`` the one of the model
    that drafts. Raises ConfigFault where the server would refuse to start.
    """
    if drafter is not None:
        return _separate(drafter, flags, target, hint)
    if not embedded(shape, flags):
        return None
    layers = nextn_layers_of(shape, hint)
    return allocated(shape, layers, draft_sizes(shape, flags, target), draft_types(flags), flags)


def _separate(
    drafter: ModelShape, flags: ServerFlags, target: Sizes, hint: Hint | None
) -> ContextBytes:
    size = draft_sizes(drafter, flags, target)
    if drafter.arch in arch.SHARES_TARGET_CACHE:
        layers = layers_of(evolve(drafter, nextn_layers=0, shared_kv_layers=0), hint)
        whole = caches_of(drafter, layers, size, draft_types(flags), swa_full=flags.swa_full)
        views = tuple(evolve(cache, layers=()) for cache in whole)
        return ContextBytes(sizes=size, layers=layers, caches=views)
    layers = layers_of(drafter, hint)
    return allocated(drafter, layers, size, draft_types(flags), flags)
