"""A llama-server that answers, and how its own routes are asked."""

from __future__ import annotations

from pathlib import Path

import httpx
from attrs import field, frozen

from kvalet.actors.decisions.capabilities import Capabilities
from kvalet.protocol import llama
from kvalet.protocol.errors import ServerFault


@frozen(kw_only=True)
class Server:
    """A llama-server that answers. ``api_key`` goes with every request to it, unless empty.

    ``slot_dir`` is where it saves slots. An attached server has no ``pid``, no ``slot_dir``
    and empty ``capabilities``.
    """

    url: str
    api_key: str = field(default="", repr=False)
    slot_dir: Path | None = None
    capabilities: Capabilities = field(factory=Capabilities)
    generation: int = 1
    pid: int | None = None


def open_client(
    url: str,
    api_key: str,
    *,
    timeout_s: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """A client for llama-server's own routes: one connection per request, no proxies."""
    headers = {"Connection": "close"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout_s, trust_env=False, transport=transport
    )


def read_props(body: bytes) -> llama.Props:
    """Read ``/props``; never fails. A build whose ``/props`` looks otherwise still works."""
    try:
        return llama.decode_props(body)
    except ServerFault:
        return llama.Props()
