"""Programs that a benchmark runs beside itself, each in a process of its own.

Each prints its URL as its first line and ends when its stdin does, so that none outlives
the benchmark, however that ends. ``python -m kvalet.sims.programs UPSTREAM STATE_DIR`` is
one of them: kvalet in front of a running llama-server, as ``kvalet serve --attach``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from kvalet.actors import logs
from kvalet.actors.app import serve
from kvalet.actors.config import Config
from kvalet.protocol.errors import EnvironmentFault

START_S = 60.0
GRACE_S = 5.0


@attrs.frozen
class Program:
    """A running program and where it listens."""

    url: str
    pid: int

    def cpu_ns(self) -> int | None:
        """CPU time of its living threads; None where the kernel does not tell."""
        try:
            threads = list(Path(f"/proc/{self.pid}/task").iterdir())
            return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
        except (OSError, ValueError, IndexError):
            return None


@asynccontextmanager
async def running(
    module: str, *arguments: str, more_env: Mapping[str, str] | None = None
) -> AsyncGenerator[Program, None]:
    """``python -m MODULE ARGUMENTS…`` until the block is left. Raises EnvironmentFault."""
    command = [sys.executable, "-m", module, *arguments]
    start = partial(
        trio.run_process,
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(more_env or {})},
        # Ctrl-C is for the benchmark, which ends its programs by itself.
        start_new_session=True,
        check=False,
    )
    async with trio.open_nursery() as nursery:
        process = await nursery.start(start)
        assert process.stdin is not None
        assert process.stdout is not None
        async with process.stdout:
            try:
                yield Program(await _first_line(process.stdout, module), process.pid)
            finally:
                with trio.CancelScope(shield=True):
                    await process.stdin.aclose()
                    with trio.move_on_after(GRACE_S):
                        await process.wait()
        nursery.cancel_scope.cancel()


async def _first_line(stdout: trio.abc.ReceiveStream, module: str) -> str:
    line = b""
    with trio.move_on_after(START_S):
        while not line.endswith(b"\n"):
            piece = await stdout.receive_some()
            if not piece:
                raise EnvironmentFault(f"{module} did not start; its reason stands above")
            line += piece
    if not line.endswith(b"\n"):
        raise EnvironmentFault(f"{module} was not ready within {START_S:g} s")
    return line.decode().strip()


async def _kvalet(upstream: str, state_dir: Path) -> None:
    logs.configure("error")
    config = Config(attach=upstream, port=0, state_dir=state_dir)
    async with trio.open_nursery() as nursery:
        handle = await nursery.start(serve, config)
        print(handle.url, flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_kvalet, sys.argv[1], Path(sys.argv[2]))
