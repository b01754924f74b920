"""Pieces of every answer: settings, timings, counts, and the framing of events."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from attrs import frozen

from kvalet.protocol.sse import data
from kvalet.sims.fakeserver.requests import Ask
from kvalet.sims.fakeserver.slot import Ended, Failed, Progress, Timings
from kvalet.sims.fakeserver.tokens import EOS, piece_of

PING: Final = b":\n\n"
HEADERS: Final = {"server": "llama.cpp", "access-control-allow-origin": ""}
JSON_HEADERS: Final = {**HEADERS, "content-type": "application/json; charset=utf-8"}
STREAM_HEADERS: Final = {
    **HEADERS,
    "content-type": "text/event-stream",
    "x-accel-buffering": "no",
}

_SETTINGS: Final[dict[str, Any]] = {
    "seed": 4294967295,
    "temperature": 0.800000011920929,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.949999988079071,
    "min_p": 0.05000000074505806,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.10000000149011612,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.10000000149011612,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.8999999761581421,
    "stop": [],
    "max_tokens": -1,
    "n_predict": -1,
    "n_keep": 0,
    "n_discard": 0,
    "ignore_eos": False,
    "stream": False,
    "logit_bias": [],
    "n_probs": 0,
    "min_keep": 0,
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "chat_format": "Content-only",
    "reasoning_format": "deepseek",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
        "temperature",
    ],
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}
_ECHOED: Final = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "repeat_last_n", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "n_discard", "grammar"),
)
_ONLY_IN_ANSWERS: Final = frozenset(
    {"dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy"}
    | {"grammar_triggers", "preserved_tokens"}
)


@frozen(kw_only=True)
class Sender:
    """What an answer says of its server. ``record``: whether parks are counted in it."""

    model: str
    fingerprint: str
    created: int
    record: bool
    speculation: str = "none"


def settings_of(ask: Ask | None, speculation: str = "none") -> dict[str, Any]:
    """``generation_settings`` of a request; of none what ``/props`` shows as the default."""
    settings = dict(_SETTINGS)
    settings["speculative.types"] = speculation
    if ask is None:
        return _shown(settings)
    settings |= {name: ask.body[name] for name in _ECHOED if ask.body.get(name) is not None}
    templated = ask.surface not in ("completion", "text")
    settings |= {
        "stop": list(ask.stop),
        "max_tokens": ask.n_predict,
        "n_predict": ask.n_predict,
        "n_keep": ask.n_keep,
        "ignore_eos": ask.ignore_eos,
        "logit_bias": [{"bias": None, "token": EOS}] if ask.ignore_eos else [],
        "stream": ask.stream,
        "n_probs": ask.n_probs,
        "timings_per_token": ask.timings_per_token,
        "chat_format": "peg-native" if templated else "Content-only",
        "generation_prompt": "<|im_start|>assistant\n" if templated else "",
    }
    return settings


def slot_settings(ask: Ask, speculation: str) -> dict[str, Any]:
    """The part of them that ``/slots`` shows."""
    return _shown(settings_of(ask, speculation))


def _shown(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _ONLY_IN_ANSWERS}


def timings_of(timings: Timings) -> dict[str, Any]:
    """``timings`` of an answer."""
    prompt_n, predicted_n = timings.prompt_n, timings.predicted_n
    fields: dict[str, Any] = {
        "cache_n": timings.cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": timings.prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / timings.prompt_ms if timings.prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": timings.predicted_ms / predicted_n if predicted_n else 0.0,
        "predicted_per_second": (
            1e3 * predicted_n / timings.predicted_ms if timings.predicted_ms else 0.0
        ),
    }
    if timings.draft_n:
        fields |= {"draft_n": timings.draft_n, "draft_n_accepted": timings.draft_n_accepted}
    return fields


def progress_of(out: Progress) -> dict[str, Any]:
    """``prompt_progress`` of a chunk."""
    return {
        "total": out.total,
        "cache": out.cache,
        "processed": out.processed,
        "time_ms": out.time_ms,
    }


def usage_of(ended: Ended) -> dict[str, Any]:
    """``usage`` in the OpenAI dialect."""
    return {
        "completion_tokens": ended.predicted,
        "prompt_tokens": ended.evaluated,
        "total_tokens": ended.predicted + ended.evaluated,
        "prompt_tokens_details": {"cached_tokens": ended.timings.cache_n},
    }


def record_of(sender: Sender, *ended: Ended) -> dict[str, Any]:
    """``preempt`` of a final object, where the build has it."""
    if not sender.record:
        return {}
    parks = sum(one.parks for one in ended)
    return {"preempt": {"parks": parks, "recomputes": sum(one.recomputes for one in ended)}}


def probabilities(ids: tuple[int, ...]) -> list[dict[str, Any]]:
    """One entry for each token: the only candidate is the one that was chosen."""
    entries: list[dict[str, Any]] = []
    for token in ids:
        piece = piece_of(token)
        entry = {
            "id": token,
            "token": piece.decode("utf-8", "replace"),
            "bytes": list(piece),
            "logprob": -(token % 97) / 64,
        }
        entries.append({**entry, "top_logprobs": [entry]})
    return entries


def event(fields: object) -> bytes:
    """One event of a stream."""
    return data(msgspec.json.encode(fields))


def named_event(fields: dict[str, Any], name: str = "") -> bytes:
    """One event under its own ``type``, or under ``name``."""
    return f"event: {name or fields['type']}\n".encode() + event(fields)


def error_fields(failed: Failed) -> dict[str, Any]:
    """The error object of a job that failed."""
    return {"code": failed.code, "message": failed.message, "type": failed.kind}
