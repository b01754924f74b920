"""Reads a model's configuration from the hub that its repositories lie on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import httpx
import msgspec

HUB: Final = "https://huggingface.co"
BYTES_MAX: Final = 1 << 20
REQUEST_S: Final = 5.0
ALL_S: Final = 10.0
"""For all repositories of a model together, redirects and bodies included."""

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
ASKED: Final = "KVALET_OFFLINE"
FORBIDDEN: Final = "HF_HUB_OFFLINE"
_NO: Final = frozenset({"0", "false", "no", "off"})
_YES: Final = frozenset({"1", "true", "yes", "on"})
_FAULTS: Final = (
    httpx.HTTPError,
    httpx.InvalidURL,
    msgspec.MsgspecError,
    RecursionError,
    ImportError,
    OSError,
    ValueError,
)
"""Of an address, a proxy, a certificate store, a connection or a body."""


def offline(env: Mapping[str, str]) -> bool:
    """Whether no network may be asked: unless ``KVALET_OFFLINE`` is 0, and where the hub's own
    variable forbids it."""
    asked = env.get(ASKED, "").strip().lower() in _NO
    return not asked or env.get(FORBIDDEN, "").strip().lower() in _YES


def configurations(repositories: Sequence[str], env: Mapping[str, str]) -> Iterator[object]:
    """The ``config.json`` of each repository that has one, in their order; blocks.

    ``HF_ENDPOINT`` names another hub; ``HF_TOKEN`` goes to the hub and nowhere else. Nothing is
    raised: whatever goes wrong is a repository without an answer. Offline there are none.
    """
    named = [name for name in repositories if _REPOSITORY.fullmatch(name) and ".." not in name]
    if not named or offline(env):
        return
    base = env.get("HF_ENDPOINT", "").strip().rstrip("/") or HUB
    # Bytes as they come: a body that unpacks to more than it seems cannot be sent.
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    if token := env.get("HF_TOKEN", "").strip():
        headers["authorization"] = f"Bearer {token}"
    until = time.monotonic() + ALL_S
    for name in named:
        left = until - time.monotonic()
        if left <= 0:
            return
        document: object = None
        try:
            with httpx.Client(
                headers=headers,
                timeout=min(REQUEST_S, left),
                follow_redirects=True,
                max_redirects=4,
            ) as client:
                document = _document(client, f"{base}/{name}/resolve/main/config.json", until)
        except _FAULTS:
            continue
        yield document


def _document(client: httpx.Client, url: str, until: float) -> object:
    """Raises one of the faults for anything but a whole JSON document in time."""
    body = bytearray()
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_raw():
            body += chunk
            if len(body) > BYTES_MAX or time.monotonic() > until:
                raise ValueError("too large or too slow")
    return msgspec.json.decode(bytes(body))
