"""Errors in the dialect that OpenAI's clients and llama-server's have in common."""

from __future__ import annotations

import msgspec

from kvalet.protocol import sse
from kvalet.protocol.errors import ClientFault, KvaletError, ServerFault

PROMPT_TOO_LARGE = "exceed_context_size_error"
"""The type of the error that carries ``n_prompt_tokens`` and ``n_ctx``."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """The ``type`` that goes with an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(
    message: str,
    *,
    status: int,
    code: str = "",
    kind: str = "",
    fields: dict[str, int] | None = None,
) -> bytes:
    """An error as JSON. ``kind`` replaces the type that ``status`` implies.

    Without a ``code`` of ours the status stands in its place, as llama-server does it.
    """
    error: dict[str, object] = {
        "message": message,
        "type": kind or error_type(status),
        "code": code or status,
        **(fields or {}),
    }
    return msgspec.json.encode({"error": error})


def error_event(
    message: str,
    *,
    status: int,
    code: str = "",
    kind: str = "",
    fields: dict[str, int] | None = None,
) -> bytes:
    """The same error as an event of a stream that has begun already."""
    return sse.data(error_body(message, status=status, code=code, kind=kind, fields=fields))


def fault_body(fault: KvaletError) -> bytes:
    """A fault of ours as an error body; its status is ``fault.status_hint``."""
    if isinstance(fault, ClientFault):
        kind = PROMPT_TOO_LARGE if "n_prompt_tokens" in fault.fields else ""
        return error_body(
            str(fault), status=fault.status_hint, code=fault.code, kind=kind, fields=fault.fields
        )
    code = fault.code if isinstance(fault, ServerFault) else ""
    return error_body(str(fault), status=fault.status_hint, code=code)


def fault_event(fault: KvaletError) -> bytes:
    """A fault of ours as an event of a stream that has begun already."""
    return sse.data(fault_body(fault))
