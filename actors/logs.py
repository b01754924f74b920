"""Log set-up: JSON lines on stderr. Process-wide, so only the command line calls it."""

from __future__ import annotations

import logging
import sys
from typing import Final

import structlog
from structlog.typing import EventDict, WrappedLogger

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
NEVER_LOGGED: Final = frozenset(
    {"api_key", "authorization", "body", "content", "headers", "messages", "prompt", "text"}
)
"""Fields that may hold a key or what somebody wrote; they are dropped from every line."""


def configure(level: str) -> None:
    """Log from ``level`` on, one of LEVELS."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            drop_secrets,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=_to_stderr,
        # A spinner may stand in for sys.stderr for a while.
        cache_logger_on_first_use=False,
    )


def drop_secrets(_logger: WrappedLogger, _method: str, fields: EventDict) -> EventDict:
    """The line without the fields of NEVER_LOGGED."""
    return {name: value for name, value in fields.items() if name.lower() not in NEVER_LOGGED}


def _to_stderr(*_args: object) -> structlog.WriteLogger:
    return structlog.WriteLogger(sys.stderr)
