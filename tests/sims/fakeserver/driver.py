"""Runs a pool on a clock that is a number, and keeps all that came out of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import define, field

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.pool import Pool
from kvalet.sims.fakeserver.slot import (
    Acted,
    Ended,
    Failed,
    Job,
    Noticed,
    Output,
    Parking,
    PoolSettings,
    Said,
    Slot,
    Where,
)

TURNS_MAX = 200_000


@define
class Run:
    """One pool's life so far."""

    pool: Pool
    now: float = 0.0
    log: list[str] = field(factory=list[str])
    outputs: list[tuple[float, Output]] = field(factory=list[tuple[float, Output]])
    fullest: int = 0

    def turn(self) -> None:
        step = self.pool.step(self.now)
        self.outputs += [(self.now, out) for out in step.early]
        self.now += step.seconds
        self.outputs += [(self.now, out) for out in step.late]
        self.log += step.log
        whole: dict[int, int] = {}
        for slot in self.pool.slots:
            if slot.where is not Where.OUT and slot.shared:
                whole[slot.family] = slot.shared
        held = sum(len(s.cells) - s.shared for s in self.pool.slots if s.where is not Where.OUT)
        self.fullest = max(self.fullest, held + sum(whole.values()))
        assert not self.pool.settings.unified or self.fullest <= self.pool.settings.cells

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.turn()
        raise AssertionError(self.log[-20:])

    def finish(self) -> None:
        self.until(lambda: self.pool.idle)

    def ask(self, number: int, prompt: int | list[int], tokens: int = -1, **more: Any) -> Job:
        ids = [1000 * number + at % 900 for at in range(prompt)] if isinstance(prompt, int) else []
        chosen = ids or prompt
        assert isinstance(chosen, list)
        job = Job(number=number, prompt=tuple(chosen), n_predict=tokens, **more)
        self.pool.submit(job)
        return job

    def of(self, number: int) -> list[Output]:
        return [out for _, out in self.outputs if not isinstance(out, Acted) and out.job == number]

    def notices(self, number: int) -> list[Notice]:
        return [out.notice for out in self.of(number) if isinstance(out, Noticed)]

    def parks(self, number: int) -> int:
        return self.notices(number).count(Notice.PREEMPTED)

    def ended(self, number: int) -> Ended:
        (ended,) = [out for out in self.of(number) if isinstance(out, Ended | Failed)]
        assert isinstance(ended, Ended), ended
        return ended

    def failed(self, number: int) -> Failed:
        (failed,) = [out for out in self.of(number) if isinstance(out, Ended | Failed)]
        assert isinstance(failed, Failed), failed
        return failed

    def ids(self, number: int) -> tuple[int, ...]:
        return tuple(i for out in self.of(number) if isinstance(out, Said) for i in out.ids)

    def logged(self, text: str) -> list[str]:
        return [line for line in self.log if text in line]

    def slot_of(self, number: int) -> Slot:
        (slot,) = [s for s in self.pool.slots if s.job is not None and s.job.number == number]
        return slot

    def figures(self) -> list[int]:
        """Every ``kv`` and ``wanted`` figure that was logged."""
        pairs = [re.search(r"kv (\d+)/\d+(?: \(wanted (\d+)\))?", line) for line in self.log]
        return [int(number) for pair in pairs if pair for number in pair.groups() if number]


def open_run(cells: int, slots: int = 2, *, parking: Parking | None = None, **more: Any) -> Run:
    """A pool whose every slot may fill it. No ``parking``: a stock server."""
    settings: dict[str, Any] = {"slot_ctx": cells, "alone_in_step": True, **more}
    return Run(Pool(PoolSettings(slots=slots, cells=cells, parking=parking, **settings)))


def solo(prompt: int, number: int, tokens: int, **more: Any) -> tuple[int, ...]:
    """What the same request says on a server of its own."""
    run = open_run(1 << 16, **more)
    run.ask(number, prompt, tokens)
    run.finish()
    return run.ids(number)
