"""Asks a server that has come up what it can do: does it decode, does it reuse what it restores?"""

from __future__ import annotations

import httpx
import msgspec

from kvalet.actors.decisions.state import HANDED_OVER
from kvalet.actors.server import open_client
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol import llama
from kvalet.protocol.commands import ProbeSeen
from kvalet.protocol.errors import KvaletError
from kvalet.protocol.ids import Cells, SlotId

PROMPT = "A valet parks the car, and brings it back when its owner asks for it."
TOKENS = 8
FILE = "probe.kv"

DECODE_S = 60.0
DECODE = {"prompt": "Hi", "n_predict": 4, "temperature": 0, "cache_prompt": False}
"""A server with a drafter may be healthy, and die at the first token it decodes with it."""


async def decodes(url: str, api_key: str) -> str:
    """Why this server cannot decode; empty when it can. What it refuses (4xx) is no verdict on
    its decoding."""
    body = msgspec.json.encode(DECODE)
    try:
        async with open_client(url, api_key, timeout_s=DECODE_S) as client:
            answer = await client.post("/completion", content=body)
    except httpx.TimeoutException:
        return f"it decoded nothing within {DECODE_S:.0f} s"
    except httpx.TransportError as error:
        return f"it died as it decoded its first tokens: {error!r}"
    if answer.status_code >= 500:
        return f"it failed as it decoded its first tokens: status {answer.status_code}"
    return ""


async def choose_method(upstream: UpstreamClient, generation: int, wanted: str) -> ProbeSeen:
    """Save, erase, restore and continue a short text in slot 0; compare what was reused.

    ``wanted`` is auto, save, recompute, or ``HANDED_OVER`` to a server that parks. Never fails:
    a server that cannot save, or that computes restored cells again, is one whose chats are
    parked by recompute.
    """
    if wanted == "recompute":
        return ProbeSeen(generation=generation, method="recompute", detail="as configured")
    if wanted == HANDED_OVER:
        return ProbeSeen(generation=generation, method=wanted, detail="the server parks chats")
    slot = SlotId(0)
    try:
        first = await _complete(upstream, slot, [])
        saved = await upstream.save(slot, FILE)
        await upstream.erase(slot)
        await upstream.restore(slot, FILE)
        again = await _complete(upstream, slot, first.tokens)
        await upstream.erase(slot)
    except KvaletError as fault:
        return ProbeSeen(generation=generation, method="recompute", detail=str(fault))
    finally:
        upstream.forget(FILE)
    reused = again.timings.cache_n
    method = "save" if reused >= saved.cells > 0 else "recompute"
    return ProbeSeen(
        generation=generation,
        method=method,
        saved=saved.cells,
        reused=Cells(reused),
        detail=f"{reused} of {saved.cells} restored cells were reused",
    )


async def _complete(upstream: UpstreamClient, slot: SlotId, answer: list[int]) -> llama.Completion:
    body = msgspec.json.encode({"content": PROMPT, "add_special": True})
    prompt = llama.decode_tokens(await upstream.ask("POST", "/tokenize", body))
    request = {
        "prompt": [*prompt, *answer],
        "n_predict": TOKENS if not answer else 1,
        "id_slot": slot,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
        "return_tokens": True,
    }
    return llama.decode_completion(
        await upstream.ask("POST", "/completion", msgspec.json.encode(request))
    )
