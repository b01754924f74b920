"""What llama-server says instead of an answer: one JSON shape for every surface."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from attrs import frozen

KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


@frozen
class Refused(Exception):
    """A request that gets an error and nothing else. ``kind`` empty: the status says it."""

    status: int
    message: str
    kind: str = ""
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The error object."""
        kind = self.kind or KINDS[self.status]
        return {"code": self.status, "message": self.message, "type": kind, **dict(self.more)}

    @property
    def body(self) -> bytes:
        """The whole answer."""
        return msgspec.json.encode({"error": self.fields})


def too_long(tokens: int, n_ctx: int) -> Refused:
    """The refusal of a prompt that no slot can take."""
    return Refused(
        400,
        f"request ({tokens} tokens) exceeds the available context size ({n_ctx} tokens), "
        "try increasing it",
        "exceed_context_size_error",
        (("n_prompt_tokens", tokens), ("n_ctx", n_ctx)),
    )


NOT_FOUND: Final = msgspec.json.encode(
    {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
)
NO_KEY: Final = msgspec.json.encode(
    {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
)
LOADING: Final = msgspec.json.encode(
    {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
)
DISABLED: Final = msgspec.json.encode(
    {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}
)
