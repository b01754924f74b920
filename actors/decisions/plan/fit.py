"""The search for the largest context that fits, and the cards to put it on.

A ``Load`` prices one launch; nothing here knows why it costs what it does. All amounts are
bytes. Prices must not fall as the context grows: then more memory never yields less context,
and a dearer launch (more slots, say) never more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan.devices import (
    MIB,
    Budget,
    Gpu,
    fewest_cards,
    ranked,
    select_gpus,
)
from kvalet.actors.decisions.plan.overheads import EXTRA_CARD

CTX_MIN: Final = 4096
CTX_STEP: Final = 256
HOST_CTX: Final = 8192
"""The pool of a launch without cards that nobody has named another for."""
HOST_MARGIN: Final = 2048 * MIB


def _nothing(_ctx: int, _cards: int) -> int:
    return 0


def _anywhere(_ctx: int, _cards: Sequence[Gpu]) -> bool:
    return True


@frozen(kw_only=True)
class Load:
    """What one launch takes.

    ``fixed`` whatever the context: weights, buffers. ``growing(ctx, cards)`` over all cards
    together: KV, drafter, compute. ``per_card(ctx, cards)`` is the part of it that every card
    must hold by itself, however its layers fall. ``extra_card`` is paid by each card beyond
    the first. ``placed(ctx, cards)`` has the last word: whether whole layers, laid on just
    these cards, overfill none of them.
    """

    fixed: int
    growing: Callable[[int, int], int]
    per_card: Callable[[int, int], int] = _nothing
    extra_card: int = EXTRA_CARD
    placed: Callable[[int, Sequence[Gpu]], bool] = _anywhere

    def footprint(self, ctx: int, cards: int) -> int:
        """Bytes over all cards."""
        return self.fixed + self.growing(ctx, cards) + max(0, cards - 1) * self.extra_card

    def least(self, ctx: int, cards: int) -> int:
        """Bytes that no card can leave to another."""
        return self.per_card(ctx, cards) + (self.extra_card if cards > 1 else 0)


@frozen
class Choice:
    """Where a launch goes. Without ``fits`` no set of cards holds it, ``cards`` is empty, and
    the server's own fitting must stay on."""

    ctx: int
    cards: tuple[int, ...]
    fits: bool


@frozen(kw_only=True)
class HostMemory:
    """Host memory for a launch without cards, less what others need of it.

    ``prompt_cache`` and ``parking`` fill up while the server runs, so they count at launch.
    """

    available: int
    parking: int = 0
    prompt_cache: int = 0
    margin: int = HOST_MARGIN

    @property
    def usable(self) -> int:
        """Bytes that the launch itself may take."""
        return self.available - self.parking - self.prompt_cache - self.margin


def fit_ctx(requested: int, budget: int, fixed: int, growing: Callable[[int], int]) -> int:
    """The largest context up to ``requested`` within ``budget``, in steps of 256.

    Never below min(4096, requested), which may itself not fit: the caller looks again. A
    launch whose fixed part alone is too large is left as requested: no context cures it.
    """
    if requested <= 0 or fixed >= budget or fixed + growing(requested) <= budget:
        return requested
    floor = min(CTX_MIN, requested)
    return max(floor, largest_step(floor, requested, lambda ctx: fixed + growing(ctx) <= budget))


