"""Errors that both an OpenAI client and a llama-server client can read."""

from __future__ import annotations

import json

import pytest

from kvalet.protocol.errors import ClientFault, EnvironmentFault, KvaletError, ServerFault
from kvalet.protocol.openai import error_body, error_event, error_type, fault_body, fault_event


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (501, "not_supported_error"),
        (502, "server_error"),
        (503, "unavailable_error"),
    ],
)
def test_each_status_has_its_type(status: int, kind: str) -> None:
    assert error_type(status) == kind


def test_an_error_without_a_code_of_ours_carries_its_status() -> None:
    assert json.loads(error_body("no", status=404)) == {
        "error": {"message": "no", "type": "not_found_error", "code": 404}
    }


def test_an_error_event_is_the_error_body_as_an_event() -> None:
    event = error_event("gone", status=502, code="server_lost", kind="k", fields={"n": 1})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:]) == {
        "error": {"message": "gone", "type": "k", "code": "server_lost", "n": 1}
    }


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            ClientFault("'n' is odd"),
            {"message": "'n' is odd", "type": "invalid_request_error", "code": "invalid_request"},
        ),
        (
            ClientFault(
                "too large", code="prompt_too_large", fields={"n_prompt_tokens": 9, "n_ctx": 8}
            ),
            {
                "message": "too large",
                "type": "exceed_context_size_error",
                "code": "prompt_too_large",
                "n_prompt_tokens": 9,
                "n_ctx": 8,
            },
        ),
        (
            ServerFault("it died"),
            {"message": "it died", "type": "server_error", "code": "server_lost"},
        ),
        (
            EnvironmentFault("no disk"),
            {"message": "no disk", "type": "unavailable_error", "code": 503},
        ),
    ],
)
def test_a_fault_says_whose_it_is(fault: KvaletError, error: dict[str, object]) -> None:
    assert json.loads(fault_body(fault)) == {"error": error}
    assert fault_event(fault) == b"data: " + fault_body(fault) + b"\n\n"
