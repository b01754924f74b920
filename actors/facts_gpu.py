"""Which GPUs are here and what is free on each, asked of the NVIDIA driver."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import structlog
from attrs import frozen

from kvalet.actors.decisions.plan.devices import MIB
from kvalet.actors.facts_host import HostMemory

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NOT_SUPPORTED: Final = 3
"""NVML's code for what a card cannot tell."""
_log = structlog.get_logger(__name__)


@frozen(kw_only=True)
class GpuSample:
    """One GPU at one moment, in MiB rounded down. ``index`` is the driver's own number.

    ``total_mib`` is None where the driver does not say what the card holds for us.
    """

    index: int
    free_mib: int
    total_mib: int | None = None
    uuid: str = ""
    name: str = ""


class Memory(Protocol):
    """Bytes of one card, as NVML reports them."""

    @property
    def total(self) -> Any: ...
    @property
    def free(self) -> Any: ...


class Nvml(Protocol):
    """The part of NVML that is used, as nvidia-ml-py spells it."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetMigMode(self, device: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Memory: ...


def read_gpus(
    env: Mapping[str, str], *, host: HostMemory | None = None, nvml: Nvml | None = None
) -> tuple[GpuSample, ...]:
    """The GPUs that a child with ``env`` would see, in the order it would number them as long
    as CUDA_DEVICE_ORDER is PCI_BUS_ID: the driver's numbers follow the bus.

    Empty without a driver, a library or a card; a card that cannot be asked is left out with
    a warning. Never raises. A card without memory of its own has what ``host`` has, if given.
    ``nvml`` stands for the driver's library in tests.
    """
    library = nvml or _library()
    if library is None:
        return ()
    try:
        library.nvmlInit()
    except library.NVMLError:
        return ()
    try:
        return visible(_read_all(library, host), env.get(VISIBLE))
    finally:
        try:
            library.nvmlShutdown()
        except library.NVMLError as error:
            _log.debug("gpu.shutdown_failed", reason=str(error))


def visible(gpus: Sequence[GpuSample], setting: str | None) -> tuple[GpuSample, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order; None: all of them.

    As CUDA reads it: the list ends at the first entry that names no card, a card named twice
    makes the whole list void, and a UUID may be cut short as long as it is unmistakable.
    """
    if setting is None:
        return tuple(gpus)
    chosen: list[GpuSample] = []
    for entry in setting.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None:
            break
        if gpu in chosen:
            return ()
        chosen.append(gpu)
    return tuple(chosen)


def parse_smi(text: str) -> tuple[GpuSample, ...]:
    """GPUs from lines of ``index, free, total`` or ``index, free``, in MiB.

    A total that is no number is unknown; a line whose index or free figure is none is left
    out, without the others.
    """
    found: list[GpuSample] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        index = _count(cells[0])
        free = _mebibytes(cells[1]) if len(cells) > 1 else None
        if index is None or free is None:
            if line.strip():
                _log.warning("gpu.skipped", line=line.strip()[:100])
            continue
        total = _mebibytes(cells[2]) if len(cells) > 2 else None
        known = total is not None and total > 0 and free <= total
        found.append(GpuSample(index=index, free_mib=free, total_mib=total if known else None))
    return tuple(found)


def _library() -> Nvml | None:
    try:
        return cast(Nvml, importlib.import_module("pynvml"))
    except (ImportError, OSError):
        return None


def _read_all(nvml: Nvml, host: HostMemory | None) -> list[GpuSample]:
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        _log.warning("gpu.count_failed", reason=str(error))
        return []
    found: list[GpuSample] = []
    for index in range(count):
        try:
            found.append(_read_one(nvml, index, host))
        except nvml.NVMLError as error:
            _log.warning("gpu.skipped", index=index, reason=str(error))
    return found


def _read_one(nvml: Nvml, index: int, host: HostMemory | None) -> GpuSample:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    free_mib, total_mib = _memory(nvml, handle, host)
    return GpuSample(
        index=index,
        free_mib=free_mib,
        total_mib=total_mib,
        uuid=_asked(nvml, nvml.nvmlDeviceGetUUID, handle),
        name=_asked(nvml, nvml.nvmlDeviceGetName, handle),
    )


def _memory(nvml: Nvml, handle: Any, host: HostMemory | None) -> tuple[int, int | None]:
    """Free and, if it is known, total MiB."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if host is None or getattr(error, "value", None) != NOT_SUPPORTED:
            raise
        return host.available // MIB, None
    free, total = int(memory.free), int(memory.total)
    # A partitioned card reports the whole of itself, of which we get one part.
    known = total > 0 and free <= total and not _is_partitioned(nvml, handle)
    return free // MIB, total // MIB if known else None


def _asked(nvml: Nvml, question: Callable[[Any], str | bytes], handle: Any) -> str:
    """An answer that a card may owe us without being left out."""
    try:
        answer = question(handle)
    except nvml.NVMLError:
        return ""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def _is_partitioned(nvml: Nvml, handle: Any) -> bool:
    try:
        current, *_ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False
    return bool(current)


def _named(gpus: Sequence[GpuSample], entry: str) -> GpuSample | None:
    number = _count(entry)
    if number is not None:
        found = [gpu for gpu in gpus if gpu.index == number]
    elif entry.startswith("GPU-"):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        found = []
    return found[0] if len(found) == 1 else None


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _mebibytes(text: str) -> int | None:
    return _count(text.removesuffix("MiB").rstrip())
