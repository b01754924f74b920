"""Which slot holds cells that a new prompt could reuse. Token ids stay in memory, here alone."""

from __future__ import annotations

from kvalet.protocol.ids import Cells, SlotId

WORTH_IT = 16
"""A shared beginning shorter than this (a template's opening) decides nothing."""


class Prefixes:
    """The prompt that each slot evaluated last."""

    def __init__(self) -> None:
        self._tokens: dict[SlotId, list[int]] = {}

    def remember(self, slots: tuple[SlotId, ...], tokens: list[int]) -> None:
        """``tokens`` is about to be evaluated in the first of ``slots``."""
        self._tokens.update({slot: [] for slot in slots[1:]})
        self._tokens[slots[0]] = tokens

    def forget(self, slot: SlotId) -> None:
        """The slot is empty."""
        self._tokens.pop(slot, None)

    def shared_with(self, tokens: list[int]) -> tuple[tuple[SlotId, Cells], ...]:
        """(slot, cells) for every slot with a beginning in common, by slot."""
        shared = (
            (slot, common_prefix(held, tokens)) for slot, held in sorted(self._tokens.items())
        )
        return tuple((slot, Cells(size)) for slot, size in shared if size >= WORTH_IT)


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many leading items two lists share. Bisects, so that the comparing is done in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
