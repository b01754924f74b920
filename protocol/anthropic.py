"""The surface ``anthropic.messages`` in one place: requests as chats, chats as its answers."""

from kvalet.protocol.anthropic_request import to_chat
from kvalet.protocol.anthropic_stream import (
    PING,
    Stream,
    error_body,
    fault_body,
    fault_event,
    refusal_body,
    whole,
)

__all__ = [
    "PING",
    "Stream",
    "error_body",
    "fault_body",
    "fault_event",
    "refusal_body",
    "to_chat",
    "whole",
]
