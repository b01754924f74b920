"""Who is taken out of a full pool, how, and who comes back when."""

from __future__ import annotations

from typing import Literal

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver import constants
from kvalet.sims.fakeserver.room import Room, clear_idle, kept
from kvalet.sims.fakeserver.slot import (
    FULL,
    MIB,
    Failed,
    Noticed,
    Parking,
    Phase,
    PoolSettings,
    Slot,
    Step,
    Totals,
    Where,
)

Why = Literal["planner", "forced", "last resort", "rotation"]

_HEADS = {
    "planner": "preempted",
    "forced": "preempted",
    "last resort": "preempted as a last resort",
    "rotation": "rotated out",
}


class Parks:
    """Parks and resumes the slots of one pool; it is armed or it is not there."""

    def __init__(
        self, settings: PoolSettings, parking: Parking, slots: list[Slot], totals: Totals
    ) -> None:
        self._settings = settings
        self._parking = parking
        self._slots = slots
        self._totals = totals
        self._room = Room(settings, slots)
        self._failures_left = parking.restore_failures
        self._refused = 0
        """Whose rotation was refused last: that is said once."""

    @property
    def bytes_held(self) -> int:
        """Host memory that parked sequences take."""
        away = (Where.LEAVING, Where.OUT, Where.COMING)
        return sum(self._bytes(s) for s in self._slots if s.where in away and not s.dropped)

    def turn(self, now: float, step: Step) -> None:
        """All that is decided before a batch is built."""
        self._settle(now, step)
        self._restore(now, step)
        self._force(now, step)
        if self._parking.planner:
            self._plan(now, step)

    def next_landing(self) -> float | None:
        """When the copy that is through first will be, if one is under way."""
        moving = [s.lands_at for s in self._slots if s.where in (Where.LEAVING, Where.COMING)]
        return min(moving, default=None)

    def last_resort(self, now: float, step: Step) -> bool:
        """Make room after a decode found none. Says whether anything was gained."""
        if self._land_first(now, step):
            return True
        victim = self._victim()
        if victim is None:
            return False
        step.log.append("last resort: batch given up at off = 0")
        self._park(victim, now, step, "last resort")
        while self._land_first(now, step):
            pass
        return True

    # --- out ------------------------------------------------------------------------------

    def _force(self, now: float, step: Step) -> None:
        every = self._parking.every
        if not every:
            return
        for slot in self._slots:
            due = slot.predicted >= (slot.parks + 1) * every
            if slot.running and slot.phase is Phase.DECODE and due and self._may_go(slot):
                step.log.append(f"preempted on request after {slot.predicted} generated tokens")
                self._park(slot, now, step, "forced")

    def _plan(self, now: float, step: Step) -> None:
        while True:
            wanted = self._room.used() + self._room.reserve()
            over = wanted + self._room.margin() - self._settings.cells
            if over <= 0:
                return
            if clear_idle(self._slots, step.log):
                continue
            leaving = sum(self._room.held(s) for s in self._slots if s.where is Where.LEAVING)
            if leaving and over <= leaving:
                # Enough is on its way out: waited for only if the very next step needs it.
                if wanted <= self._settings.cells:
                    return
                self._land_first(now, step)
                continue
            victim = self._victim()
            if victim is not None:
                self._park(victim, now, step, "planner")
            elif not self._land_first(now, step):
                return

    def _victim(self) -> Slot | None:
        running = [slot for slot in self._slots if slot.running]
        if len(running) < 2:
            return None
        leader = max(running, key=lambda slot: (len(slot.cells), -slot.order))
        able = [slot for slot in running if slot is not leader and self._may_go(slot)]
        fresh = [slot for slot in able if slot.parks < constants.STARVED_PARKS]
        if not able:
            return None
        return min(fresh or able, key=self._rank)

    def _rank(self, slot: Slot) -> tuple[int, int]:
        match self._parking.policy:
            case "smallest":
                return len(slot.cells), -slot.order
            case "largest":
                return -len(slot.cells), -slot.order
            case "youngest":
                return -slot.order, 0
            case "oldest":
                return slot.order, 0

    def _may_go(self, slot: Slot) -> bool:
        return slot.work.family == 1 and (self._holds(slot) or self._parking.recompute)

    def _holds(self, slot: Slot) -> bool:
        """Whether the budget takes this sequence as well."""
        if self._parking.fail_save:
            return False
        budget = self._parking.budget_mib
        return budget < 0 or self.bytes_held + self._bytes(slot) <= budget * MIB

    def _bytes(self, slot: Slot) -> int:
        return len(slot.cells) * self._settings.cell_bytes

    def _park(self, slot: Slot, now: float, step: Step, why: Why) -> None:
        wanted = self._room.used() + self._room.reserve() + self._room.margin()
        if slot.phase is Phase.STARTED:
            del slot.cells[kept(slot) :]
        slot.shared = 0
        slot.parks += 1
        slot.parked_at, slot.failures, slot.shifts = now, 0, 0
        step.early.append(Noticed(job=slot.work.number, notice=Notice.PREEMPTED))
        head = _HEADS[why]
        if self._parking.fail_save:
            step.log.append("could not take the host memory for a parked sequence")
        if not self._holds(slot):
            self._drop(slot, step, head)
            return
        slot.dropped = False
        copy_s = self._bytes(slot) / self._settings.copy_bytes_per_s
        count, taken = len(slot.cells), f"{self._bytes(slot) / MIB:.2f} MiB parked"
        if self._parking.asynchronous:
            slot.where, slot.lands_at = Where.LEAVING, now + copy_s
            step.log.append(
                f"{head}: {count} cells, park issued in 0.01 ms ({taken}, {self._fill(wanted)})"
            )
            return
        slot.where = Where.OUT
        self._totals.parks += 1
        step.seconds += copy_s
        step.log.append(
            f"{head}: {count} cells released in {copy_s * 1e3:.2f} ms, {taken}, "
            f"{self._fill(wanted)}, preemptions {slot.parks}"
        )

    def _drop(self, slot: Slot, step: Step, head: str) -> None:
        count = len(slot.cells)
        if slot.phase is Phase.DECODE:
            slot.todo = [*slot.cells, slot.sampled]
            slot.phase, slot.replaying = Phase.PREFILL, True
        elif slot.replaying:
            slot.todo = [*slot.cells, *slot.todo]
        else:
            # A prompt that is still going in starts again from nothing, and so do its counts.
            slot.phase, slot.todo = Phase.STARTED, []
            slot.reused = slot.processed = 0
        slot.cells = []
        slot.where, slot.dropped = Where.OUT, True
        slot.recomputes += 1
        self._totals.parks += 1
        self._totals.recomputes += 1
        again = len(slot.todo) or len(slot.work.prompt)
        if head.endswith("last resort"):
            head += " by dropping its cells"
        step.log.append(f"{head}: {count} cells dropped, {again} tokens to re-prefill")

    def _fill(self, wanted: int) -> str:
        return f"kv {self._room.used()}/{self._settings.cells} (wanted {wanted})"

    # --- back -----------------------------------------------------------------------------

    def _settle(self, now: float, step: Step) -> None:
        for slot in self._slots:
            if slot.where in (Where.LEAVING, Where.COMING) and slot.lands_at <= now:
                self._land(slot, now, step, waited=False)

    def _land_first(self, now: float, step: Step) -> bool:
        """Wait for the copy out that is through first."""
        leaving = [slot for slot in self._slots if slot.where is Where.LEAVING]
        if not leaving:
            return False
        first = min(leaving, key=lambda slot: slot.lands_at)
        step.seconds = max(step.seconds, first.lands_at - now)
        self._land(first, now + step.seconds, step, waited=True)
        return True

    def _land(self, slot: Slot, now: float, step: Step, *, waited: bool) -> None:
        took = (now - slot.parked_at) * 1e3
        if slot.where is Where.LEAVING:
            slot.where = Where.OUT
            self._totals.parks += 1
            how = " (waited for)" if waited else ""
            step.log.append(
                f"park completed after {took:.2f} ms{how}: kv "
                f"{self._room.used()}/{self._settings.cells}, preemptions {slot.parks}"
            )
        else:
            slot.where = Where.HERE
            self._totals.resumes += 1
            step.early.append(Noticed(job=slot.work.number, notice=Notice.RESUMED))
            step.log.append(f"restore completed after {took:.2f} ms")

    def _line(self) -> list[Slot]:
        out = [slot for slot in self._slots if slot.where is Where.OUT]
        if self._parking.resume == "head":
            return sorted(out, key=lambda slot: (slot.parked_at, slot.order))
        return sorted(out, key=lambda slot: (-slot.parks, slot.parked_at, slot.order))

    def _restore(self, now: float, step: Step) -> None:
        for slot in self._line():
            if self._settings.paged(self._least(slot)) > self._settings.cells:
                self._give_up(slot, step, FULL)
                step.log.append(
                    f"parked sequence of {slot.length} tokens cannot fit the pool of "
                    f"{self._settings.cells} cells even alone, failing it"
                )
            elif self._make_room(slot, now, step):
                if not self._bring_back(slot, now, step):
                    return
            elif self._parking.resume == "head":
                return

    def _make_room(self, slot: Slot, now: float, step: Step) -> bool:
        if self._fits(slot):
            return True
        for other in self._slots:
            if other.running and other.phase is Phase.STARTED and len(other.cells) > kept(other):
                del other.cells[kept(other) :]
                step.log.append(
                    f"trimmed to the {len(other.cells)} cells its request keeps ahead of the "
                    "batch builder"
                )
                if self._fits(slot):
                    return True
        while clear_idle(self._slots, step.log):
            if self._fits(slot):
                return True
        return self._rotate(slot, now, step) and self._fits(slot)

    def _least(self, slot: Slot) -> int:
        """Cells without which the parked sequence cannot go on."""
        if slot.replaying:
            return len(slot.cells) + len(slot.todo)
        if slot.phase is Phase.DECODE:
            return len(slot.cells) + 1
        return len(slot.work.prompt)

    def _need(self, slot: Slot) -> int:
        """Cells that the parked sequence takes, its next step with it."""
        if slot.replaying:
            return self._settings.paged(self._least(slot) + 1)
        more = (
            1 + self._room.draft(slot)
            if slot.phase is Phase.DECODE
            else self._room.chunk(slot, self._settings.batch)
        )
        return self._settings.paged(len(slot.cells) + more)

    def _fits(self, slot: Slot) -> bool:
        cells, used = self._settings.cells, self._room.used()
        if not any(s.busy and s.where is not Where.OUT for s in self._slots):
            return used + self._settings.paged(self._least(slot)) <= cells
        return used + self._room.reserve() + self._need(slot) + self._room.margin(1) <= cells

    def _bring_back(self, slot: Slot, now: float, step: Step) -> bool:
        if self._failures_left > 0:
            self._failures_left -= 1
            self._fail_to_restore(slot, now, step)
            return False
        copy_s = 0.0 if slot.dropped else self._bytes(slot) / self._settings.copy_bytes_per_s
        waited = f"resumed after {now - slot.parked_at:.3f} s"
        if self._parking.asynchronous and not slot.dropped:
            slot.where, slot.lands_at = Where.COMING, now + copy_s
            step.log.append(f"{waited}: {slot.length} tokens, restore issued in 0.01 ms")
            return True
        step.seconds += copy_s
        slot.where = Where.HERE
        self._totals.resumes += 1
        step.log.append(
            f"{waited}: {slot.length} tokens back in the cache in {copy_s * 1e3:.2f} ms, kv "
            f"{self._room.used()}/{self._settings.cells}, preemptions {slot.parks}"
        )
        step.early.append(Noticed(job=slot.work.number, notice=Notice.RESUMED))
        if slot.dropped:
            step.early.append(Noticed(job=slot.work.number, notice=Notice.RECOMPUTED))
            slot.dropped = False
        return True

    def _fail_to_restore(self, slot: Slot, now: float, step: Step) -> None:
        slot.failures += 1
        parked_s = now - slot.parked_at
        step.log.append(
            f"resume failed ({slot.failures} in a row, parked {parked_s:.1f} s), staying preempted"
        )
        given_up = slot.failures >= constants.RESTORE_FAILURES_MAX
        if given_up and parked_s > constants.RESTORE_PATIENCE_S:
            self._give_up(slot, step, "failed to restore the preempted sequence")

    def _give_up(self, slot: Slot, step: Step, message: str) -> None:
        step.early.append(
            Failed(job=slot.work.number, code=500, kind="server_error", message=message)
        )
        forget(slot)

    def _rotate(self, head: Slot, now: float, step: Step) -> bool:
        """Park a resident that has shifted its context in the place of one who waits."""
        if now - head.parked_at < constants.ROTATE_AFTER_S or head is not self._line()[0]:
            return False
        shifted = [
            slot
            for slot in self._slots
            if slot.running and slot.phase is Phase.DECODE and slot.shifts and slot.work.family == 1
        ]
        if not shifted or any(slot.where is Where.LEAVING for slot in self._slots):
            return False
        short = self._room.used() + self._room.reserve() + self._need(head)
        short += self._room.margin(1) - self._settings.cells
        enough = [slot for slot in shifted if self._room.held(slot) >= short]
        victim = (
            min(enough, key=lambda slot: len(slot.cells))
            if enough
            else max(shifted, key=lambda slot: len(slot.cells))
        )
        if not self._may_go(victim):
            if self._refused != head.order:
                self._refused = head.order
                step.log.append(
                    f"no rotation: --preempt-ram {self._parking.budget_mib} MiB does not hold both"
                )
            return False
        step.log.append(f"rotated out after {victim.shifts} context shifts: slot {victim.number}")
        self._park(victim, now, step, "rotation")
        return True


def forget(slot: Slot) -> None:
    """End the slot's job and drop its cells, wherever they are."""
    slot.cells, slot.shared = [], 0
    release(slot)


def release(slot: Slot) -> None:
    """End the slot's job; the cells that it has stay."""
    slot.phase, slot.where, slot.job = Phase.IDLE, Where.HERE, None
    slot.todo, slot.replaying, slot.dropped = [], False, False
    slot.parks = slot.recomputes = slot.failures = slot.shifts = 0
    slot.reused = slot.processed = slot.predicted = slot.drafted = slot.accepted = 0
