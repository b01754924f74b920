"""What the server says of itself: ``/slots``, ``/props``, ``/metrics``, the list of models."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from attrs import define

from kvalet.sims.fakeserver.options import Options
from kvalet.sims.fakeserver.pool import Pool
from kvalet.sims.fakeserver.requests import Ask
from kvalet.sims.fakeserver.room import left_to_predict
from kvalet.sims.fakeserver.slot import Slot, Totals, Where
from kvalet.sims.fakeserver.tokens import VOCABULARY
from kvalet.sims.fakeserver.wire import settings_of, slot_settings

_HELP: Final = {
    "prompt_tokens_total": "Number of prompt tokens processed, excluding cached tokens",
    "prompt_tokens_cached_total": "Number of prompt tokens reused from the cache",
    "prompt_seconds_total": "Total time spent processing prompts",
    "tokens_predicted_total": "Number of generation tokens processed",
    "tokens_predicted_seconds_total": "Total time spent generating tokens",
    "n_decode_total": "Total number of decode calls",
    "n_tokens_max": "Largest observed sequence length (prompt + generation)",
    "spec_decode_num_draft_tokens_total": "Speculative: Total draft tokens generated",
    "spec_decode_num_accepted_tokens_total": "Speculative: Total draft tokens accepted",
    "spec_decode_num_drafts_total": "Speculative: Total verification steps",
    "n_preempt_total": "Parks completed",
    "n_resume_total": "Parked slots put back",
    "preempt_recompute_total": "Parks that dropped their cells",
    "prompt_tokens_seconds": "Average prompt throughput in tokens/s",
    "predicted_tokens_seconds": "Average generation throughput in tokens/s",
    "requests_processing": "Number of requests processing",
    "requests_deferred": "Number of requests deferred",
    "n_busy_slots_per_decode": "Average number of busy slots per decode call",
    "requests_preempted": "Requests that are parked",
    "preempt_ram_bytes": "Host RAM held by parked sequences",
}
_CAPS: Final = {
    "supports_object_arguments": False,
    "supports_parallel_tool_calls": False,
    "supports_preserve_reasoning": False,
    "supports_reasoning_effort": False,
    "supports_string_content": True,
    "supports_system_role": True,
    "supports_tool_calls": False,
    "supports_tools": False,
    "supports_typed_content": False,
}


def slots_page(options: Options, pool: Pool, asked: dict[int, Ask]) -> list[dict[str, Any]]:
    """``GET /slots``. ``asked``: the request of each job, also of those that have ended."""
    return [_slot(options, slot, asked.get(slot.last_job)) for slot in pool.slots]


def _slot(options: Options, slot: Slot, ask: Ask | None) -> dict[str, Any]:
    pool, build = options.pool, options.build
    fields: dict[str, Any] = {
        "id": slot.number,
        "n_ctx": pool.slot_ctx,
        "speculative": pool.draft_max > 0,
        "is_processing": slot.busy,
    }
    moving = slot.where in (Where.LEAVING, Where.COMING)
    parked: dict[str, Any] = {}
    if build.parks:
        out = slot.where is Where.OUT
        parked["is_preempted"] = out or (moving and not build.record)
        if build.record:
            parked["is_transferring"] = moving
        parked["n_preempt"] = slot.parks
        if build.record:
            parked["n_recompute"] = slot.recomputes
    if ask is None:
        return fields | parked
    remain = left_to_predict(slot) if slot.busy and slot.work.n_predict >= 0 else -1
    following = {
        "has_next_token": slot.busy,
        "has_new_line": False,
        "n_remain": remain,
        "n_decoded": slot.predicted,
    }
    fields |= {
        "id_task": slot.last_job,
        "n_prompt_tokens": slot.length,
        "n_prompt_tokens_processed": slot.processed,
        "n_prompt_tokens_cache": slot.reused,
        **parked,
        "params": slot_settings(ask, _speculation(options)),
        "next_token": [following],
    }
    return fields


def props_page(options: Options) -> dict[str, Any]:
    """``GET /props``."""
    page: dict[str, Any] = {
        "default_generation_settings": {
            "params": settings_of(None, _speculation(options)),
            "n_ctx": options.pool.slot_ctx,
        },
        "total_slots": options.pool.slots,
        "model_alias": options.name,
        "model_ftype": "F16",
        "model_path": options.model,
        "modalities": {"vision": options.flags.mmproj is not None, "video": False, "audio": False},
        "media_marker": "<|image|>",
        "endpoint_slots": options.slots,
        "endpoint_props": options.props,
        "endpoint_metrics": options.metrics,
        "ui": False,
        "cors_proxy_enabled": False,
        "chat_template": "{% for message in messages %}...{% endfor %}",
        "chat_template_caps": _CAPS,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "build_info": options.build.info,
        "is_sleeping": False,
    }
    if options.build.exact:
        page["exact_concurrency"] = options.exact
    return page


def models_page(options: Options, now: int) -> dict[str, Any]:
    """``GET /v1/models``."""
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
    legacy: dict[str, Any] = {
        **{"name": options.name, "model": options.name, "modified_at": "", "size": ""},
        **{"digest": "", "type": "model", "description": "", "tags": [""]},
        "capabilities": ["completion"],
        "parameters": "",
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }
    meta = {
        "vocab_type": 1,
        "n_vocab": VOCABULARY,
        "n_ctx": options.pool.slot_ctx,
        "n_ctx_train": options.trained,
        "n_embd": 1,
        "n_params": 1,
        "size": 1,
        "ftype": "F16",
    }
    entry: dict[str, Any] = {
        **{"id": options.name, "aliases": [options.name], "tags": [], "object": "model"},
        **{"created": now, "owned_by": "llamacpp", "meta": meta},
    }
    return {"models": [legacy], "object": "list", "data": [entry]}


@define
class Gauges:
    """``/metrics``: a scrape begins the averages anew."""

    _prompt: tuple[int, float] = (0, 0.0)
    _predicted: tuple[int, float] = (0, 0.0)

    def page(self, options: Options, pool: Pool) -> bytes:
        """The whole page."""
        totals, build = pool.totals, options.build
        counters: dict[str, float] = _counters(totals)
        if build.parks:
            counters |= {"n_preempt_total": totals.parks, "n_resume_total": totals.resumes}
        if build.record:
            counters["preempt_recompute_total"] = totals.recomputes
        before = (self._prompt, self._predicted)
        self._prompt = (totals.prompt_tokens, totals.prompt_s)
        self._predicted = (totals.predicted, totals.predicted_s)
        gauges: dict[str, float] = {
            "prompt_tokens_seconds": _rate(before[0], self._prompt),
            "predicted_tokens_seconds": _rate(before[1], self._predicted),
            "requests_processing": sum(slot.busy for slot in pool.slots),
            "requests_deferred": sum(map(len, pool.queue)),
            "n_busy_slots_per_decode": totals.busy_slots / max(1, totals.decodes),
        }
        if build.parks:
            away = (Where.OUT,) if not build.record else (Where.OUT, Where.LEAVING, Where.COMING)
            gauges["requests_preempted"] = sum(slot.where in away for slot in pool.slots)
            gauges["preempt_ram_bytes"] = pool.parks.bytes_held if pool.parks else 0
        lines = [*_lines(counters, "counter"), *_lines(gauges, "gauge")]
        return "".join(lines).encode()


def _counters(totals: Totals) -> dict[str, float]:
    return {
        "prompt_tokens_total": totals.prompt_tokens,
        "prompt_tokens_cached_total": totals.prompt_cached,
        "prompt_seconds_total": totals.prompt_s,
        "tokens_predicted_total": totals.predicted,
        "tokens_predicted_seconds_total": totals.predicted_s,
        "n_decode_total": totals.decodes,
        "n_tokens_max": totals.tokens_max,
        "spec_decode_num_draft_tokens_total": totals.drafted,
        "spec_decode_num_accepted_tokens_total": totals.accepted,
        "spec_decode_num_drafts_total": totals.drafts,
    }


def _lines(values: dict[str, float], kind: str) -> list[str]:
    return [
        f"# HELP llamacpp:{name} {_HELP[name]}\n# TYPE llamacpp:{name} {kind}\n"
        f"llamacpp:{name} {value if isinstance(value, int) else format(value, '.6g')}\n"
        for name, value in values.items()
    ]


def _rate(before: tuple[int, float], now: tuple[int, float]) -> float:
    seconds = now[1] - before[1]
    return (now[0] - before[0]) / seconds if seconds > 0 else 0.0


def _speculation(options: Options) -> str:
    return ",".join(options.flags.spec_types) or "none"


def encode(page: object) -> bytes:
    """A page as JSON."""
    return msgspec.json.encode(page)
