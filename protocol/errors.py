"""Errors say whose fault it is; an assertion says that it is ours."""

from __future__ import annotations


class KvaletError(Exception):
    """Base of everything kvalet raises on purpose.

    ``status_hint`` is the HTTP status that fits; ``exit_code`` the command line's.
    """

    status_hint = 500
    exit_code = 1


class ClientFault(KvaletError):
    """The request is wrong: malformed, of the wrong type, or too large for the pool."""

    status_hint = 400

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        fields: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status_hint = status
        self.code = code
        self.fields = fields or {}


class ServerFault(KvaletError):
    """llama-server broke its side: it died, refused, or sent what its protocol forbids."""

    status_hint = 502

    def __init__(self, message: str, *, status: int = 502, code: str = "server_lost") -> None:
        super().__init__(message)
        self.status_hint = status
        self.code = code


class ServerLost(ServerFault):
    """There is no answer, or half of one: llama-server may be dead."""


class ConfigFault(KvaletError):
    """A setting or a flag is wrong. ``problems`` lists all of them."""

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("; ".join(self.problems))


class EnvironmentFault(KvaletError):
    """The machine lacks something: no binary, no model, the port is taken, no disk."""

    exit_code = 3
    status_hint = 503


def first_fault(group: BaseExceptionGroup[KvaletError]) -> KvaletError:
    """The first fault in a group, however deep."""
    first = group.exceptions[0]
    return first_fault(first) if isinstance(first, BaseExceptionGroup) else first


class JournalFault(KvaletError):
    """The journal cannot be read, or cannot be appended to."""

    exit_code = 3
    status_hint = 503
