"""What a drafter costs, in closed forms for builds without measured rules.

Three generations of one formula exist. G0 carries everything that is not KV in one
coefficient; G1 is the KV alone; G2 adds what the target keeps for rolling back. Ours is
G2's physics with the draft graph calibrated on the measured points of a 27B head.
All amounts are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan.devices import GIB, MIB, Budget

FLAT_TENSOR: Final = 2 * GIB
"""Reserve of a tensor split for a drafter that cannot be sized."""

G0_PER_UNIT: Final = 32_768
G0_CONSTANT: Final = 128 * MIB
GRAPH: Final = 132 * MIB
"""Draft graph of a 27B head: the least that keeps all twelve measured points covered."""
VERIFY_PER_ROW: Final = 4
MASK_PER_ROW: Final = 2

LEGACY_DEPTH: Final = 16
GPU_DEPTH: Final = 2
CPU_DEPTH: Final = 3

DSPARK: Final = frozenset({"dspark", "draft-dspark"})


@frozen(kw_only=True)
class HeadShape:
    """An embedded head's attention: layers, KV heads, and widths in elements."""

    layers: int
    kv_heads: int
    key: int
    value: int


@frozen
class DraftReserve:
    """What is kept for a drafter.

    ``growing`` sizes it at a context. ``flat`` says that some of it could not be
    sized, so that the flat reserve must stand as well; ``known`` is False when nothing could.
    """

    growing: Callable[[int], int]
    flat: bool = False
    known: bool = True

    def budget(self, budget: Budget) -> Budget:
        """The layer budget that is left: less the flat share where one is due."""
        return budget.without_flat_draft() if self.flat else budget

    @property
    def flat_tensor(self) -> int:
        """Bytes that a tensor plan keeps on top of what could be sized."""
        return FLAT_TENSOR if self.flat else 0


NO_DRAFTER: Final = DraftReserve(lambda _: 0)


def draft_element_bytes(cache_type: str) -> int:
    """Bytes of one element of a head's cache: quantised ones hold fewer cells than f16, not
    more, so f16 is the floor."""
    return 4 if cache_type == "f32" else 2


def head_kv(head: HeadShape, cells: int, type_k: str = "f16", type_v: str = "f16") -> int:
    """Cache of an embedded head over this many cells, each axis at its own type."""
    row = head.key * draft_element_bytes(type_k) + head.value * draft_element_bytes(type_v)
    return head.layers * cells * head.kv_heads * row


def overhead_g0(kv: int, embd: int | None, depth: int, drafter: int = 0) -> int:
    """Generation G0: a quarter more KV, a coefficient per unit of width and draft token."""
    verify = G0_PER_UNIT * (embd or 0) * max(1, depth)
    return kv * 5 // 4 + verify + G0_CONSTANT + drafter


def overhead_g1(kv: int, drafter: int = 0) -> int:
    """Generation G1: KV and drafter; the verify buffer lives off the cushion."""
    return kv + drafter


def overhead_g2(
    kv: int, depth: int, *, rollback: int = 0, target_copy: int = 0, drafter: int = 0
) -> int:
    """Generation G2: ``rollback`` is the recurrent state of all slots, kept once for each draft
    token; ``target_copy`` is the second target cache of an MLA model."""
    return kv + drafter + target_copy + depth * rollback


def overhead(
    kv: int, cells: int, depth: int, *, embd: int, ubatch: int, rollback: int, other: int = 0
) -> int:
    """Ours: the KV and mask of the draft pass, its graph, a verify row of logits per unit of
    width and draft token, and the rollback copies; ``other`` is a drafter's file, an MLA copy."""
    mask = cells * ubatch * MASK_PER_ROW
    verify = VERIFY_PER_ROW * ubatch * embd
    return kv + mask + GRAPH + depth * (verify + rollback) + other


def reserve_of(
    *,
    weights: int | None = None,
    kv: Callable[[int], int] | None = None,
    copies: Callable[[int], int] | None = None,
) -> DraftReserve:
    """What can be sized, and whether the flat reserve stays for what cannot.

    A drafter whose KV is unknown still has its weights and copies reserved; only when
    nothing at all is known is the flat reserve all there is.
    """

    def growing(ctx: int) -> int:
        parts = [part(ctx) for part in (kv, copies) if part is not None]
        return (weights or 0) + sum(parts)

    known = weights is not None or kv is not None or copies is not None
    return DraftReserve(growing, flat=kv is None, known=known)


def draft_depth(
    flag: int | None,
    *,
    owns_spec_type: bool = False,
    inherited: int | None = None,
    build_default: int | None = None,
    setting: int | None = None,
    on_gpu: bool = True,
    mode: str = "",
) -> int:
    """Tokens drafted at a time: the user's flag; else, for a user who chose the mode
    by flag, what the server itself would take; else our setting, else our default."""
    if flag is not None:
        return flag
    if owns_spec_type:
        known = (count for count in (inherited, build_default) if count is not None)
        return next(known, LEGACY_DEPTH)
    if setting is not None:
        return setting
    return GPU_DEPTH if on_gpu and mode not in DSPARK else CPU_DEPTH
