"""What a launch costs beside weights and KV, in closed forms for builds without measured rules.

Every figure is an integer of bytes, rounded down where a fraction arises, as the calibration
was. Constants stand next to what they were calibrated on.
"""

from __future__ import annotations

from typing import Final

from kvalet.actors.decisions.plan.devices import GIB, MIB

CUDA_RUNTIME: Final = 320 * MIB
DRAFT_GRAPH: Final = 224 * MIB
EXTRA_CARD: Final = 1024 * MIB
"""Each card of a layer split beyond the first; 894 and 946 MiB were measured."""
UNKNOWN_COMPUTE: Final = 5 * GIB
"""Compute buffer of a model without a vocabulary or a width, per pool or per tensor card."""

EXACT_PERCENT: Final = 100
TENSOR_PERCENT: Final = 110
"""Guard on the tensor buffer: its bare formula lies below the 600 MiB measured on a 27B."""
GENEROUS_PERCENT: Final = 115
"""The guard of generation G2, on both buffers."""

MASK_BYTES: Final = 3
"""Per cell and micro-batch row: f16, padded by a half."""
PIPELINE_COPIES: Final = 4
QUANTISED_FACTOR: Final = (9, 4)
QUANTISED_MLA_FACTOR: Final = (5, 4)


def soft_overhead(*, on_gpu: bool, projector: int = 0, drafting: bool = False) -> int:
    """Runtime, the projector's own graph (two fifths of its file) and the draft graph."""
    if not on_gpu:
        return 0
    return CUDA_RUNTIME + projector * 2 // 5 + (DRAFT_GRAPH if drafting else 0)


def layer_compute(
    vocab: int | None,
    embd: int | None,
    ubatch: int,
    slots: int,
    *,
    pooling: bool = False,
    percent: int = EXACT_PERCENT,
) -> int:
    """Compute buffer of a layer split, once per pool, whatever the context.

    Assumes chat: one row of logits per slot and step, the first of them shared with the
    activations. A ``pooling`` launch shares none.
    """
    if not vocab or not embd:
        return UNKNOWN_COMPUTE
    rows = slots if pooling else slots - 1
    return (_activations(embd, ubatch) + _logits(vocab, ubatch) * rows) * percent // 100


def tensor_compute(
    vocab: int | None,
    embd: int | None,
    ubatch: int,
    slots: int,
    *,
    percent: int = TENSOR_PERCENT,
) -> int:
    """Compute buffer of each card of a tensor split, whatever the context."""
    if not vocab or not embd:
        return UNKNOWN_COMPUTE
    return (2 * _activations(embd, ubatch) + _logits(vocab, ubatch) * slots) * percent // 100


def growing_compute(
    ctx: int,
    ubatch: int,
    *,
    embd: int = 0,
    arch: str = "",
    quantised: bool = False,
    mla: bool = False,
    pipelined: bool = False,
) -> int:
    """The part of the compute buffer that grows with the cells, on every card.

    ``quantised``: any of the two cache types. ``pipelined``: a layer split that keeps four
    copies of its inputs in flight.
    """
    mask = ctx * ubatch * MASK_BYTES
    copies = (PIPELINE_COPIES - 1) * mask if pipelined else 0
    if arch == "deepseek4":
        return 2 * GIB + 72_000 * ctx * ubatch // 512
    if arch == "inkling":
        return (402_470 if quantised else 8192) * ctx + copies
    if not quantised:
        return mask + copies
    over, under = QUANTISED_MLA_FACTOR if mla else QUANTISED_FACTOR
    return ctx * embd * ubatch * over // (under * 512) + copies


def _logits(vocab: int, ubatch: int) -> int:
    return vocab * ubatch * 4


def _activations(embd: int, ubatch: int) -> int:
    return 4 * embd * ubatch * 4
