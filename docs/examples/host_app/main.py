"""A host application with a ``protocol`` package of its own, and kvalet beside it.

    PYTHONPATH=host_app python host_app/main.py JOURNAL

kvalet claims one import name, its own: ``protocol``, ``actors`` and ``sims`` stay free.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio
from protocol.jobs import Job  # noqa: TID251 - the host's

import kvalet
import kvalet.protocol.events
import protocol  # noqa: TID251 - the host's

JOBS = (Job("a letter", 20, 30), Job("a poem", 12, 16), Job("a novel", 4000, 1))


async def carry_out(handle: kvalet.SchedulerHandle, job: Job) -> None:
    """One job on cells of the pool; one that can never fit is refused, with the figures."""
    try:
        async with handle.lease(prompt=job.words, cap=job.more) as lease:
            written = 0
            while written < job.more:
                if written == lease.room and isinstance(
                    await lease.extend(written), kvalet.Parking
                ):
                    lease.freed()
                    await lease.wait_resumed()
                await trio.lowlevel.checkpoint()
                written += 1
            lease.finish(written)
        print(f"{job.title}: {written} words more")
    except kvalet.ClientFault as fault:
        print(f"{job.title}: {fault}")


async def main(journal: Path) -> None:
    assert protocol.OWNER == "the host"
    assert kvalet.protocol.events.__name__ == "kvalet.protocol.events"
    config = kvalet.SchedulerConfig(cells=256, slots=2, journal=journal)
    async with trio.open_nursery() as nursery:
        handle: kvalet.SchedulerHandle = await nursery.start(kvalet.run_scheduler, config)
        async with trio.open_nursery() as jobs:
            for job in JOBS:
                jobs.start_soon(carry_out, handle, job)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
