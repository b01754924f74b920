"""What every relay of a house shares."""

from __future__ import annotations

import attrs

from kvalet.actors.ledger import Ledger
from kvalet.actors.prefixes import Prefixes
from kvalet.actors.upstream import UpstreamClient


@attrs.frozen
class Wires:
    """Whom a relay talks to, and how patient it is; times in seconds."""

    ledger: Ledger
    upstream: UpstreamClient
    keepalive_s: float
    first_token_s: float
    stall_s: float
    prefixes: Prefixes
    park_every: int
