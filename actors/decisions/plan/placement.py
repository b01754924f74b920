"""On which device each layer lies, as the server assigns them before it allocates anything."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from attrs import field, frozen

HOST: Final = "CPU"


@frozen(kw_only=True)
class Device:
    """One accelerator. ``share`` weighs it in a layer split: free bytes, or the user's number."""

    name: str
    share: float = 1.0
    cuda: bool = True


@frozen(kw_only=True)
class Placement:
    """The device of each layer and, last, of the output."""

    layers: tuple[str, ...]
    output: str = HOST
    devices: tuple[Device, ...] = ()
    kv_offload: bool = True
    cuda: frozenset[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        names = frozenset(device.name for device in self.devices if device.cuda)
        object.__setattr__(self, "cuda", names)

    def layer(self, index: int) -> str:
        """The device that computes layer ``index``."""
        return self.layers[index]

    def cache(self, index: int) -> str:
        """The device that holds layer ``index``'s keys, values or state."""
        return self.layers[index] if self.kv_offload else HOST

    def uses(self, device: str) -> bool:
        """Whether ``device`` computes anything."""
        return device == self.output or device in self.layers

    @property
    def all_on_devices(self) -> bool:
        """Whether nothing is computed on the host."""
        return bool(self.devices) and HOST not in self.layers and self.output != HOST


def place(
    layers: int,
    devices: Sequence[Device] = (),
    *,
    gpu_layers: int | None = None,
    kv_offload: bool = True,
    split: Sequence[float] = (),
) -> Placement:
    """Place ``layers`` and the output, which counts as one more: the last ``gpu_layers`` of them
    go to ``devices`` in order, in proportion to ``split`` or else to each device's share.

    ``gpu_layers`` None or negative means all of them.
    """
    total = layers + 1
    wanted = total if gpu_layers is None or gpu_layers < 0 else min(gpu_layers, total)
    if not devices or not wanted:
        return Placement(layers=(HOST,) * layers, devices=tuple(devices), kv_offload=kv_offload)
    shares = (
        [split[i] if i < len(split) else 0.0 for i in range(len(devices))]
        if any(split)
        else [device.share for device in devices]
    )
    whole = sum(shares) or 1.0
    bounds = [upto / whole for upto in accumulate(shares)]
    first = total - wanted
    names = [HOST] * first + [
        devices[min(bisect_right(bounds, i / wanted), len(devices) - 1)].name for i in range(wanted)
    ]
    return Placement(
        layers=tuple(names[:-1]),
        output=names[-1],
        devices=tuple(devices),
        kv_offload=kv_offload,
    )
