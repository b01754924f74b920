"""How much of each card may be spent, and which cards to take.

Amounts are integers of bytes; a usable amount is rounded down. Free and total come in MiB,
as drivers report them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import evolve, frozen

from kvalet.protocol.errors import ConfigFault

MIB: Final = 1 << 20
GIB: Final = 1 << 30

FRACTION_MIN: Final = 0.80
FRACTION_MAX: Final = 1.00
FLAT_DRAFT_PERMILLE: Final = 50
"""What a drafter of unknown size takes off the fraction."""


@frozen
class Gpu:
    """One card as its driver reports it; no total on MIG slices, vGPUs and unified memory."""

    index: int
    free_mib: int
    total_mib: int | None = None


@frozen(kw_only=True)
class Budget:
    """The part of a card that a plan may fill, in thousandths of its total.

    The cushion left over does not shrink as the card fills, for it comes off the total. It is
    at least ``floor_mib`` or ``floor_permille`` of the total, whichever is less.
    """

    permille: int
    floor_mib: int = 0
    floor_permille: int = 0

    def usable(self, gpu: Gpu, *, pooled: bool = False) -> int:
        """Bytes of this card that a plan may use; below zero when others filled its cushion.

        Without a total the fraction is of what is free, and the floor holds for a card that
        carries the launch alone, not for a ``pooled`` one.
        """
        free = gpu.free_mib * MIB
        total = (gpu.total_mib or 0) * MIB
        cushion = _share(total or free, 1000 - self.permille)
        if not total and pooled:
            return free - cushion
        return free - max(cushion, self._floor(total or free))

    def room(self, gpu: Gpu) -> int:
        """Usable bytes in a pool, never below zero: a full card lends nothing and owes nothing."""
        return max(0, self.usable(gpu, pooled=True))

    def pool(self, gpus: Sequence[Gpu]) -> int:
        """Bytes that these cards hold together: their own amounts summed, so that a card of
        unknown total cannot enter without a cushion. One card alone is no pool."""
        if len(gpus) == 1:
            return max(0, self.usable(gpus[0]))
        return sum(map(self.room, gpus))

    def without_flat_draft(self) -> Budget:
        """This budget less the flat reserve for a drafter that cannot be sized."""
        return evolve(self, permille=self.permille - FLAT_DRAFT_PERMILLE)

    def _floor(self, total: int) -> int:
        return min(self.floor_mib * MIB, _share(total, self.floor_permille))


DEFAULT: Final = Budget(permille=950, floor_mib=512, floor_permille=30)
"""The required fraction; its floor matters only to those who raise it above 0.97."""
G1: Final = Budget(permille=950)
G2: Final = Budget(permille=970, floor_mib=512, floor_permille=30)


def budget_of(fraction: float) -> Budget:
    """The default budget at another fraction, kept to three decimals.

    Raises ConfigFault outside 0.80..1.00.
    """
    if not FRACTION_MIN <= fraction <= FRACTION_MAX:
        raise ConfigFault(
            f"the fraction of a card to use must lie between {FRACTION_MIN:.2f} and "
            f"{FRACTION_MAX:.2f}, not {fraction}"
        )
    return evolve(DEFAULT, permille=round(fraction * 1000))


def ranked(gpus: Sequence[Gpu], budget: Budget) -> tuple[Gpu, ...]:
    """Cards by what a plan may use of them, most first, ties by index.

    Not by what is free: a busy large card has less room than an idle small one.
    """
    return tuple(sorted(gpus, key=lambda gpu: (-budget.usable(gpu), gpu.index)))


def select_gpus(
    need: Callable[[int], int],
    gpus: Sequence[Gpu],
    budget: Budget,
    *,
    extra_card: int = 0,
    min_gpus: int = 1,
) -> tuple[int, ...] | None:
    """Indexes, in order, of the fewest cards that hold ``need(cards)`` bytes; None: no set does.

    ``extra_card`` is what each card beyond the first costs on top of the need. ``min_gpus``
    asks for more cards than memory does, but counts only those that can pay for joining.
    """
    order = ranked(gpus, budget)
    for count in range(fewest_cards(order, budget, extra_card, min_gpus), len(order) + 1):
        if budget.pool(order[:count]) >= need(count) + (count - 1) * extra_card:
            return tuple(sorted(gpu.index for gpu in order[:count]))
    return None


def fewest_cards(gpus: Sequence[Gpu], budget: Budget, extra_card: int, min_gpus: int) -> int:
    """``min_gpus``, but no more than can pay ``extra_card`` bytes for joining; at least one."""
    worthy = sum(budget.usable(gpu) > extra_card for gpu in gpus)
    return max(1, min(min_gpus, worthy))


def split_need(single: int, split_delta: int) -> Callable[[int], int]:
    """A need that grows by ``split_delta`` bytes on every card as soon as there are two."""
    return lambda cards: single + (cards * split_delta if cards > 1 else 0)


def _share(amount: int, permille: int) -> int:
    """Thousandths of an amount, rounded up: it is kept back, not spent."""
    return -(-amount * permille // 1000)
