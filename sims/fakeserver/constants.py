"""Every number by which the simulated server behaves, each with where it was read."""

from __future__ import annotations

from typing import Final

MARGIN_CELLS: Final = 8
"""Kept free on top of the next step's reservation (PREEMPT_N_MARGIN of the parking build)."""
ASYNC_STEPS: Final = 8
"""Decode steps that asynchronous parks look ahead (PREEMPT_N_ASYNC_STEPS of the parking build)."""
STARVED_PARKS: Final = 3
"""A slot parked so often is a victim only when nobody else is (PREEMPT_N_STARVED)."""
RESTORE_FAILURES_MAX: Final = 8
"""Failed restores in a row before a parked request may be given up ..."""
RESTORE_PATIENCE_S: Final = 60.0
"""... and for how long it must have been parked by then (both: the parking server.s source)."""
ROTATE_AFTER_S: Final = 2.0
"""A parked head that waited so long may take a shifted resident's place (PREEMPT_ROTATE_US)."""
KEEPALIVE_S: Final = 2.0
"""Silence on a parked stream before a keepalive (notice builds; a shorter ping is kept)."""
POLL_S: Final = 1.0
"""How long a reader waits for a result before it looks at its client (stock server)."""
PING_S: Final = 30
"""``--sse-ping-interval`` when nothing is said (help text of both stock builds)."""
EXACT_PAGE_CELLS: Final = 256
"""Cells of one page in exact mode, each owned by one sequence."""
POOL_STEP_CELLS: Final = 256
"""A context is rounded up to a multiple of this (measured on both stock builds)."""
CONTEXT_TRAINED: Final = 32_768
"""The pretended model's context (that of the model that the shapes were recorded with)."""
SLOT_SIMILARITY: Final = 0.10
"""Common prefix from which on a free slot is preferred (``-sps``, help text)."""
STORE_MATCH: Final = 0.25
"""Share of a stored prompt that must match for it to be loaded (measured, stock)."""
STORE_WANTED_BELOW: Final = 0.5
"""The prompt store is asked when the chosen slot keeps less than this (measured, stock)."""
OLD_BUDGET_MIB: Final = 8192
"""``--preempt-ram`` of the first park builds when nothing is said (as their help said)."""

CELL_BYTES: Final = 16_384
"""Host bytes of one cell; a choice: between the recorded 18.4 kB and a small model's."""
COPY_BYTES_PER_S: Final = 2e9
"""Speed of a copy between the pool and host memory; a choice of this simulation."""
TOKENS_PER_S: Final = 50.0
"""Decode steps a second when nothing is said; a choice of this simulation."""
PREFILL_PER_S: Final = 2000.0
"""Prompt tokens a second when nothing is said; a choice of this simulation."""
READY_S: Final = 0.05
"""How long loading takes; a choice of this simulation."""
IMAGE_TOKENS: Final = 64
"""Cells of one picture; a choice of this simulation."""
