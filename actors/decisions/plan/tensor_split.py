"""Whether and how a model is split tensor by tensor over all cards.

All amounts are bytes but the entries of a split, which are whole MiB: the server takes them as
proportions. Nothing shrinks to fit under this split, so an asked-for context is capped as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from attrs import evolve, frozen

from kvalet.actors.decisions.plan.devices import MIB, Budget, Gpu
from kvalet.actors.decisions.plan.draft_reserve import NO_DRAFTER, DraftReserve
from kvalet.actors.decisions.plan.quants import quantised
from kvalet.actors.decisions.plan.server_flags import ServerFlags

CTX_FLOOR: Final = 2048
UNSIZED_CTX: Final = 4096


def _nothing(_ctx: int) -> int:
    return 0


@frozen(kw_only=True)
class TensorLoad:
    """What one launch takes under a tensor split.

    ``reserve`` is each card's compute buffer; ``per_card(ctx)`` the part of it that grows.
    ``kv`` is None when the header does not tell; ``soft`` is counted once.
    """

    weights: int
    reserve: int
    kv: Callable[[int], int] | None
    per_card: Callable[[int], int] = _nothing
    draft: DraftReserve = NO_DRAFTER
    soft: int = 0

    @property
    def reserve_mib(self) -> int:
        """The reserve in whole MiB, rounded down as splits are."""
        return self.reserve // MIB

    def growing(self, ctx: int, cards: int) -> int:
        """KV, drafter and compute of all cards at this context."""
        kv = self.kv(ctx) if self.kv is not None else 0
        return kv + self.draft.growing(ctx) + cards * self.per_card(ctx)


@frozen
class TensorPlan:
    """``max_ctx`` is what would fit at most; ``split`` is None for equal shares."""

    ctx: int
    max_ctx: int
    cards: tuple[int, ...]
    split: tuple[int, ...] | None


@frozen
class Downgrade:
    """Tensor was asked for, and a layer split over as many cards is launched instead."""

    reason: Literal["gpu_count", "capacity"]
    min_gpus: int


def admitted(load: TensorLoad, gpus: Sequence[Gpu], budget: Budget) -> tuple[Gpu, ...]:
    """Cards whose usable memory, not just whose free memory, clears the reserve."""
    return tuple(gpu for gpu in gpus if budget.room(gpu) >= load.reserve_mib * MIB)


def tensor_or_layer(
    load: TensorLoad,
    gpus: Sequence[Gpu],
    budget: Budget,
    target: int,
    *,
    native: int | None = None,
) -> TensorPlan | Downgrade:
    """The plan, or why a layer split must do: too few cards, or no room for what cannot shrink."""
    cards = admitted(load, gpus, budget)
    if len(cards) < 2:
        return Downgrade("gpu_count", len(cards))
    if not clears_gate(load, cards, budget, target):
        return Downgrade("capacity", len(cards))
    return plan_tensor(load, gpus, budget, target, native=native)


def clears_gate(load: TensorLoad, cards: Sequence[Gpu], budget: Budget, ctx: int) -> bool:
    """Whether these cards hold the weights, their buffers, and the drafter at the floor."""
    draft = load.draft.growing(min(CTX_FLOOR, ctx)) + load.draft.flat_tensor
    return _shared(load, cards, budget) > load.weights + draft + load.soft


def plan_tensor(
    load: TensorLoad,
    gpus: Sequence[Gpu],
    budget: Budget,
    target: int,
    *,
    native: int | None = None,
) -> TensorPlan:
    """Context, cards and split. ``native`` is the model's own context, for the maximum.

    Total: with less than two cards, or no room, it gives floors; ``tensor_or_layer`` says
    whether to launch it.
    """
    cards = admitted(load, gpus, budget)
    indexes = tuple(sorted(gpu.index for gpu in cards))
    if len(cards) < 2:
        return TensorPlan(target, target, indexes, None)
    max_ctx = _fit(load, cards, budget, native or target)
    ctx = min(_fit(load, cards, budget, target), max_ctx)
    return TensorPlan(ctx, max_ctx, indexes, _split(load, cards, budget, ctx))


def _shared(load: TensorLoad, cards: Sequence[Gpu], budget: Budget) -> int:
    """Room of these cards beside their reserves."""
    return budget.pool(cards) - len(cards) * load.reserve_mib * MIB


def _fit(load: TensorLoad, cards: Sequence[Gpu], budget: Budget, wanted: int) -> int:
    """The largest context up to ``wanted``, to the token: the price itself rounds cells up."""
    if load.kv is None:
        return min(UNSIZED_CTX, wanted) or UNSIZED_CTX
    left = _shared(load, cards, budget) - load.weights - load.draft.flat_tensor - load.soft
    floor = min(CTX_FLOOR, wanted)
    if left <= 0:
        return floor
    if load.growing(wanted, len(cards)) <= left:
        return wanted
    below, above = floor, wanted
    while above - below > 1:
        middle = (below + above) // 2
        if load.growing(middle, len(cards)) <= left:
            below = middle
        else:
            above = middle
    return below


def _split(
    load: TensorLoad, cards: Sequence[Gpu], budget: Budget, ctx: int
) -> tuple[int, ...] | None:
    """Shares by room, only where equal ones overfill the smallest card: some models cannot
    be split unequally at all."""
    held = load.weights + load.growing(ctx, len(cards)) + load.draft.flat_tensor + load.soft
    rooms = [budget.room(gpu) for gpu in sorted(cards, key=lambda gpu: gpu.index)]
    if held <= (min(rooms) - load.reserve_mib * MIB) * len(cards):
        return None
    taken = load.reserve_mib + load.per_card(ctx) // MIB
    shares = tuple(max(0, (room - taken * MIB) // MIB) for room in rooms)
    return shares if sum(shares) else None


def tensor_attempt(asked: ServerFlags) -> ServerFlags:
    """The flags of a tensor launch: no quantised cache on either axis, where the server
    aborts, and no split but the one planned."""
    return evolve(
        asked,
        split_mode="tensor",
        tensor_split=(),
        type_k=_unquantised(asked.type_k),
        type_v=_unquantised(asked.type_v),
    )


def layer_again(asked: ServerFlags) -> ServerFlags:
    """The flags of a downgrade, or of the one retry of a tensor launch that did not come up.

    Made from what was asked, never from the attempt: cache types, drafter and split all come
    back, and only the mode is forced.
    """
    return evolve(asked, split_mode="layer")


def _unquantised(cache_type: str) -> str:
    return "f16" if quantised(cache_type) else cache_type
