"""One answer's figures over all of its legs, and the events that are rewritten to carry them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvalet.protocol import sse
from kvalet.protocol.llama import Timings
from kvalet.protocol.openai_stream import JSON_FAULTS, garbage

_ABSENT = b"null"


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """One answer's figures over all of its legs.

    ``prompt``, ``cached`` and ``cache_n`` are the first leg's, since later prompts contain
    the answer itself; all others are sums. Times are milliseconds.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    legs: int = 0

    def after(self, leg: Timings) -> Totals:
        """These figures with one more leg in them."""
        first = self.legs == 0
        return Totals(
            prompt=leg.cache_n + leg.prompt_n if first else self.prompt,
            completion=self.completion + leg.predicted_n,
            cached=leg.cache_n if first else self.cached,
            cache_n=leg.cache_n if first else self.cache_n,
            prompt_n=self.prompt_n + leg.prompt_n,
            prompt_ms=self.prompt_ms + leg.prompt_ms,
            predicted_n=self.predicted_n + leg.predicted_n,
            predicted_ms=self.predicted_ms + leg.predicted_ms,
            draft_n=self.draft_n + leg.draft_n,
            draft_n_accepted=self.draft_n_accepted + leg.draft_n_accepted,
            legs=self.legs + 1,
        )

    def timings(self) -> dict[str, int | float]:
        """These figures in the shape of the server's ``timings``."""
        # The server starts its clock when a leg's first token is there already.
        steps = self.predicted_n - self.legs
        drafts = {"draft_n": self.draft_n, "draft_n_accepted": self.draft_n_accepted}
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "prompt_per_token_ms": _over(self.prompt_ms, self.prompt_n),
            "prompt_per_second": _over(1000.0 * self.prompt_n, self.prompt_ms),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_token_ms": _over(self.predicted_ms, steps),
            "predicted_per_second": _over(1000.0 * steps, self.predicted_ms),
            **(drafts if self.draft_n else {}),
        }

    def usage(self) -> dict[str, int]:
        """These figures under the names of OpenAI's ``usage``."""
        return {
            "completion_tokens": self.completion,
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
        }


class KvaletUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What admission and parking meant for one answer; times in seconds."""

    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    waited_s: float = 0.0
    parked_s: float = 0.0


def rename(payload: bytes, new_id: str, new_created: int) -> bytes:
    """``payload`` under another top-level id and time; every other value keeps its bytes.

    A field that is not there stays away, so does everything in what is no JSON object.
    """
    try:
        fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except JSON_FAULTS:
        return payload
    if "id" in fields:
        fields["id"] = _raw(new_id)
    if "created" in fields:
        fields["created"] = _raw(new_created)
    return msgspec.json.encode(fields)


def final_event(payload: bytes, totals: Totals | None, kvalet: KvaletUsage) -> bytes:
    """The event of a finish or usage chunk, with the answer's figures instead of its last leg's.

    ``kvalet`` goes into ``usage``, or beside ``timings`` where there is no usage; a chunk
    with neither stays as it is. ``totals`` None leaves the server's own figures. ServerFault
    when ``payload`` is not a JSON object.
    """
    try:
        fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        has_usage, has_timings = _has(fields, "usage"), _has(fields, "timings")
        if not has_usage and not has_timings:
            return sse.data(payload)
        if has_timings and totals is not None:
            fields["timings"] = _merged(fields["timings"], totals.timings())
        if has_usage:
            fields["usage"] = _usage(fields["usage"], totals, kvalet)
        else:
            fields["kvalet"] = _raw(kvalet)
    except JSON_FAULTS as error:
        raise garbage(error) from None
    return sse.data(msgspec.json.encode(fields))


def _usage(raw: msgspec.Raw, totals: Totals | None, kvalet: KvaletUsage) -> msgspec.Raw:
    if totals is None:
        return _merged(raw, {"kvalet": kvalet})
    details = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("prompt_tokens_details")
    cached = _merged(details or msgspec.Raw(_ABSENT), {"cached_tokens": totals.cached})
    figures = {**totals.usage(), "prompt_tokens_details": cached, "kvalet": kvalet}
    return _merged(raw, figures)


def _merged(raw: msgspec.Raw, changes: Mapping[str, object]) -> msgspec.Raw:
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None) or {}
    return _raw({**fields, **changes})


def _has(fields: dict[str, msgspec.Raw], name: str) -> bool:
    return bytes(fields.get(name, _ABSENT)) != _ABSENT


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _over(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0
