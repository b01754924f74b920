"""The whole server without its wire: jobs in, one turn at a time, tokens and notices out.

Nothing here knows a clock: each turn is told when it begins and says how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvalet.sims.fakeserver.parks import Parks, forget, release
from kvalet.sims.fakeserver.room import Room, clear_idle, kept, left_to_predict
from kvalet.sims.fakeserver.slot import (
    FULL,
    Acted,
    Action,
    Begun,
    Ended,
    Failed,
    Job,
    Phase,
    PoolSettings,
    Progress,
    Said,
    Slot,
    Step,
    StopType,
    Timings,
    Totals,
    Where,
)
from kvalet.sims.fakeserver.speech import Speech
from kvalet.sims.fakeserver.store import PromptStore, choose_slot
from kvalet.sims.fakeserver.tokens import EOS, answered, digest, next_token

_LOOK_AGAIN_S: Final = 0.05
_OTHER_WAY: Final = 1 << 32


class Pool:
    """Slots, their cells and what waits for them."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.slots = [Slot(number=number) for number in range(settings.slots)]
        self.totals = Totals()
        self.queue: list[tuple[Job, ...]] = []
        self._actions: list[Action] = []
        self._room = Room(settings, self.slots)
        self._store = PromptStore(settings, self._room)
        self._launches = 0
        parking = settings.parking
        armed = settings.unified and settings.slots > 1
        self.parks = (
            Parks(settings, parking, self.slots, self.totals)
            if parking is not None and parking.budget_mib and armed
            else None
        )

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing at all."""
        return not (self.queue or self._actions or any(slot.busy for slot in self.slots))

    def submit(self, *family: Job) -> None:
        """Queue one job, or all answers to one prompt at once."""
        self.queue.append(family)

    def act(self, action: Action) -> None:
        """Queue a slot action; it waits until its slot is idle."""
        self._actions.append(action)

    def cancel(self, number: int) -> list[str]:
        """End a job, queued, running or parked. Says what is logged."""
        self.queue = [
            rest for f in self.queue if (rest := tuple(job for job in f if job.number != number))
        ]
        for slot in self.slots:
            if slot.job is not None and slot.job.number == number:
                if slot.where is Where.HERE:
                    release(slot)
                else:
                    forget(slot)
                return [
                    f"cancel task, id_task = {number}",
                    f"stop processing: n_tokens = {len(slot.cells)}",
                ]
        return []

    def step(self, now: float) -> Step:
        """One turn that begins at ``now``."""
        step = Step()
        self._act(step)
        self._launch(now)
        self._shift(step)
        if self.parks is not None:
            self.parks.turn(now, step)
        self._decode(now, step)
        if not step.seconds and not self.idle and not step.late:
            landing = self.parks.next_landing() if self.parks is not None else None
            step.seconds = _LOOK_AGAIN_S if landing is None else max(0.0, landing - now)
        return step

    # --- what waits -----------------------------------------------------------------------

    def _act(self, step: Step) -> None:
        for action in list(self._actions):
            slot = self.slots[action.slot % len(self.slots)]
            if slot.busy:
                continue
            self._actions.remove(action)
            tokens, done = tuple(slot.cells), True
            if action.kind == "erase":
                slot.cells, slot.shared = [], 0
            elif action.kind == "restore":
                slot.cells, slot.shared, tokens = [], 0, action.tokens
                size = self.settings.paged(len(tokens))
                unified = self.settings.unified
                done = size <= (self._room.free() if unified else self.settings.slot_ctx)
                slot.cells = list(tokens) if done else []
            step.early.append(Acted(number=action.number, tokens=tokens, done=done))

    def _launch(self, now: float) -> None:
        for family in list(self.queue):
            chosen: list[Slot] = []
            for job in family:
                slot = choose_slot(self.slots, job, chosen)
                if slot is not None:
                    chosen.append(slot)
            if len(chosen) < len(family):
                continue
            self.queue.remove(family)
            self._clear_others(chosen)
            for job, slot in zip(family, chosen, strict=True):
                self._store.fetch(slot, job)
                self._take(slot, job, now)

    def _clear_others(self, chosen: Sequence[Slot]) -> None:
        if not self.settings.clear_idle:
            return
        for slot in self.slots:
            if not slot.busy and slot not in chosen:
                self._store.keep(slot.cells)
                if self.settings.unified:
                    slot.cells, slot.shared = [], 0

    def _take(self, slot: Slot, job: Job, now: float) -> None:
        self._launches += 1
        slot.job, slot.last_job, slot.order = job, job.number, self._launches
        sharing = job.parent and job.parent != job.number
        slot.phase = Phase.SHARING if sharing else Phase.STARTED
        if sharing:
            slot.cells, slot.shared = [], 0
        slot.speech, slot.begun_at, slot.used_at = Speech(job.stop), now, now

    # --- one decode -----------------------------------------------------------------------

    def _shift(self, step: Step) -> None:
        for slot in self.slots:
            full = len(slot.cells) + 1 >= self.settings.slot_ctx
            if self.settings.context_shift and slot.running and full:
                keep = min(slot.work.n_keep, len(slot.cells) - 2)
                gone = (len(slot.cells) - keep) // 2
                del slot.cells[keep : keep + gone]
                slot.summed_cells = 0
                slot.shifts += 1
                step.log.append(f"slot context shift, n_keep = {keep}, n_discard = {gone}")

    def _decode(self, now: float, step: Step) -> None:
        for slot in self.slots:
            if slot.running and slot.phase is Phase.STARTED:
                self._begin(slot, now, step)
        batch = self._fitting_batch(now, step)
        if not batch:
            return
        prompt = sum(taken for slot, taken in batch if slot.phase is Phase.PREFILL)
        if any(slot.phase is Phase.DECODE for slot, _ in batch):
            step.seconds += 1 / self.settings.tokens_per_s
        step.seconds += prompt / self.settings.prefill_per_s
        self.totals.decodes += 1
        self.totals.busy_slots += len(batch)
        for slot, taken in batch:
            if slot.phase is Phase.PREFILL:
                self._prefill(slot, taken, now + step.seconds, len(batch) - 1, step)
            else:
                self._generate(slot, taken - 1, now + step.seconds, len(batch) - 1, step)
            self.totals.tokens_max = max(self.totals.tokens_max, len(slot.cells))

    def _begin(self, slot: Slot, now: float, step: Step) -> None:
        slot.reused = kept(slot)
        del slot.cells[slot.reused :]
        slot.shared = min(slot.shared, slot.reused)
        slot.todo = list(slot.work.prompt[slot.reused :])
        slot.phase, slot.summed_cells, slot.begun_at = Phase.PREFILL, 0, now
        self.totals.prompt_cached += slot.reused
        step.early.append(Begun(job=slot.work.number))
        step.early.append(self._progress(slot, now))

    def _fitting_batch(self, now: float, step: Step) -> list[tuple[Slot, int]]:
        """Slots of the next decode, each with its tokens; nothing when all had to fail."""
        drafts = True
        while batch := self._batch(drafts):
            grown = sum(self._room.growth(slot, taken) for slot, taken in batch)
            if not self.settings.unified or grown <= self._room.free():
                return batch
            if drafts and self.settings.draft_max:
                drafts = False
            elif clear_idle(self.slots, step.log):
                continue
            elif self.parks is None or not self.parks.last_resort(now, step):
                self._overflow(step)
        return []

    def _batch(self, drafts: bool) -> list[tuple[Slot, int]]:
        running = [slot for slot in self.slots if slot.running]
        batch = [
            (slot, 1 + (self._room.draft(slot) if drafts else 0))
            for slot in running
            if slot.phase is Phase.DECODE
        ]
        left = self.settings.batch - sum(taken for _, taken in batch)
        for slot in running:
            if slot.phase is Phase.PREFILL and left > 0:
                taken = min(len(slot.todo), left)
                batch.append((slot, taken))
                left -= taken
        return batch

    def _overflow(self, step: Step) -> None:
        step.log.append(FULL)
        for slot in self.slots:
            if slot.running:
                step.early.append(
                    Failed(job=slot.work.number, code=500, kind="server_error", message=FULL)
                )
                forget(slot)

    def _prefill(self, slot: Slot, taken: int, end: float, others: int, step: Step) -> None:
        slot.cells.extend(slot.todo[:taken])
        del slot.todo[:taken]
        if not slot.replaying:
            slot.processed += taken
            self.totals.prompt_tokens += taken
            step.late.append(self._progress(slot, end))
        if slot.todo:
            return
        slot.phase = Phase.DECODE
        if slot.replaying:
            slot.replaying = False
        else:
            slot.prompt_done_at = end
            self.totals.prompt_s += end - slot.begun_at
        sharers = [
            child
            for child in self.slots
            if child.phase is Phase.SHARING and child.work.parent == slot.work.number
        ]
        for child in sharers:
            child.phase, child.cells = Phase.DECODE, list(slot.cells)
            child.shared = slot.shared = len(slot.cells)
            child.family = slot.family = slot.work.number
            child.prompt_done_at, child.summed_cells = end, 0
        for one in (slot, *sharers):
            self._sample(one, end, others, step)

    def _generate(self, slot: Slot, drafts: int, end: float, others: int, step: Step) -> None:
        slot.cells.append(slot.sampled)
        self._sample(slot, end, others, step)
        if not drafts:
            return
        accepted = self._sum(slot) % (drafts + 1)
        slot.drafted += drafts
        self.totals.drafts += 1
        self.totals.drafted += drafts
        for _ in range(accepted):
            if not slot.busy:
                return
            slot.accepted += 1
            self.totals.accepted += 1
            slot.cells.append(slot.sampled)
            self._sample(slot, end, others, step)

    # --- one token ------------------------------------------------------------------------

    def _sum(self, slot: Slot) -> int:
        if not 0 < slot.summed_cells <= len(slot.cells):
            slot.summed, slot.summed_cells = digest(slot.cells), len(slot.cells)
        slot.summed = digest(slot.cells[slot.summed_cells :], slot.summed)
        slot.summed_cells = len(slot.cells)
        return slot.summed

    def _choose(self, slot: Slot, others: int) -> int:
        bound = self.settings.answer_tokens
        if bound and not slot.work.ignore_eos and answered(slot.cells, bound) >= bound:
            return EOS
        mixed = 0 if self.settings.alone_in_step else others
        if self.settings.recompute_differs and slot.recomputes:
            mixed += _OTHER_WAY * slot.recomputes
        return next_token(self._sum(slot), mixed)

    def _sample(self, slot: Slot, end: float, others: int, step: Step) -> None:
        slot.sampled = self._choose(slot, others)
        slot.predicted += 1
        step.decoded += 1
        self.totals.predicted += 1
        text = slot.speech.take(slot.sampled)
        if text is not None:
            said = Said(
                job=slot.work.number,
                text=text,
                ids=(slot.sampled,),
                predicted=slot.predicted,
                evaluated=len(slot.work.prompt),
                timings=_timings(slot, end),
            )
            step.late.append(said)
        stop = self._stop(slot)
        if stop is not None:
            self._end(slot, stop, end, step)

    def _stop(self, slot: Slot) -> StopType | None:
        if slot.sampled == EOS:
            return "eos"
        if slot.speech.stopped_by:
            return "word"
        if left_to_predict(slot) <= 0:
            return "limit"
        return "limit" if self._at_its_end(slot) else None

    def _at_its_end(self, slot: Slot) -> bool:
        return len(slot.cells) + 1 >= self.settings.slot_ctx and not self.settings.context_shift

    def _end(self, slot: Slot, stop: StopType, end: float, step: Step) -> None:
        self.totals.predicted_s += end - slot.prompt_done_at
        ended = Ended(
            job=slot.work.number,
            slot=slot.number,
            text=slot.speech.text,
            ids=tuple(slot.speech.ids),
            evaluated=len(slot.work.prompt),
            predicted=slot.predicted,
            cached=len(slot.cells),
            stop_type=stop,
            stopping_word=slot.speech.stopped_by,
            truncated=stop == "limit" and left_to_predict(slot) > 0,
            parks=slot.parks,
            recomputes=slot.recomputes,
            timings=_timings(slot, end),
        )
        step.late.append(ended)
        slot.used_at = end
        release(slot)

    def _progress(self, slot: Slot, at: float) -> Progress:
        return Progress(
            job=slot.work.number,
            total=len(slot.work.prompt),
            cache=slot.reused,
            processed=slot.reused + slot.processed,
            time_ms=int((at - slot.begun_at) * 1e3),
            timings=Timings(
                cache_n=slot.reused,
                prompt_n=slot.processed,
                prompt_ms=(at - slot.begun_at) * 1e3,
            ),
        )


def _timings(slot: Slot, end: float) -> Timings:
    return Timings(
        cache_n=slot.reused,
        prompt_n=slot.processed,
        prompt_ms=(slot.prompt_done_at - slot.begun_at) * 1e3,
        predicted_n=slot.predicted,
        predicted_ms=max(0.001, (end - slot.prompt_done_at) * 1e3),
        draft_n=slot.drafted,
        draft_n_accepted=slot.accepted,
    )
