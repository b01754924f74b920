"""Keeps the checkout's own directories out of the way of imports.

``python -m pytest`` puts the root on ``sys.path``; ``actors``, ``protocol`` and ``sims``
could then be imported under those bare names too, as second copies of every class.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _ROOT]
