"""One chat's cells on their way out of the pool and back."""

from __future__ import annotations

import structlog

from kvalet.actors.gate import Gate
from kvalet.actors.upstream import UpstreamClient
from kvalet.protocol.errors import KvaletError
from kvalet.protocol.ids import Cells, RequestId, SlotId


def file_name(request: RequestId) -> str:
    """Where the server saves this request's cells, inside its slot directory."""
    return f"{request}.kv"


class Berth:
    """Where a parked chat's cells are kept: a file of the server's, or nowhere."""

    def __init__(self, gate: Gate, request: RequestId) -> None:
        self._gate = gate
        self._keeper: UpstreamClient | None = None
        self._name = file_name(request)
        self._cells = Cells(0)

    async def move_out(self, slot: SlotId, save: bool) -> int | None:
        """Empty the slot, saving its cells first if ``save``. Bytes saved, None for nothing.

        What cannot be saved is computed again later; the chat itself goes on.
        """
        size: int | None = None
        upstream = self._gate.reach()
        if save:
            # Set first: cancelled in the middle of a save there is a file to delete.
            self._keeper = upstream
            try:
                saved = await upstream.save(slot, self._name)
                self._cells, size = saved.cells, saved.size
            except KvaletError as fault:
                structlog.get_logger(__name__).warning(
                    "not saved, will be computed again", slot=slot, why=str(fault)
                )
                self.forget()
        await upstream.empty(slot)
        return size

    async def bring_back(self, slot: SlotId, whole: Cells) -> Cells:
        """Put the cells into ``slot``; how many of ``whole`` the next leg should reuse."""
        if self._keeper is None:
            return whole
        try:
            await self._gate.reach().restore(slot, self._name)
        except KvaletError as fault:
            structlog.get_logger(__name__).warning(
                "not restored, is computed again", slot=slot, why=str(fault)
            )
            return whole
        finally:
            self.forget()
        return min(whole, self._cells)

    def forget(self) -> None:
        """Delete what was saved, also when its server is gone: the directory is ours."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.forget(self._name)
