"""What kvalet costs a stream: the same answers straight from a fake upstream, and through kvalet.

Client, kvalet and upstream are processes of their own. Every figure is a pair of runs next
to each other; their ratio or difference counts, not the speed of the machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import msgspec
import trio

from kvalet.protocol.errors import EnvironmentFault, ServerFault
from kvalet.sims.figures import Figure, middle, percentile
from kvalet.sims.programs import Program, running

STREAMS = (1, 4, 16)
EVENTS_PER_S = 100.0
"""The pace of one stream, that of a fast model."""
ADDED_P99_US_MAX = 5_000.0
"""The ceiling at the largest of STREAMS."""
READ_BYTES = 1 << 16

_CONTENT = b'"content":"'
_SENT = re.compile(rb'"sent_ns":(\d+)')


@attrs.frozen
class Load:
    """What all streams of one run do: ``events`` each, at ``events_per_s`` (0: unpaced)."""

    streams: int
    events: int
    events_per_s: float = 0.0


@attrs.frozen
class Run:
    """One run of a load: its wall time, and how late each event came (paced runs only)."""

    wall_s: float
    late_us: list[float]
    cpu_us: float | None = None


async def measure_relay(
    repeats: int, burst_events: int, paced_s: float, directory: Path
) -> list[Figure]:
    """Throughput, added latency and CPU for 1, 4 and 16 streams.

    A burst is ``burst_events`` in all; paced streams last ``paced_s``.
    """
    async with (
        running("kvalet.sims.fakeupstream", str(max(STREAMS))) as upstream,
        running("kvalet.sims.programs", upstream.url, str(directory)) as kvalet,
    ):
        for program in (upstream, kvalet):
            await drive(program, Load(streams=1, events=10))
        figures: list[Figure] = []
        for streams in STREAMS:
            burst = Load(streams=streams, events=max(1, burst_events // streams))
            figures += compare_bursts(await pairs(repeats, upstream, kvalet, burst), burst)
            paced = Load(
                streams=streams,
                events=max(1, round(paced_s * EVENTS_PER_S)),
                events_per_s=EVENTS_PER_S,
            )
            figures += compare_paced(await pairs(repeats, upstream, kvalet, paced), paced)
    return figures


async def pairs(
    repeats: int, upstream: Program, kvalet: Program, load: Load
) -> list[tuple[Run, Run]]:
    """Runs straight and through kvalet, in turns; neither is always the first."""
    found: list[tuple[Run, Run]] = []
    for number in range(repeats):
        if number % 2:
            through = await drive(kvalet, load)
            straight = await drive(upstream, load)
        else:
            straight = await drive(upstream, load)
            through = await drive(kvalet, load)
        found.append((straight, through))
    return found


def compare_bursts(runs: list[tuple[Run, Run]], load: Load) -> list[Figure]:
    """Events per second through kvalet, and their share of the straight ones."""
    total = load.events * load.streams
    made_of = f"{total} events, {len(runs)} pairs"

    def figure(name: str, unit: str, value: Callable[[Run, Run], float]) -> Figure:
        return Figure(
            part="relay",
            name=f"{name}, {streams_of(load)}",
            value=middle([value(straight, through) for straight, through in runs]),
            unit=unit,
            note=made_of,
        )

    figures = [
        figure("burst", "events/s", lambda _, through: total / through.wall_s),
        figure("burst, through/straight", "ratio", lambda a, b: a.wall_s / b.wall_s),
    ]
    return figures + cpu_figures(runs, load, "burst")


def compare_paced(runs: list[tuple[Run, Run]], load: Load) -> list[Figure]:
    """What kvalet adds to the median latency and to the 99th percentile."""
    figures: list[Figure] = []
    for percent in (50, 99):
        added = [
            percentile(through.late_us, percent) - percentile(straight.late_us, percent)
            for straight, through in runs
        ]
        judged = percent == 99 and load.streams == max(STREAMS)
        figures.append(
            Figure(
                part="relay",
                name=f"added latency p{percent}, {streams_of(load)}",
                value=middle(added),
                unit="us",
                target=ADDED_P99_US_MAX if judged else None,
                ceiling=True,
                note=f"{load.events_per_s:g} events/s a stream, {len(runs)} pairs",
            )
        )
    return figures + cpu_figures(runs, load, "paced")


def cpu_figures(runs: list[tuple[Run, Run]], load: Load, kind: str) -> list[Figure]:
    """CPU time of kvalet's process per event, where the kernel tells it."""
    spent = [through.cpu_us for _, through in runs if through.cpu_us is not None]
    if not spent:
        return []
    return [
        Figure(
            part="relay",
            name=f"{kind}, CPU per event, {streams_of(load)}",
            value=middle([cpu_us / (load.events * load.streams) for cpu_us in spent]),
            unit="us",
            note=f"kvalet's process, {len(spent)} runs",
        )
    ]


def streams_of(load: Load) -> str:
    """How many streams, in words."""
    return "1 stream" if load.streams == 1 else f"{load.streams} streams"


async def drive(program: Program, load: Load) -> Run:
    """Run ``load`` against ``program``. Raises ServerFault when an event is missing."""
    late_us: list[float] = []
    cpu_ns = program.cpu_ns()
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(load.streams):
            nursery.start_soon(_stream, program.url, load, late_us)
    wall_s = time.perf_counter() - started
    after_ns = program.cpu_ns()
    if cpu_ns is None or after_ns is None:
        return Run(wall_s, late_us)
    return Run(wall_s, late_us, (after_ns - cpu_ns) / 1000)


async def _stream(url: str, load: Load, late_us: list[float]) -> None:
    """One answer, read off the socket: an HTTP library would cost more than what is measured."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    try:
        stream = await trio.open_tcp_stream(address.hostname, address.port)
    except OSError as error:
        raise EnvironmentFault(f"nobody answers at {url}: {error}") from error
    async with stream:
        await stream.send_all(_request(address.netloc, load))
        heard = await _hear(stream, late_us if load.events_per_s else None)
    if heard != load.events:
        raise ServerFault(f"{heard} of {load.events} events came through {url}")


async def _hear(stream: trio.SocketStream, late_us: list[float] | None) -> int:
    """Content events up to the end of the connection; their delays go to ``late_us``."""
    heard = 0
    rest = b""
    while piece := await stream.receive_some(READ_BYTES):
        now_ns = time.monotonic_ns()
        whole, mark, rest = (rest + piece).rpartition(b"\n\n")
        if not mark:
            continue
        heard += whole.count(_CONTENT)
        if late_us is not None:
            late_us += [(now_ns - int(sent)) / 1000 for sent in _SENT.findall(whole)]
    return heard


def _request(host: str, load: Load) -> bytes:
    body = msgspec.json.encode(
        {
            "messages": [{"role": "user", "content": "Speak."}],
            "max_tokens": load.events,
            "stream": True,
            "events_per_s": load.events_per_s,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
