"""What a real server allocated, launch by launch, beside what the planner says of the same."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from kvalet.actors.decisions.plan.compute import ComputeBytes, compute_bytes
from kvalet.actors.decisions.plan.drafting import draft_context
from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.kept import ContextBytes, cache_types, context_bytes
from kvalet.actors.decisions.plan.placement import HOST, Device, Placement, place
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape, shape_of
from kvalet.protocol.errors import ConfigFault

TRUTH: Final = Path(__file__).parents[2] / "data" / "kv_ground_truth.jsonl.xz"
ACCELERATORS: Final = {"cpu": 0, "stub1": 1, "stub1-cudafa": 1, "stub2": 2}
F16: Final = 2

Record = Mapping[str, Any]


@frozen(kw_only=True)
class Point:
    """One launch; ``planned`` None where the planner expects a refusal, with the reason."""

    record: Record
    shape: ModelShape
    flags: ServerFlags
    placement: Placement
    planned: ContextBytes | None
    refusal: str = ""

    @property
    def name(self) -> str:
        """Enough to find the launch again."""
        return f"{self.record['id']} {self.record['model']} {' '.join(self.record['flags'])}"

    @property
    def target(self) -> Record:
        """What the server logged of the target's context."""
        found: Record = self.record["target"]
        return found

    @property
    def context(self) -> ContextBytes:
        """The planned context of a launch that starts."""
        assert self.planned is not None, (self.name, self.refusal)
        return self.planned

    @property
    def draft(self) -> ContextBytes | None:
        """The planned context of the drafter."""
        metadata = self.record.get("draft_metadata")
        drafter = shape_of(metadata) if metadata else None
        return draft_context(self.shape, self.flags, self.context.sizes, drafter)

    @property
    def compute(self) -> ComputeBytes:
        """The planned buffers, the weights being f16."""
        return compute_bytes(
            self.shape,
            self.context,
            self.flags,
            cache_types(self.flags),
            self.placement,
            staged=staged(self.shape),
        )

    @property
    def context_per_device(self) -> Mapping[str, int]:
        """Measured bytes of caches and state by device."""
        held = Counter[str]()
        for kept in (*self.target["kv"], self.target.get("recurrent", {"bytes_per_device": {}})):
            held.update(kept["bytes_per_device"])
        return held

    @property
    def compute_ratios(self) -> Sequence[float]:
        """Planned over measured compute bytes of each device; a pinned buffer is the host's."""
        planned = self.compute.per_device
        measured = self.target["compute_bytes_per_device"]
        return [
            planned[HOST if device == "GPU_Host" else device] / size
            for device, size in measured.items()
        ]


@cache
def points() -> Sequence[Point]:
    """Every launch of the file."""
    with lzma.open(TRUTH, "rt") as lines:
        return [_point(json.loads(line)) for line in lines]


@cache
def started() -> Sequence[Point]:
    """The launches that the server did not refuse."""
    return [point for point in points() if point.record["status"] == "ok"]


def staged(shape: ModelShape) -> int:
    """Bytes of the largest f16 weight that a layer of this shape may have on the host."""
    embd, wide = shape.embd or 0, max(shape.ff, default=0)
    largest = max(wide, shape.experts * (shape.expert_ff or wide))
    inner, ssm = shape.ssm.inner_size or 0, shape.ssm
    projected = 2 * (inner + ssm.group_count * (ssm.state_size or 0)) + (ssm.time_step_rank or 0)
    largest = max(largest, projected)
    if shape.shortconv_cache:
        largest = max(largest, shape.vocab or 0)
    return F16 * embd * largest


def _point(record: Record) -> Point:
    shape = shape_of(record["metadata"])
    flags = resolve_flags(record["flags"], {}).flags
    cuda = "cuda" in record["device"]
    devices = [
        Device(name=f"GPU{index}", cuda=cuda) for index in range(ACCELERATORS[record["device"]])
    ]
    planned, refusal = None, ""
    try:
        planned = context_bytes(shape, flags)
    except ConfigFault as fault:
        refusal = str(fault)
    return Point(
        record=record,
        shape=shape,
        flags=flags,
        placement=place(
            shape.layers, devices, gpu_layers=flags.gpu_layers, kv_offload=flags.kv_offload
        ),
        planned=planned,
        refusal=refusal,
    )
