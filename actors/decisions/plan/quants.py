"""Bytes of one row of a cache tensor, by element type."""

from __future__ import annotations

from typing import Final

BLOCKS: Final = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Elements and bytes of one block."""

CUDA_ROW: Final = 512
CUDA_ALIGNMENT: Final = 128


def block_of(kind: str) -> int:
    """Elements of one block of ``kind``; 1 for a plain or an unknown type."""
    return BLOCKS.get(kind, BLOCKS["f16"])[0]


def quantised(kind: str) -> bool:
    """Whether ``kind`` packs several elements into a block."""
    return block_of(kind) > 1


def row_bytes(kind: str, elements: int) -> int:
    """Bytes of ``elements`` in a row of ``kind``, a begun block counting whole; a type that is
    unknown is priced as f16."""
    block, size = BLOCKS.get(kind, BLOCKS["f16"])
    return -(-elements // block) * size


def cuda_padding(kind: str, elements: int) -> int:
    """Bytes that CUDA adds once to a quantised tensor whose rows are not whole multiples of
    512 elements, in steps of its alignment; 0 for plain types."""
    rest = elements % CUDA_ROW
    if not quantised(kind) or not rest:
        return 0
    return -(-row_bytes(kind, CUDA_ROW - rest) // CUDA_ALIGNMENT) * CUDA_ALIGNMENT
