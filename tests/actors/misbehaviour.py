"""What a scripted llama-server does wrong, or simply otherwise, in the middle of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import trio

HOURS_S = 50_000.0
HARMLESS = (
    *("pings", "notices", "silence", "no-timings", "slow-prefill", "pause"),
    *("long-park", "early-park", "recompute", "dead-park", "silent-park"),
)
"""What leaves the stream whole, if it comes back at all."""


async def misbehave(fault: str) -> AsyncIterator[bytes]:
    """What a stream does in the middle, instead of a token or before it."""
    match fault:
        case "cut":
            raise httpx.ReadError("reset by peer")
        case "cut-mid-event":
            yield b'data: {"choices":[{"index":0,"delta":{"content":"zz'
        case "garbage":
            yield b"data: {nonsense\n\n"
        case "error-event":
            yield b'data: {"error":{"message":"decode failed","code":500}}\n\n'
        case "silence":
            await trio.sleep(HOURS_S)
        case "pause":
            await trio.sleep(100)
        case "pings":
            for _ in range(100_000):
                await trio.sleep(1)
                yield b":\n\n"
        case "long-park":
            yield b": preempted\n\n"
            for _ in range(211):
                await trio.sleep(2)
                yield b": preempt-keepalive\n\n"
            yield b": resumed\n\n"
        case "recompute":
            yield b": preempted\n\n"
            await trio.sleep(3)
            yield b": resumed\n\n: recomputed\n\n"
        case "silent-park":
            await trio.sleep(1500)
        case "dead-park":
            yield b": preempted\n\n: resumed\n\n"
            await trio.sleep(HOURS_S)
        case "notices":
            yield b": preempted\n\n" + b": preempt-keepalive\n\n" * 200 + b": resumed\n\n"
        case _:
            return
