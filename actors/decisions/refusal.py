"""What a client is told when the ledger refuses its request."""

from __future__ import annotations

from kvalet.actors.decisions.recovery import POISON
from kvalet.protocol import events as e
from kvalet.protocol.errors import ClientFault, KvaletError, ServerFault

UNLOADED = "unloaded"
"""Why leases end when their model goes."""

STOPPING = "stopping"
"""Why leases end when kvalet stops before they do."""


def refusal(event: e.LeaseRefused) -> KvaletError:
    """The answer to a request that the ledger refused."""
    needed, limit = event.needed, event.limit
    if event.code == "prompt_too_large":
        return ClientFault(
            f"the prompt needs {needed} cells, but the pool can hold {limit}; "
            "shorten it or serve with a larger --ctx",
            code=event.code,
            fields={"n_prompt_tokens": needed, "n_ctx": limit},
        )
    if event.code == "too_many_choices":
        return ClientFault(
            f"the request needs {needed} slots at once, the server has {limit}", code=event.code
        )
    if event.code == "queue_full":
        return ClientFault(
            f"{limit} requests are waiting already; try again later", status=429, code=event.code
        )
    return ServerFault("llama-server is not running", status=503, code=event.code)


def ending(event: e.LeaseEnded) -> ServerFault:
    """What ends the stream of a lease that the ledger has closed."""
    if event.reason == STOPPING:
        return ServerFault("kvalet is stopping", status=503, code=STOPPING)
    if event.reason == UNLOADED:
        return ServerFault("the model has been unloaded", status=503, code=UNLOADED)
    if event.reason == POISON:
        return ServerFault(
            "llama-server died twice in a row while it worked on this request", code=POISON
        )
    return ServerFault(f"the llama-server that held this answer is gone ({event.reason})")


def reason_of(fault: KvaletError) -> str:
    """Why a request ends with ``fault``, in the journal's words."""
    if isinstance(fault, ClientFault):
        return "refused"
    return "stalled" if isinstance(fault, ServerFault) and fault.code == "stalled" else "failed"
