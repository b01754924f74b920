"""Settles the park method at load: does this server reuse what it restored, for this model?"""

from __future__ import annotations

import msgspec

from kvalet.actors.decisions.state import HANDED_OVER
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol import llama
from kvalet.protocol.commands import ProbeSeen
from kvalet.protocol.errors import KvaletError
from kvalet.protocol.ids import Cells, SlotId

PROMPT = "A valet parks the car, and brings it back when its owner asks for it."
TOKENS = 8
FILE = "probe.kv"


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
