"""Slot actions: a slot's sequence into a real file, back out of one, or away."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import trio

from kvalet.actors.http import Request
from kvalet.sims.fakeserver.options import Options
from kvalet.sims.fakeserver.refusals import Refused
from kvalet.sims.fakeserver.requests import decode_object
from kvalet.sims.fakeserver.slot import Action
from kvalet.sims.fakeserver.turns import Turns

_MAGIC: Final = b"kvalet-sim-slot-1\0"
_NO_ROOM: Final = "Unable to restore slot: No available space in KV cache or invalid slot save file"


class SlotFiles:
    """What ``POST /slots/N?action=…`` does. Files of another layout are refused."""

    def __init__(self, options: Options, turns: Turns) -> None:
        self._directory = options.slot_dir
        self._turns = turns
        pool = options.pool
        self._head = _MAGIC + struct.pack("<?I", pool.unified, pool.cell_bytes)

    async def act(self, number: int, slot: str, request: Request) -> dict[str, Any]:
        """Do it and say so. Raises Refused."""
        directory = self._directory
        if directory is None:
            raise Refused(
                501, "This server does not support slots action. Start it with `--slot-save-path`"
            )
        if not slot.isdecimal():
            raise Refused(400, "Invalid slot ID")
        action = request.query.get("action", "")
        if action == "erase":
            acted = await self._turns.act(Action(number=number, kind="erase", slot=int(slot)))
            return {"id_slot": int(slot), "n_erased": len(acted.tokens)}
        if action not in ("save", "restore"):
            raise Refused(400, "Invalid action")
        name = decode_object(request.body).get("filename")
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise Refused(400, "Invalid filename")
        began = trio.current_time()
        if action == "save":
            done = await self._save(number, int(slot), directory / name)
        else:
            done = await self._restore(number, int(slot), directory / name)
        took = {f"{action}_ms": (trio.current_time() - began) * 1e3}
        return {"id_slot": int(slot), "filename": name, **done, "timings": took}

    async def _save(self, number: int, slot: int, path: Path) -> dict[str, int]:
        acted = await self._turns.act(Action(number=number, kind="save", slot=slot))
        tokens = acted.tokens
        # Not in a thread: on a virtual clock the time would run on meanwhile.
        written = path.write_bytes(self._head + struct.pack(f"<{len(tokens)}I", *tokens))  # noqa: ASYNC240
        return {"n_saved": len(tokens), "n_written": written}

    async def _restore(self, number: int, slot: int, path: Path) -> dict[str, int]:
        try:
            raw = path.read_bytes()  # noqa: ASYNC240
        except OSError:
            raw = b""
        rest = raw[len(self._head) :]
        if not raw.startswith(self._head) or len(rest) % 4:
            raise Refused(400, _NO_ROOM)
        tokens = struct.unpack(f"<{len(rest) // 4}I", rest)
        action = Action(number=number, kind="restore", slot=slot, tokens=tokens)
        if not (await self._turns.act(action)).done:
            raise Refused(400, _NO_ROOM)
        return {"n_restored": len(tokens), "n_read": len(raw)}
