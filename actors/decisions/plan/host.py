"""Host memory that a server fills while it serves: checkpoints and its prompt cache."""

from __future__ import annotations

from attrs import frozen

from kvalet.actors.decisions.plan.devices import MIB
from kvalet.actors.decisions.plan.kept import ContextBytes
from kvalet.actors.decisions.plan.server_flags import ServerFlags


@frozen(kw_only=True)
class HostBytes:
    """Upper bounds, none of it reserved at start. ``prompt_cache`` None: no bound."""

    checkpoint: int = 0
    checkpoints: int = 0
    prompt_cache: int | None = 0

    @property
    def bytes(self) -> int:
        """What is bounded, in all."""
        return self.checkpoints + (self.prompt_cache or 0)


def host_bytes(
    target: ContextBytes, flags: ServerFlags, draft: ContextBytes | None = None
) -> HostBytes:
    """Checkpoints of all slots at their largest, and the prompt cache.

    A checkpoint holds one window of each windowed layer, one row of state, and with a drafter
    its cells of a full slot; only contexts that cannot cut a prefix short take any.
    """
    rows = max(1, target.state.rows)
    state = target.state.bytes // rows
    window = 0 if flags.swa_full else _window_bytes(target)
    one = state + window
    if one and draft is not None:
        one += draft.kv_bytes * draft.sizes.ctx_slot // max(1, draft.sizes.ctx)
    return HostBytes(
        checkpoint=one,
        checkpoints=one * flags.checkpoints * target.sizes.slots,
        prompt_cache=None if flags.cache_ram_mib < 0 else flags.cache_ram_mib * MIB,
    )


def _window_bytes(target: ContextBytes) -> int:
    held = min(target.layers.window, target.sizes.ctx_slot)
    return sum(
        cache.bytes // (cache.cells * cache.streams) * held
        for cache in target.caches
        if cache.kind == "swa" and cache.cells
    )
