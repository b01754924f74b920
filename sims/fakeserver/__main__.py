"""``kvalet-sim-server``: the simulated server as a process with llama-server's own habits."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import trio
from attrs import evolve

from kvalet.actors.http import HttpLimits, serve_http
from kvalet.protocol.errors import EnvironmentFault
from kvalet.sims.fakeserver.build import BUILDS
from kvalet.sims.fakeserver.options import Options, StartRefused, read_options
from kvalet.sims.fakeserver.server import SimServer

_STARTED: Final = time.monotonic()
_INTERRUPTED_TWICE: Final = "Received second interrupt, terminating immediately."


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one server to its end and leave with its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        _tell_and_leave(words)
        options = _with_files(read_options(words, os.environ))
    except StartRefused as refused:
        for line in refused.lines:
            print(line, file=sys.stderr)
        _leave(refused.code)
    _leave(trio.run(serve, options))


async def serve(options: Options) -> int:
    """Listen, load and serve until a signal comes. Returns the exit code."""
    try:
        listeners = await trio.open_tcp_listeners(options.port, host=options.host)
    except OSError:
        _log(
            f"start: couldn't bind HTTP server socket, hostname: {options.host}, "
            f"port: {options.port}",
            "E",
        )
        _log("llama_server: exiting due to HTTP server error", "E")
        return 1
    server = SimServer(options, _log, die=_leave)
    draining = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await nursery.start(_watch_signals, server, draining)
        host, port = listeners[0].socket.getsockname()[:2]
        nursery.start_soon(_announce, server, f"http://{host}:{port}")
        try:
            await serve_http(server, listeners, HttpLimits(), draining=draining)
        except EnvironmentFault as fault:
            _log(f"llama_server: {fault}", "E")
            return 1
        nursery.cancel_scope.cancel()
    return 0


async def _announce(server: SimServer, url: str) -> None:
    await server.loaded.wait()
    _log(f"llama_server: listening on {url}")


async def _watch_signals(
    server: SimServer,
    draining: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if draining.is_set():
                _log(_INTERRUPTED_TWICE, "E")
                _leave(1)
            server.stopping.set()
            draining.set()


def _tell_and_leave(words: Sequence[str]) -> None:
    """Answer the options that only ask about the program."""
    build = BUILDS.get(os.environ.get("KVALET_SIM_BUILD") or "G4")
    answers: dict[str, Callable[[], str]] = {}
    if build is not None:
        answers = {
            **dict.fromkeys(("-h", "--help", "--usage"), lambda: build.help_text),
            "--version": lambda: build.version_text,
            "--list-devices": lambda: "Available devices:\n",
        }
    for word in words:
        if word in answers:
            print(answers[word](), end="")
            _leave(0)


def _with_files(options: Options) -> Options:
    """What of ``options`` lies on disk, looked at. Raises StartRefused."""
    if options.slot_dir is not None and not options.slot_dir.is_dir():
        raise StartRefused(
            f'error while handling argument "--slot-save-path": not a directory: {options.slot_dir}'
        )
    if options.api_key_file is None:
        return options
    lines = _read(options.api_key_file).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return evolve(options, api_keys=(*options.api_keys, *keys))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise StartRefused(
            f'error while handling argument "--api-key-file": error: failed to open file '
            f"'{path}': {error.strerror}"
        ) from None


def _log(text: str, level: str = "I") -> None:
    """One line on stderr, stamped as the real server stamps it."""
    micros = int((time.monotonic() - _STARTED) * 1e6)
    minutes, micros = divmod(micros, 60_000_000)
    seconds, micros = divmod(micros, 1_000_000)
    millis, micros = divmod(micros, 1000)
    stamp = f"{minutes}.{seconds:02}.{millis:03}.{micros:03}"
    print(f"{stamp} {level} srv  {text}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """End now: with a status, or by a signal when ``code`` is negative."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
