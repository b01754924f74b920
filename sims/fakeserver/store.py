"""Prompts of idle slots kept in host memory, and which slot a new prompt gets."""

from __future__ import annotations

from collections.abc import Sequence

from kvalet.sims.fakeserver import constants
from kvalet.sims.fakeserver.room import Room, common_prefix
from kvalet.sims.fakeserver.slot import MIB, Job, PoolSettings, Slot


def choose_slot(slots: Sequence[Slot], job: Job, taken: Sequence[Slot]) -> Slot | None:
    """The slot for ``job`` among those that are idle and not ``taken``; None: it must wait."""
    if job.id_slot >= 0:
        slot = slots[job.id_slot % len(slots)]
        return None if slot.busy or slot in taken else slot
    idle = [slot for slot in slots if not slot.busy and slot not in taken]
    if not idle:
        return None
    alike = max(idle, key=lambda slot: common_prefix(slot.cells, job.prompt))
    similar = common_prefix(alike.cells, job.prompt) > constants.SLOT_SIMILARITY * len(job.prompt)
    return alike if similar else min(idle, key=lambda slot: slot.used_at)


class PromptStore:
    """What ``--cache-ram`` keeps: the oldest goes when it grows too large."""

    def __init__(self, settings: PoolSettings, room: Room) -> None:
        self._settings = settings
        self._room = room
        self._kept: list[list[int]] = []

    def keep(self, cells: list[int]) -> None:
        """Take a copy of an idle slot's sequence."""
        if not self._settings.store_mib or not cells or cells in self._kept:
            return
        self._kept.append(list(cells))
        bound = self._settings.store_mib * MIB // self._settings.cell_bytes
        while self._settings.store_mib > 0 and sum(map(len, self._kept)) > bound:
            self._kept.pop(0)

    def fetch(self, slot: Slot, job: Job) -> None:
        """Give the slot the stored sequence that fits ``job`` best, if it beats what is there.

        A slot that was asked for by number and is empty is never looked up for.
        """
        if not self._settings.store_mib or (job.id_slot >= 0 and not slot.cells):
            return
        own = common_prefix(slot.cells, job.prompt)
        if slot.cells and own >= constants.STORE_WANTED_BELOW * len(slot.cells):
            return
        self.keep(slot.cells)
        best = max(self._kept, key=lambda kept: common_prefix(kept, job.prompt), default=None)
        if best is None:
            return
        match = common_prefix(best, job.prompt)
        if match <= own or match < constants.STORE_MATCH * len(best):
            return
        room = self._room.free() + self._room.held(slot)
        if not self._settings.unified or self._settings.paged(len(best)) <= room:
            self._kept.remove(best)
            slot.cells, slot.shared = best, 0
