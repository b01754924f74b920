"""How many cells, tokens and slots a launch has, from its flags and the model's own context."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape

CELL_STEP: Final = 256


@frozen(kw_only=True)
class Sizes:
    """Sizes of one context. ``ctx`` and ``ctx_seq`` are cells, in all and of one stream;
    ``ctx_slot`` is what a slot reports; ``batch`` and ``ubatch`` are tokens; ``outputs`` rows of
    logits of one micro-batch; ``snapshots`` extra copies of recurrent state per slot."""

    slots: int
    streams: int
    unified: bool
    ctx: int
    ctx_seq: int
    ctx_slot: int
    batch: int
    ubatch: int
    outputs: int
    snapshots: int = 0


def padded(cells: int) -> int:
    """``cells`` rounded up to what a cache is allocated in."""
    return -(-cells // CELL_STEP) * CELL_STEP


def sizes(shape: ModelShape, flags: ServerFlags, *, drafted: int = 0, snapshots: int = 0) -> Sizes:
    """The sizes of the target's context; ``drafted`` tokens are checked beside each slot's own.

    Without ``-c`` and with fitting on the server may lower the context to what memory holds:
    these are the sizes before that.
    """
    return _sized(shape, flags, asked_cells(shape, flags), drafted, snapshots)


def draft_sizes(shape: ModelShape, flags: ServerFlags, target: Sizes) -> Sizes:
    """The sizes of a draft context beside ``target``: its cells in all, its slots and batches."""
    return _sized(shape, flags, target.ctx, 0, 0)


def asked_cells(shape: ModelShape, flags: ServerFlags) -> int:
    """Cells asked for, before rounding."""
    if flags.ctx:
        return flags.ctx
    if flags.per_slot:
        return flags.slots * flags.per_slot
    trained = shape.context or 0
    return trained * (flags.slots if flags.fit and not flags.unified else 1)


def _sized(
    shape: ModelShape, flags: ServerFlags, asked: int, drafted: int, snapshots: int
) -> Sizes:
    slots, unified = flags.slots, flags.unified
    batch = flags.batch if not shape.causal else min(asked, flags.batch)
    if embeds(flags):
        batch = min(batch, flags.ubatch)
    ubatch = min(batch, flags.ubatch)
    ctx_seq = padded(asked) if unified else padded(padded(asked) // slots)
    caps = [ctx_seq, flags.per_slot or ctx_seq, shape.context or ctx_seq]
    return Sizes(
        slots=slots,
        streams=1 if unified else slots,
        unified=unified,
        ctx=ctx_seq if unified else ctx_seq * slots,
        ctx_seq=ctx_seq,
        ctx_slot=min(caps),
        batch=batch,
        ubatch=ubatch,
        outputs=ubatch if embeds(flags) else slots * (1 + drafted),
        snapshots=snapshots,
    )


def embeds(flags: ServerFlags) -> bool:
    """Whether the launch serves embeddings (reranking is one of them)."""
    return flags.embedding or flags.reranking
