"""What llama-server's arguments and environment say about memory, resolved to one value each."""

from __future__ import annotations

from typing import Final, Literal

from attrs import frozen

Switch = Literal["auto", "on", "off"]
Split = Literal["none", "layer", "row", "tensor"]

BATCH: Final = 2048
UBATCH: Final = 512
CHECKPOINTS: Final = 32
CACHE_RAM_MIB: Final = 8192
DRAFT_MAX: Final = 3


@frozen(kw_only=True)
class ServerFlags:
    """One launch as llama-server will understand it. None: not said.

    Sizes are cells (``ctx``, ``per_slot``), tokens (``batch``, ``ubatch``, ``draft_max``) or
    MiB (``cache_ram_mib``; -1: no bound). ``spec_types`` accumulates environment and flags, as
    the server does. ``gpu_layers`` -1 means all; None leaves the number to the server, which
    takes all unless it fits them. ``devices`` empty means none at all.
    """

    ctx: int | None = None
    parallel: int | None = None
    kv_unified: bool | None = None
    per_slot: int | None = None
    batch: int = BATCH
    ubatch: int = UBATCH
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: Switch = "auto"
    swa_full: bool = False
    kv_offload: bool = True
    op_offload: bool = True
    gpu_layers: int | None = None
    fit: bool = True
    fit_ctx: int | None = None
    split_mode: Split | None = None
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    devices: tuple[str, ...] | None = None
    spec_types: tuple[str, ...] = ()
    draft_max: int | None = None
    draft_model: str | None = None
    draft_hub: str | None = None
    draft_type_k: str = "f16"
    draft_type_v: str = "f16"
    draft_gpu_layers: int | None = None
    draft_devices: tuple[str, ...] | None = None
    checkpoints: int = CHECKPOINTS
    cache_ram_mib: int = CACHE_RAM_MIB
    embedding: bool = False
    reranking: bool = False
    mmproj: str | None = None
    mmproj_url: str | None = None
    mmproj_offload: bool = True
    mmproj_device: str | None = None
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    n_cpu_ffn: int = 0
    override_tensors: tuple[str, ...] = ()
    draft_cpu_moe: bool = False
    draft_n_cpu_moe: int = 0
    draft_override_tensors: tuple[str, ...] = ()
    load_mode: str = "auto"

    @property
    def slots(self) -> int:
        """Slots that this launch gets: four when nothing is said."""
        return 4 if self.parallel is None else max(1, self.parallel)

    @property
    def unified(self) -> bool:
        """Whether all slots share one pool: by word, or because no number of slots was given.

        Without a number the pool is shared whatever is said.
        """
        return self.parallel is None or self.kv_unified is True
