"""A plan in words and figures: the JSON that scripts read, and the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvalet.actors.decisions.plan.placement import HOST
from kvalet.actors.decisions.plan.plan import Plan
from kvalet.actors.decisions.plan.price import Term, TermName

TITLES: Final[dict[TermName, str]] = {
    "weights": "weights",
    "kv": "keys and values",
    "state": "recurrent state",
    "draft": "drafter's keys and values",
    "compute": "compute buffer",
    "draft-compute": "drafter's compute buffer",
    "output": "logits",
    "projector": "projector",
    "runtime": "runtime and graphs",
}


def context_report(plan: Plan) -> dict[str, int]:
    """Bytes of the caches and the state, over all devices."""
    kept, draft = plan.price.context, plan.price.draft
    figures = {
        "non_swa": kept.of_kind("non_swa") + kept.of_kind("indexer"),
        "swa": kept.of_kind("swa"),
        "recurrent": kept.state.bytes,
        "draft": draft.bytes if draft is not None else 0,
    }
    return {**figures, "total": sum(figures.values())}


def report(plan: Plan, argv: Sequence[str] = ()) -> dict[str, Any]:
    """The whole plan as plain values. ``argv`` is the command line that it leads to."""
    priced, sizes = plan.price, plan.price.context.sizes
    devices = dict.fromkeys(term.device for term in priced.terms)
    return {
        "arch": plan.arch,
        "build": plan.build,
        "rules": priced.context.rules,
        "path": priced.context.layers.path,
        "swa_tier": priced.context.layers.tier,
        "context": context_report(plan),
        "compute": priced.of("compute", "draft-compute"),
        "output": priced.of("output"),
        "weights": priced.of("weights"),
        "overhead": priced.of("runtime", "projector"),
        "host": {
            "planned": priced.on(HOST),
            "checkpoint": plan.host.checkpoint,
            "checkpoints": plan.host.checkpoints,
            "prompt_cache": -1 if plan.host.prompt_cache is None else plan.host.prompt_cache,
        },
        "devices": {
            name: {"needed": priced.on(name), "budget": plan.budgets.get(name)} for name in devices
        },
        "n_ctx": sizes.ctx,
        "n_ctx_seq": sizes.ctx_seq,
        "n_ctx_slot": sizes.ctx_slot,
        "n_batch": sizes.batch,
        "n_ubatch": sizes.ubatch,
        "slots": sizes.slots,
        "kv_unified": sizes.unified,
        "split": plan.split,
        "tensor_split": list(plan.tensor_split),
        "cards": list(plan.cards),
        "max_context": plan.max_ctx,
        "fits": plan.fits,
        "argv": list(argv),
        "env_removed": list(plan.env_removed),
        "warnings": [{"code": code, "message": message} for code, message in plan.warnings],
        "certain": plan.certain,
        "terms": [
            {
                "name": term.name,
                "device": term.device,
                "bytes": term.bytes,
                "known": term.known,
                "why": why_of(plan, term),
            }
            for term in priced.terms
        ],
    }


def why_of(plan: Plan, term: Term) -> str:
    """How this term comes about, in the words of the launch."""
    kept = plan.price.context
    match term.name:
        case "kv":
            cells = "; ".join(
                f"{len(cache.layers)} layers x {cache.cells} cells"
                + (f" x {cache.streams} streams" if cache.streams > 1 else "")
                + f" ({cache.kind})"
                for cache in kept.caches
            )
            return f"{cells}, K {plan.flags.type_k}, V {plan.flags.type_v}"
        case "state":
            return f"{len(kept.state.layers)} layers x {kept.state.rows} rows, always f32"
        case "draft":
            flags = plan.flags
            return f"K {flags.draft_type_k}, V {flags.draft_type_v}, as many cells as the target"
        case "compute" | "draft-compute":
            return term.why or f"micro-batches of {kept.sizes.ubatch} tokens"
        case "output":
            return term.why or f"one row of logits for each of {kept.sizes.slots} slots"
        case "weights" | "projector" | "runtime":
            return term.why
