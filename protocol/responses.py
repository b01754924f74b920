"""The OpenAI Responses surface: requests said as chats, and chats' answers told as responses."""

from kvalet.protocol.openai_errors import fault_body, fault_event
from kvalet.protocol.responses_request import to_chat
from kvalet.protocol.responses_stream import Stream, whole

__all__ = ["Stream", "fault_body", "fault_event", "to_chat", "whole"]
