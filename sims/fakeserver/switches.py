"""The environment of the simulation and of a parking build's tests: rates, knobs, exact mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from attrs import evolve, frozen

from kvalet.actors.decisions.plan.flags import ubatch_of
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.sims.fakeserver import constants
from kvalet.sims.fakeserver.build import BUILDS
from kvalet.sims.fakeserver.slot import Order, Parking, Policy

Kind = Literal["plain", "recurrent", "hybrid", "mrope"]
"""What sort of model is pretended."""

_KINDS: Final[tuple[Kind, ...]] = ("plain", "recurrent", "hybrid", "mrope")
_ORDERS: Final[tuple[Order, ...]] = ("head", "pass")
_POLICIES: Final[tuple[Policy, ...]] = ("smallest", "largest", "youngest", "oldest")
_WIDE_CACHES: Final = frozenset({"f32", "f16", "bf16"})


@frozen(kw_only=True)
class Wishes:
    """All of ``KVALET_SIM_*`` but the faults, and the variables that only the server reads."""

    build: str = "G4"
    kind: Kind = "plain"
    tokens_per_s: float = constants.TOKENS_PER_S
    prefill_per_s: float = constants.PREFILL_PER_S
    copy_bytes_per_s: float = constants.COPY_BYTES_PER_S
    cell_bytes: int = constants.CELL_BYTES
    answer_tokens: int = 0
    ready_s: float = constants.READY_S
    trained: int = constants.CONTEXT_TRAINED
    neighbours: bool = True
    recompute_differs: bool = False
    exact: bool = False
    server_env: Mapping[str, str]


@frozen(kw_only=True)
class Knobs:
    """What is known of parking before the test knobs are read."""

    budget_mib: int
    asynchronous: bool
    recompute: bool
    restore_failures: int
    armed: bool
    kind: Kind
    exact: bool


def read_wishes(env: Mapping[str, str]) -> Wishes:
    """Read ``KVALET_SIM_*``. ValueError names the variable that is wrong."""

    def rate(name: str, default: float, *, least: float = 1e-6) -> float:
        text = env.get(f"KVALET_SIM_{name}", "")
        try:
            number = float(text) if text else default
        except ValueError:
            number = -1.0
        if not least <= number < float("inf"):
            raise ValueError(f"KVALET_SIM_{name} must be a number from {least:g} on, not {text!r}")
        return number

    build = env.get("KVALET_SIM_BUILD", "") or "G4"
    if build not in BUILDS:
        raise ValueError(f"KVALET_SIM_BUILD must be one of {', '.join(BUILDS)}, not {build!r}")
    kind: Kind = _one_of(env, "KVALET_SIM_MODEL_KIND", _KINDS)
    return Wishes(
        build=build,
        kind=kind,
        tokens_per_s=rate("TOKENS_PER_S", constants.TOKENS_PER_S),
        prefill_per_s=rate("PREFILL_PER_S", constants.PREFILL_PER_S),
        copy_bytes_per_s=rate("COPY_MIB_PER_S", constants.COPY_BYTES_PER_S / 2**20) * 2**20,
        cell_bytes=int(rate("CELL_BYTES", constants.CELL_BYTES, least=1)),
        answer_tokens=int(rate("ANSWER_TOKENS", 0, least=0)),
        ready_s=rate("READY_S", constants.READY_S, least=0),
        trained=int(rate("CONTEXT", constants.CONTEXT_TRAINED, least=1)),
        neighbours=env.get("KVALET_SIM_NEIGHBOURS", "1") != "0",
        recompute_differs=env.get("KVALET_SIM_RECOMPUTE_DIFFERS", "0") == "1",
        exact=_atoi(env.get("LLAMA_EXACT_CONCURRENCY", "")) != 0,
        server_env={name: env[name] for name in env if name.startswith("LLAMA_SERVER_PREEMPT_")},
    )


def read_parking(
    knobs: Knobs, env: Mapping[str, str]
) -> tuple[Parking | None, int, tuple[str, ...]]:
    """How this launch parks, the pool's page and what is logged about both.

    None: it does not park. ValueError for a knob that keeps the model from loading.
    """
    prefix = "LLAMA_SERVER_PREEMPT_"
    order: Order = _one_of(env, f"{prefix}RESUME", _ORDERS)
    page = constants.EXACT_PAGE_CELLS if knobs.exact else 1
    if not knobs.armed:
        return None, page, ()
    if knobs.kind == "recurrent":
        off = "preemption: off, the recurrent cache holds one state per sequence"
        return None, page, (off,)
    page = max(page, _atoi(env.get(f"{prefix}GRANULARITY", "")))
    policy: Policy = _one_of(env, f"{prefix}POLICY", _POLICIES)
    parking = Parking(
        budget_mib=knobs.budget_mib,
        asynchronous=knobs.asynchronous,
        recompute=knobs.recompute,
        every=_atoi(env.get(f"{prefix}EVERY", "")),
        policy=policy,
        resume=order,
        planner=env.get(f"{prefix}PLANNER") != "off",
        fail_save=_atoi(env.get(f"{prefix}FAIL_SAVE", "")) != 0,
        restore_failures=knobs.restore_failures,
    )
    notes = [f"{name} = {env[name]} (a test knob)" for name in sorted(env)]
    if parking.asynchronous and knobs.kind == "hybrid":
        notes.append("preemption: a recurrent state does not stay in one row, parking at once")
        parking = evolve(parking, asynchronous=False)
    if page > 1:
        notes.append(f"preemption: the kv pool allocates {page} cells at a time, planning in pages")
    if parking.asynchronous:
        notes.append("preemption: parking and resuming asynchronously")
    kind = "pinned" if parking.asynchronous else "pageable"
    notes.append(f"preemption: parking into {kind} host memory")
    return parking, page, tuple(notes)


def check_exact(flags: ServerFlags, *, cache_reuse: bool, context_shift: bool, kind: Kind) -> str:
    """Why this launch cannot be exact, as the server says it; empty when it can."""
    batch = ubatch_of(flags) + flags.slots
    reasons = {
        "needs a unified KV cache": not flags.unified,
        "needs flash attention": flags.flash_attn == "off",
        "needs an unquantized KV cache": not {flags.type_k, flags.type_v} <= _WIDE_CACHES,
        "needs the KV cache offloaded": not flags.kv_offload,
        "does not support --cache-reuse": cache_reuse,
        "does not support --context-shift": context_shift,
        "does not support experts on the CPU": flags.cpu_moe or flags.n_cpu_moe > 0,
        "does not support M-RoPE together with a projector": kind == "mrope"
        and flags.mmproj is not None,
        f"needs a batch of at least {batch} tokens for a {ubatch_of(flags)}-token ubatch. "
        f"Raise -b to {batch}": flags.batch < batch,
    }
    for reason, applies in reasons.items():
        if applies:
            return f"exact concurrency {reason}"
    return ""


_Word = TypeVar("_Word", bound=str)


def _one_of(env: Mapping[str, str], name: str, words: tuple[_Word, ...]) -> _Word:
    """The word that a variable says, one of ``words``; the first of them when it is not set."""
    said = env.get(name, "") or words[0]
    for word in words:
        if word == said:
            return word
    raise ValueError(f"{name} must be one of {', '.join(words)}, not {said!r}")


def _atoi(text: str) -> int:
    """A number as C reads it: 0 where there is none."""
    digits = text.strip()
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    count = len(digits) - len(digits.lstrip("0123456789"))
    return sign * int(digits[:count] or "0")
