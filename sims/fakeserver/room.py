"""How full the pool is, and how much fuller the next step makes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvalet.sims.fakeserver.constants import ASYNC_STEPS, MARGIN_CELLS
from kvalet.sims.fakeserver.slot import Phase, PoolSettings, Slot, Where


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def kept(slot: Slot) -> int:
    """Cells of an earlier job that the slot's new one can use: never its whole prompt."""
    if not slot.work.cache_prompt:
        return 0
    prompt = slot.work.prompt
    return min(common_prefix(slot.cells, prompt), len(prompt) - 1)


class Room:
    """Cells of one pool. Slots may change under it; nothing is remembered."""

    def __init__(self, settings: PoolSettings, slots: list[Slot]) -> None:
        self._settings = settings
        self._slots = slots

    def held(self, slot: Slot) -> int:
        """Cells that the slot has now, pages counted whole."""
        return 0 if slot.where is Where.OUT else self._settings.paged(len(slot.cells))

    def used(self) -> int:
        """Cells of all slots; what a family has in common counts once."""
        total = sum(map(self.held, self._slots))
        families: dict[int, list[Slot]] = {}
        for slot in self._slots:
            if slot.shared and slot.cells:
                families.setdefault(slot.family, []).append(slot)
        return total - sum(
            (len(members) - 1) * min(slot.shared for slot in members)
            for members in families.values()
        )

    def free(self) -> int:
        """Cells that nobody has."""
        return self._settings.cells - self.used()

    def draft(self, slot: Slot) -> int:
        """Tokens that may be drafted for the slot in its next step."""
        room = self._settings.slot_ctx - len(slot.cells) - 2
        return max(0, min(self._settings.draft_max, room, left_to_predict(slot) - 1))

    def growth(self, slot: Slot, tokens: int) -> int:
        """Cells that so many more tokens take."""
        length = len(slot.cells)
        return self._settings.paged(length + tokens) - self._settings.paged(length)

    def chunk(self, slot: Slot, batch: int) -> int:
        """Prompt tokens of the slot in the next step, at least one."""
        left = len(slot.work.prompt) - kept(slot) if slot.phase is Phase.STARTED else len(slot.todo)
        return max(1, min(left, batch))

    def reserve(self, without: Slot | None = None) -> int:
        """Cells that the next step adds; copies on their way back run in it already."""
        total, batch = 0, self._settings.batch
        for slot in self._slots:
            if slot is without or not slot.busy or slot.where not in (Where.HERE, Where.COMING):
                continue
            if slot.phase is Phase.DECODE:
                total += self.growth(slot, 1 + self.draft(slot))
            elif slot.phase is not Phase.SHARING and batch > 0:
                taken = self.chunk(slot, batch)
                total += self.growth(slot, taken)
                batch -= taken
        return total

    def margin(self, extra: int = 0) -> int:
        """Cells kept free on top, with ``extra`` more slots running; none for a lone one."""
        running = extra + sum(slot.running for slot in self._slots)
        others = extra + sum(
            slot.where is not Where.OUT and (slot.busy or bool(slot.cells)) for slot in self._slots
        )
        if others <= 1:
            return 0
        margin = MARGIN_CELLS
        if self._settings.parking is not None and self._settings.parking.asynchronous:
            margin += running * (1 + self._settings.draft_max) * ASYNC_STEPS
        return self._settings.paged(margin)


def left_to_predict(slot: Slot) -> int:
    """Tokens that the slot's job may still say; very many when it sets no bound."""
    return 1 << 30 if slot.work.n_predict < 0 else max(0, slot.work.n_predict - slot.predicted)


def clear_idle(slots: Iterable[Slot], log: list[str]) -> bool:
    """Drop the cached prompt of one idle slot, the lowest number first; says whether any had."""
    for slot in slots:
        if not slot.busy and slot.cells:
            log.append(f"purging slot {slot.number} with {len(slot.cells)} tokens")
            slot.cells, slot.shared = [], 0
            return True
    return False
