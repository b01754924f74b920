"""A host's own workers share a pool of cells: kvalet decides, the host decodes.

    python embed_scheduler.py [--journal FILE]

Six answers of 210 cells share a pool of 512. The "engine" here only counts, but it is strict:
it fails when more cells are in use than the pool has, which is what a real one would do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import trio

import kvalet

POOL = 512
SLOTS = 4
PROMPT = 60
ANSWER = 150
WORKERS = 6
BYTES_PER_CELL = 1024


class Engine:
    """Stands for the host's model: cells in use by slot, and copies of parked ones by name."""

    def __init__(self) -> None:
        self.used: Counter[int] = Counter()
        self.copies: dict[str, int] = {}
        self.most = 0

    async def decode(self, slot: int, cells: int = 1) -> None:
        """Put ``cells`` more cells into ``slot``."""
        await trio.lowlevel.checkpoint()
        self.used[slot] += cells
        self.most = max(self.most, self.used.total())
        if self.used.total() > POOL:
            raise MemoryError("the pool has overflown")

    async def move_out(self, slot: int, name: str) -> int:
        """Copy the cells of ``slot`` and free them; the copy's size in bytes."""
        await trio.lowlevel.checkpoint()
        self.copies[name] = self.used.pop(slot, 0)
        return self.copies[name] * BYTES_PER_CELL

    async def move_in(self, slot: int, name: str) -> None:
        """Put the copy back, into any slot."""
        await self.decode(slot, self.copies.pop(name))

    def clear(self, slot: int, name: str) -> None:
        """Forget everything of one answer."""
        self.used.pop(slot, None)
        self.copies.pop(name, None)


async def park(engine: Engine, lease: kvalet.Lease) -> None:
    """Make room as asked, and come back when there is room again."""
    size = await engine.move_out(lease.slot, lease.request)
    lease.freed(saved_bytes=size)
    resumed = await lease.wait_resumed()
    await engine.move_in(resumed.slot, lease.request)


async def answer(handle: kvalet.SchedulerHandle, engine: Engine, name: str) -> None:
    """One worker: lease, decode, ask for more, park when told to, finish."""
    async with handle.lease(prompt=PROMPT, cap=ANSWER) as lease:
        try:
            await engine.decode(lease.slot, PROMPT)
            generated = 0
            while generated < ANSWER:
                if generated == lease.room:
                    match await lease.extend(generated):
                        case kvalet.Parking():
                            await park(engine, lease)
                        case kvalet.Ended(reason=reason):
                            print(f"{name} ends early: {reason}")
                            return
                        case kvalet.Extended():
                            pass
                await engine.decode(lease.slot)
                generated += 1
            lease.finish(generated)
        finally:
            # Before the block is left: the slot goes to the next worker at once.
            engine.clear(lease.slot, lease.request)
    print(f"{name} has {generated} tokens")


async def main() -> None:
    parser = argparse.ArgumentParser(description="workers that share a pool of cells")
    parser.add_argument("--journal", type=Path)
    given = parser.parse_args()
    journal = given.journal or Path(tempfile.mkdtemp(prefix="host-")) / "journal.jsonl"
    config = kvalet.SchedulerConfig(cells=POOL, slots=SLOTS, journal=journal)
    engine = Engine()
    async with trio.open_nursery() as nursery:
        handle: kvalet.SchedulerHandle = await nursery.start(kvalet.run_scheduler, config)
        async with trio.open_nursery() as workers:
            for number in range(1, WORKERS + 1):
                workers.start_soon(answer, handle, engine, f"worker {number}")
        totals = handle.status()["totals"]
        print(
            f"{totals['finished']} of {WORKERS} finished, {totals['parks']} parks, "
            f"at most {engine.most} of {POOL} cells in use"
        )
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
