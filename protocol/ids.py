"""Names for the numbers that travel: each id and unit has its own type.

At run time they are plain ``int`` and ``str``; the type checkers keep them apart.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""One HTTP request (or one embedded lease), ``r1``, ``r2``… in order of arrival."""

LeaseId = NewType("LeaseId", int)
"""One grant of a slot and a charge of cells; counts up from 1 in a journal."""

SlotId = NewType("SlotId", int)
"""llama-server's seat, its ``id_slot``."""

Cells = NewType("Cells", int)
"""Positions of the KV cache."""

Nanos = NewType("Nanos", int)
"""Nanoseconds of the wall clock since 1970."""

Seq = NewType("Seq", int)
"""Number of a decision in the journal; gap-free from 1."""
