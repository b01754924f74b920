"""What every relay of a house shares."""

from __future__ import annotations

import attrs

from kvalet.actors.gate import Gate
from kvalet.actors.ledger import Ledger


@attrs.frozen
class Wires:
    """Whom a relay talks to, and how patient it is; times in seconds."""

    ledger: Ledger
    gate: Gate
    keepalive_s: float
    first_token_s: float
    stall_s: float
    park_every: int
