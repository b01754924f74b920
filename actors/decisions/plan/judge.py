"""What the server says that it allocated, read from its own log, and how the plan compares.

The server logs sizes to a hundredth of a MiB, from log level 4 on. Its target's context comes
first; whatever is built after it belongs to a drafter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from attrs import field, frozen

from kvalet.actors.decisions.plan.devices import MIB
from kvalet.actors.decisions.plan.explain import context_report
from kvalet.actors.decisions.plan.plan import Plan
from kvalet.protocol.commands import MemoryFigure

T = TypeVar("T")
LOGGED_STEP: Final = -(-MIB // 100)
"""Bytes: the server rounds its sizes to a hundredth of a MiB."""

_SIZE: Final = r"size =\s*(?P<mib>\d+\.\d+) MiB"
_KINDS: Final = (
    ("context", re.compile(r"llama_context: n_ctx +=")),
    ("swa", re.compile(r"llama_kv_cache_iswa: creating +SWA KV cache")),
    ("non_swa", re.compile(r"llama_kv_cache_iswa: creating non-SWA KV cache")),
    ("cells", re.compile(rf"llama_kv_cache: {_SIZE}")),
    ("recurrent", re.compile(rf"llama_memory_recurrent: {_SIZE}")),
    ("compute", re.compile(rf"sched_reserve: +(?P<device>\S+) compute buffer {_SIZE}")),
    ("output", re.compile(rf"llama_context: +(?P<device>\S+) +output buffer {_SIZE}")),
)


@frozen(kw_only=True)
class Reported:
    """Sizes in MiB as the server logged them: its caches by kind, its buffers by device.

    ``seen`` is False when the log holds no context at all: a build or a log level that does
    not tell.
    """

    kept: Mapping[str, float] = field(factory=dict[str, float])
    buffers: Mapping[str, float] = field(factory=dict[str, float])
    seen: bool = False


def read_log(lines: Iterable[str]) -> Reported:
    """The sizes in a server's log up to now."""
    kept, buffers = Counter[str](), Counter[str]()
    contexts, kind = 0, "non_swa"
    for line in lines:
        for name, pattern in _KINDS:
            match = pattern.search(line)
            if match is None:
                continue
            of_drafter = contexts > 1
            if name == "context":
                contexts, kind = contexts + 1, "non_swa"
            elif name in ("swa", "non_swa"):
                kind = name
            elif name == "cells":
                kept["draft" if of_drafter else kind] += _hundredths(match)
            elif name == "recurrent":
                kept["draft" if of_drafter else "recurrent"] += _hundredths(match)
            else:
                device = _device(match["device"])
                buffers[f"{name} {device}"] += _hundredths(match)
            break
    return Reported(
        kept={name: size / 100 for name, size in kept.items()},
        buffers={name: size / 100 for name, size in buffers.items()},
        seen=contexts > 0,
    )


def compare(plan: Plan, reported: Reported) -> tuple[MemoryFigure, ...]:
    """Every figure of the plan that the server reports too, and every one that only it has."""
    planned = {**_named("context", context_report(plan)), **_buffers(plan)}
    del planned["context total"]
    said = {**_named("context", reported.kept), **reported.buffers}
    figures = (
        MemoryFigure(
            name=name,
            planned=planned.get(name, 0),
            reported=round(said.get(name, 0.0) * MIB),
        )
        for name in dict.fromkeys((*planned, *said))
    )
    return tuple(figure for figure in figures if figure.planned or figure.reported)


def agrees(figure: MemoryFigure) -> bool:
    """Whether plan and report are the same, as far as a log of hundredths can tell."""
    return abs(figure.excess) <= LOGGED_STEP


def _buffers(plan: Plan) -> dict[str, int]:
    compute = plan.price.of("compute", "draft-compute")
    return {**_named("compute", compute), **_named("output", plan.price.of("output"))}


def _named(group: str, sizes: Mapping[str, T]) -> dict[str, T]:
    return {f"{group} {name}": size for name, size in sizes.items()}


def _hundredths(match: re.Match[str]) -> int:
    return round(float(match["mib"]) * 100)


def _device(name: str) -> str:
    """The planner's name of a buffer's device: pinned host memory is the host's."""
    return "CPU" if name.endswith("_Host") or name.startswith("CPU") else name
