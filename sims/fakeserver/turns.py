"""Runs the pool on trio's clock and hands every output to whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio
from attrs import define, field

from kvalet.sims.fakeserver.faults import Crash, Hang
from kvalet.sims.fakeserver.options import Options
from kvalet.sims.fakeserver.pool import Pool
from kvalet.sims.fakeserver.slot import Acted, Action, Ended, Failed, Job, Output

Log = Callable[[str], None]


class Bulletin:
    """The one place where results appear: each wakes everybody who waits for one."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self.rung_at = trio.current_time()

    def ring(self) -> None:
        """Something is there, for somebody."""
        self.rung_at = trio.current_time()
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self, until: float) -> None:
        """Until the next ring, or until it is so late."""
        with trio.move_on_at(until):
            await self._event.wait()


@define(eq=False)
class Mailbox:
    """What has come for one request and was not taken yet.

    Unless it ``streams``, only its end comes: nothing else is ever sent to it.
    """

    streams: bool = True
    _letters: list[Output] = field(factory=list[Output])

    def put(self, out: Output) -> bool:
        """Leave a result here, if it is wanted; says whether it is."""
        wanted = self.streams or isinstance(out, Ended | Failed | Acted)
        if wanted:
            self._letters.append(out)
        return wanted

    def take(self) -> list[Output]:
        """All that is here, and nothing is left."""
        letters, self._letters = self._letters, []
        return letters


class Turns:
    """The server's main loop. ``die`` ends the process, as a fault wants it."""

    def __init__(self, options: Options, log: Log, die: Callable[[int], None]) -> None:
        self.pool = Pool(options.pool)
        self.bulletin = Bulletin()
        self.hung = False
        """A fault has stopped the loop: nothing that it would have to answer is answered."""
        self._options = options
        self._log = log
        self._die = die
        self._boxes: dict[int, Mailbox] = {}
        self._actions: dict[int, Mailbox] = {}
        self._cancelled: list[int] = []
        self._work = trio.Event()
        self._said = 0

    def submit(self, box: Mailbox, family: Sequence[Job]) -> None:
        """Queue the answers to one prompt; their outputs go into ``box``."""
        for job in family:
            self._boxes[job.number] = box
        self.pool.submit(*family)
        self._work.set()

    def cancel(self, numbers: Sequence[int]) -> None:
        """End these jobs before the next turn; nothing more of them is heard."""
        for number in numbers:
            if self._boxes.pop(number, None) is not None:
                self._cancelled.append(number)
        self._work.set()

    async def act(self, action: Action) -> Acted:
        """Have a slot action done; it waits for its slot."""
        box = self._actions[action.number] = Mailbox()
        self.pool.act(action)
        self._work.set()
        try:
            while not (letters := box.take()):
                await self.bulletin.wait(trio.current_time() + 1e6)
        finally:
            del self._actions[action.number]
        (acted,) = letters
        assert isinstance(acted, Acted)
        return acted

    async def run(self) -> None:
        """Turn after turn while there is work; cancel it to stop."""
        while True:
            self._apply_cancellations()
            if self.pool.idle:
                self._work = trio.Event()
                await self._work.wait()
                continue
            step = self.pool.step(trio.current_time())
            for line in step.log:
                self._log(line)
            self._post(step.early)
            await trio.sleep(step.seconds)
            self._said += step.decoded
            await self._fail_on_purpose()
            self._post(step.late)

    def _apply_cancellations(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for number in cancelled:
            for line in self.pool.cancel(number):
                self._log(line)

    def _post(self, outputs: list[Output]) -> None:
        heard = False
        for out in outputs:
            boxes, number = (
                (self._actions, out.number) if isinstance(out, Acted) else (self._boxes, out.job)
            )
            box = boxes.get(number)
            heard = (box is not None and box.put(out)) or heard
        if heard:
            self.bulletin.ring()

    async def _fail_on_purpose(self) -> None:
        for fault in self._options.faults:
            if isinstance(fault, Crash) and self._said >= fault.at_token:
                if self._options.has(fault.when):
                    self._die(fault.code)
                    await trio.sleep_forever()
            elif isinstance(fault, Hang) and self._said >= fault.at_token:
                self.hung = True
                await trio.sleep_forever()
