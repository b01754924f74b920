"""What the server says that it allocated, read from its own log, and how the plan compares.

The server logs sizes to a hundredth of a MiB, from log level 4 on. Its target's context comes
first; whatever is built after it belongs to a drafter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from attrs import field, frozen

from kvalet.actors.decisions.plan.explain import context_report
from kvalet.actors.decisions.plan.plan import Plan
from kvalet.actors.decisions.plan.price import TermName

MIB: Final = 1 << 20
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


@frozen(kw_only=True)
class Difference:
    """One figure, planned and reported, in bytes."""

    name: str
    planned: int
    reported: int

    @property
    def excess(self) -> int:
        """Bytes that the server took beyond the plan; below zero where it took less."""
        return self.reported - self.planned


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


def compare(plan: Plan, reported: Reported) -> tuple[Difference, ...]:
    """Every figure of the plan that the server reports too, and every one that only it has."""
    kept = {name: size for name, size in context_report(plan).items() if name != "total"}
    found = [
        _difference(f"context {name}", kept.get(name, 0), reported.kept.get(name, 0.0))
        for name in dict.fromkeys((*kept, *reported.kept))
    ]
    buffers = _buffers(plan)
    found += [
        _difference(name, buffers.get(name, 0), reported.buffers.get(name, 0.0))
        for name in dict.fromkeys((*buffers, *reported.buffers))
    ]
    return tuple(one for one in found if one.planned or one.reported)


def agrees(difference: Difference) -> bool:
    """Whether the two are the same figure, as far as a log of hundredths can tell."""
    return abs(difference.excess) <= LOGGED_STEP


def _buffers(plan: Plan) -> dict[str, int]:
    names: tuple[tuple[str, tuple[TermName, ...]], ...] = (
        ("compute", ("compute", "draft-compute")),
        ("output", ("output",)),
    )
    return {
        f"{label} {device}": size
        for label, terms in names
        for device, size in plan.price.of(*terms).items()
    }


def _difference(name: str, planned: int, reported_mib: float) -> Difference:
    return Difference(name=name, planned=planned, reported=round(reported_mib * MIB))


def _hundredths(match: re.Match[str]) -> int:
    return round(float(match["mib"]) * 100)


def _device(name: str) -> str:
    """The planner's name of a buffer's device: pinned host memory is the host's."""
    return "CPU" if name.endswith("_Host") or name.startswith("CPU") else name
