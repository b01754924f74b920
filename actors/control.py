"""Requests that change what runs: load, unload, and the settings that outlive kvalet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import trio

from kvalet.actors.binaries import find_model
from kvalet.actors.client import JSON_HEADERS
from kvalet.actors.config import MODE_ALIASES, MODES, Config
from kvalet.actors.decisions.exact import WISHES
from kvalet.actors.decisions.launch import refused_arguments
from kvalet.actors.decisions.state import DOWN, House
from kvalet.actors.decisions.status import status
from kvalet.actors.gate import Gate
from kvalet.actors.http_exchange import Exchange, Request
from kvalet.actors.keeper import wish_of
from kvalet.actors.ledger import Ledger
from kvalet.actors.stored import parse_stored, read_stored, write_stored
from kvalet.protocol.commands import Load, LoadAsked, UnloadAsked
from kvalet.protocol.errors import ClientFault, EnvironmentFault, ServerFault

GONE_S = 15.0
"""How long an unload waits to see its child gone."""

SHOWN = ("mode", "exact_concurrency", "speculative", "server", "warnings")


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a load."""

    model: str | None = None
    ctx: int | None = None
    parallel: int | None = None
    mode: str | None = None
    exact_concurrency: str | None = None
    server_args: tuple[str, ...] | None = None


class Control:
    """What an operator may change while kvalet runs. Raises ClientFault for what cannot be."""

    def __init__(self, config: Config, ledger: Ledger, gate: Gate, *, keyed: bool) -> None:
        self._config = config
        self._ledger = ledger
        self._gate = gate
        self._keyed = keyed

    async def load(self, exchange: Exchange) -> None:
        """Have another server started, and answer when it takes work, or why it does not.

        The load goes on when its client leaves; a newer one, or an unload, takes its place.
        """
        self._check_ours()
        wish = self._read_wish(exchange.request)
        load = self._as_load(wish, await trio.to_thread.run_sync(_model_of, wish))
        ledger = self._ledger
        before = ledger.house.server.wanted
        ledger.decide([LoadAsked(load=load)])
        await ledger.wait_for(lambda house: _is_over(house, load))
        house = ledger.house
        if house.server.load != load or house.server.state == "unloaded":
            raise ClientFault(
                "another load, or an unload, took its place", status=409, code="superseded"
            )
        if not house.ready:
            raise ServerFault(
                f"llama-server is {house.server.state}: {house.server.reason}",
                status=503,
                code="load_failed",
            )
        await self._show(exchange, changed=house.server.wanted != before)

    async def unload(self, exchange: Exchange) -> None:
        """End the server, or whatever is being started; answer when the child is gone."""
        self._check_ours()
        check_json(exchange.request)
        ledger = self._ledger
        ledger.decide([UnloadAsked()])
        with trio.move_on_after(GONE_S):
            await ledger.wait_for(lambda house: house.server.pid is None)
        await self._show(exchange, changed=True)

    async def exact(self, exchange: Exchange) -> None:
        """Show the stored setting for exact concurrency, or (PUT) store another."""
        if exchange.request.method == "PUT":
            check_json(exchange.request)
            stored = parse_stored(exchange.request.body)
            await trio.to_thread.run_sync(write_stored, self._config.state_dir, stored)
        stored = await trio.to_thread.run_sync(read_stored, self._config.state_dir)
        server = self._ledger.house.server
        effective, level = wish_of(self._config, server.load)
        document = {
            "exact_concurrency": stored.exact_concurrency,
            "effective": effective,
            "level": level,
            "running": server.exact,
            "reload_needed": self._config.attach is None and effective != self._gate.wish,
        }
        await exchange.respond(200, JSON_HEADERS, msgspec.json.encode(document))

    async def _show(self, exchange: Exchange, *, changed: bool) -> None:
        ledger = self._ledger
        whole = status(ledger.house, ledger.now_ns())
        document: dict[str, Any] = {"changed": changed, **{name: whole[name] for name in SHOWN}}
        await exchange.respond(200, JSON_HEADERS, msgspec.json.encode(document))

    def _check_ours(self) -> None:
        if self._config.attach is not None:
            raise ClientFault(
                "kvalet is attached to a server that is not its own to start or end",
                status=409,
                code="attached",
            )

    def _read_wish(self, request: Request) -> _Wish:
        check_json(request)
        try:
            wish = msgspec.json.decode(request.body or b"{}", type=_Wish)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ClientFault(f"the body must be a JSON object: {error}") from None
        problems = list(_problems(wish))
        if problems:
            raise ClientFault("; ".join(problems))
        if wish.server_args and not self._keyed:
            # They name files to read and write: not for everybody on this machine.
            raise ClientFault(
                "server_args are taken only where an --api-key-file guards them",
                status=403,
                code="forbidden",
            )
        return wish

    def _as_load(self, wish: _Wish, model: Path | None) -> Load:
        """The wish where it differs from the settings, so that the same wish is the same load."""
        config, server = self._config, self._ledger.house.server
        mode = MODE_ALIASES.get(wish.mode or "", wish.mode)
        unasked, _ = wish_of(config, Load())
        exact = None if wish.exact_concurrency == unasked else wish.exact_concurrency
        effective, _ = wish_of(config, Load(exact=exact))
        configured = config.model and config.model.resolve()
        return Load(
            model=None if model in (None, configured) else str(model),
            ctx=None if wish.ctx == config.ctx else wish.ctx,
            parallel=None if wish.parallel == config.parallel else wish.parallel,
            mode=None if mode == config.mode else mode,
            exact=exact,
            armed=server.load.armed if effective == self._gate.wish else effective,
            server_args=None if wish.server_args == config.server_args else wish.server_args,
        )


def check_json(request: Request) -> None:
    """Raises ClientFault 415 for a body that does not call itself JSON: a web page may send any
    other to this machine unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ClientFault(
            "send it as JSON: Content-Type: application/json",
            status=415,
            code="unsupported_media_type",
        )


def _problems(wish: _Wish) -> list[str]:
    found: list[str] = []
    for name, figure in (("ctx", wish.ctx), ("parallel", wish.parallel)):
        if figure is not None and not 1 <= figure < 2**31:
            found.append(f"{name} must be positive, not {figure}")
    if wish.mode is not None and wish.mode not in (*MODES, *MODE_ALIASES):
        found.append(f"mode must be one of {', '.join(MODES)}, not {wish.mode!r}")
    if wish.exact_concurrency is not None and wish.exact_concurrency not in WISHES:
        allowed = ", ".join(WISHES)
        found.append(f"exact_concurrency must be one of {allowed}, not {wish.exact_concurrency!r}")
    return found + refused_arguments(wish.server_args or ())


def _model_of(wish: _Wish) -> Path | None:
    if wish.model is None:
        return None
    try:
        return find_model(Path(wish.model).expanduser()).resolve()
    except EnvironmentFault as fault:
        raise ClientFault(str(fault), code="model_not_found") from None


def _is_over(house: House, load: Load) -> bool:
    server = house.server
    return server.load != load or house.ready or server.state in DOWN
