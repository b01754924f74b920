"""Bytes of recurrent state: always f32, one row for each slot and each snapshot of it."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan.shape import ModelShape

F32: Final = 4


@frozen(kw_only=True)
class StateRow:
    """Elements of one layer's state for one row: the rolling part and the summed part."""

    rolling: int
    summed: int


@frozen(kw_only=True)
class State:
    """Recurrent state of one context; bytes of one layer, for all rows."""

    layers: tuple[int, ...] = ()
    rows: int = 0
    rolling_bytes: int = 0
    summed_bytes: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.rolling_bytes + self.summed_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return len(self.layers) * self.layer_bytes


def state_row(shape: ModelShape) -> StateRow:
    """Elements of one row of one layer, by the kind of state that the header declares."""
    embd = shape.embd or 0
    if shape.wkv_head_size:
        return StateRow(rolling=shape.token_shift_count * embd, summed=embd * shape.wkv_head_size)
    if shape.shortconv_cache:
        return StateRow(rolling=embd * (shape.shortconv_cache - 1), summed=0)
    conv = max(0, (shape.ssm.conv_kernel or 0) - 1)
    if shape.kda_head_dim:
        heads = next((count for count in shape.heads if count), 0)
        wide = heads * shape.kda_head_dim
        return StateRow(rolling=3 * conv * wide, summed=shape.kda_head_dim * wide)
    inner, state = shape.ssm.inner_size or 0, shape.ssm.state_size or 0
    return StateRow(
        rolling=conv * (inner + 2 * shape.ssm.group_count * state), summed=state * inner
    )


def state_of(shape: ModelShape, layers: tuple[int, ...], *, rows: int) -> State:
    """The state of ``layers`` with ``rows`` rows (slots times one plus their snapshots)."""
    if not layers:
        return State()
    row = state_row(shape)
    return State(
        layers=layers,
        rows=rows,
        rolling_bytes=row.rolling * F32 * rows,
        summed_bytes=row.summed * F32 * rows,
    )