def largest_step(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple of 256 within [low, high] that fits; 0: none does.

    ``fits`` must not come true again above a context where it is false.
    """
    below, above = -(-low // CTX_STEP) - 1, high // CTX_STEP + 1
    first = below
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle * CTX_STEP):
            below = middle
        else:
            above = middle
    return below * CTX_STEP if below > first else 0


def auto_choice(
    native: int, gpus: Sequence[Gpu], budget: Budget, load: Load, *, min_gpus: int = 1
) -> Choice:
    """The largest context up to the model's own, on the fewest cards that reach it.

    A smaller set that holds less is passed over: were it taken, memory added to one card
    could shrink the context of all. When no set holds even the floor, the floor stands.
    """
    order = ranked(gpus, budget)
    best = Choice(min(CTX_MIN, native), (), False)
    for count in range(fewest_cards(order, budget, load.extra_card, min_gpus), len(order) + 1):
        cards = order[:count]
        at_least = best.ctx + 1 if best.fits else best.ctx
        ctx = _largest_on(cards, budget, load, at_least, native)
        if ctx:
            best = Choice(ctx, _indexes(cards), True)
        if best.fits and best.ctx == native:
            break
    return best


def explicit_choice(
    ctx: int, gpus: Sequence[Gpu], budget: Budget, load: Load, *, min_gpus: int = 1
) -> Choice:
    """The fewest cards that hold this very context; it is never changed."""
    order = ranked(gpus, budget)
    for count in range(fewest_cards(order, budget, load.extra_card, min_gpus), len(order) + 1):
        if _holds(ctx, order[:count], budget, load):
            return Choice(ctx, _indexes(order[:count]), True)
    return Choice(ctx, (), False)


def unsized_choice(
    need: int, gpus: Sequence[Gpu], budget: Budget, *, ctx: int | None, native: int
) -> Choice:
    """By file sizes alone, for a model whose KV cannot be priced; ``ctx`` None: ours to choose."""
    cards = select_gpus(lambda _: need, gpus, budget, extra_card=EXTRA_CARD)
    if cards is not None:
        return Choice(native if ctx is None else ctx, cards, True)
    return Choice(min(CTX_MIN, native) if ctx is None else ctx, (), False)


def host_choice(ctx: int | None, native: int, host: HostMemory, load: Load) -> Choice:
    """A launch without cards; ``ctx`` None: the largest that host memory holds."""
    usable = host.usable
    if ctx is None and load.fixed < usable:
        ctx = fit_ctx(native, usable, load.fixed, lambda at: load.growing(at, 1))
    wanted = min(CTX_MIN, native) if ctx is None else ctx
    return Choice(wanted, (), load.footprint(wanted, 1) <= usable)


def advertised_ctx(
    native: int | None, gpus: Sequence[Gpu], budget: Budget, load: Load | None, *, in_use: int
) -> int:
    """The safe maximum to show, whatever context is in use: the fitted cap, or the floor when
    no set of cards holds the launch. Without a price or a native context it is ``in_use``."""
    if native is None or load is None or not gpus:
        return in_use
    return auto_choice(native, gpus, budget, load).ctx


def steady_choice(
    slots: int,
    native: int,
    load_of: Callable[[int], Load],
    *,
    largest: Callable[[int, Load], Choice],
    exact: Callable[[int, Load], Choice],
) -> Choice:
    """The choice for this many slots, never with more context than fewer slots would get.

    Each slot's cells are rounded up, so that four slots can cost less than three do; nobody
    shall be told that a slot more makes room. ``largest(limit, load)`` finds the largest
    context up to a limit, ``exact(ctx, load)`` tries one.
    """
    choice = largest(native, load_of(slots))
    for fewer in range(slots - 1, 0, -1):
        load = load_of(fewer)
        if not exact(choice.ctx, load).fits:
            limit = largest(choice.ctx, load).ctx
            if limit < choice.ctx:
                choice = largest(limit, load_of(slots))
    return choice


def most_slots(slots: int, place: Callable[[int], Choice]) -> tuple[int, Choice]:
    """The most slots, up to those wanted, with which the launch fits; the wanted number when
    none does. Layers pushed off the cards cost more speed than a slot is worth."""
    wanted = place(slots)
    if wanted.fits:
        return slots, wanted
    for fewer in range(slots - 1, 0, -1):
        smaller = place(fewer)
        if smaller.fits:
            return fewer, smaller
    return slots, wanted


def shed(loads: Sequence[Load], place: Callable[[Load], Choice]) -> int:
    """Which of these loads to launch, heaviest first: the first that fits, for instance all,
    then the projector on the host, then no drafter. When none fits nothing is given up."""
    return next((index for index, load in enumerate(loads) if place(load).fits), 0)


def host_shortage(
    weights: int, free_vram: int, available: int, *, margin: int = HOST_MARGIN
) -> int:
    """Bytes of weights that neither cards nor host memory hold; 0: there is room."""
    return max(0, weights - free_vram - max(0, available - margin))


def _largest_on(
    cards: Sequence[Gpu], budget: Budget, load: Load, at_least: int, native: int
) -> int:
    if at_least > native or not _holds(at_least, cards, budget, load):
        return 0
    if _holds(native, cards, budget, load):
        return native
    return largest_step(at_least, native, lambda ctx: _holds(ctx, cards, budget, load))


def _holds(ctx: int, cards: Sequence[Gpu], budget: Budget, load: Load) -> bool:
    count = len(cards)
    smallest = budget.usable(cards[-1], pooled=count > 1)
    return (
        load.footprint(ctx, count) <= budget.pool(cards)
        and load.least(ctx, count) <= smallest
        and load.placed(ctx, cards)
    )


def _indexes(cards: Sequence[Gpu]) -> tuple[int, ...]:
    return tuple(sorted(gpu.index for gpu in cards))
