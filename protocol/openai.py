"""The OpenAI surfaces in one place: requests in, upstream bodies, chunks, answers and errors."""

from kvalet.protocol.openai_answer import Assembler
from kvalet.protocol.openai_errors import (
    PROMPT_TOO_LARGE,
    error_body,
    error_event,
    error_type,
    fault_body,
    fault_event,
)
from kvalet.protocol.openai_leg import LEG_PATHS, Partial, count_bodies, leg_body, tokenize_body
from kvalet.protocol.openai_request import CHAT, COMPLETIONS, ParsedRequest, parse_request
from kvalet.protocol.openai_stream import (
    Chunk,
    ParkRecord,
    Progress,
    StopTail,
    Usage,
    read_chunk,
)
from kvalet.protocol.openai_totals import KvaletUsage, Totals, final_event, rename

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "LEG_PATHS",
    "PROMPT_TOO_LARGE",
    "Assembler",
    "Chunk",
    "KvaletUsage",
    "ParkRecord",
    "ParsedRequest",
    "Partial",
    "Progress",
    "StopTail",
    "Totals",
    "Usage",
    "count_bodies",
    "error_body",
    "error_event",
    "error_type",
    "fault_body",
    "fault_event",
    "final_event",
    "leg_body",
    "parse_request",
    "read_chunk",
    "rename",
    "tokenize_body",
]
