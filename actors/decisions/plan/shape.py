"""The dimensions of a model as its GGUF header declares them: the planner's only view of it.

``shape_of`` reads a metadata mapping and never fails: what a header leaves out stays None,
and the rules that need it say so in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from attrs import field, frozen

Scalar = bool | int | float | str
Value = Scalar | Sequence[Scalar]
Metadata = Mapping[str, Value]
"""GGUF metadata: scalars and flat arrays by their full key. A token list is kept as its length
under ``tokenizer.ggml.tokens.length``, never as strings."""

TOKEN_COUNT: Final = "tokenizer.ggml.tokens.length"
LAYERS_MAX: Final = 4096
"""A header that declares more layers than this is damaged: it counts as declaring none."""
REPOSITORY_KEYS: Final = (
    "general.source.huggingface.repository",
    "general.source.url",
    "general.source.repo_url",
    "general.base_model.0.repo_url",
)


@frozen(kw_only=True)
class Ssm:
    """Dimensions of a state-space or delta-net layer; None: not declared."""

    conv_kernel: int | None = None
    inner_size: int | None = None
    state_size: int | None = None
    group_count: int = 0
    time_step_rank: int | None = None


@frozen(kw_only=True)
class ModelShape:
    """One model. Counts are layers, heads, tokens or tensor elements, as their names say.

    ``heads`` and ``kv_heads`` hold one entry a layer (kv_heads falls back to heads); both are
    empty when the header names no heads. ``swa_pattern`` is the header's own word: a mask, a
    period, or None. ``complete`` is False when the header was cut short.
    """

    arch: str = ""
    layers: int = 0
    context: int | None = None
    embd: int | None = None
    vocab: int | None = None
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    ff: tuple[int, ...] = ()
    key_length: int | None = None
    value_length: int | None = None
    key_length_swa: int | None = None
    value_length_swa: int | None = None
    key_length_mla: int | None = None
    value_length_mla: int | None = None
    kv_lora_rank: int | None = None
    indexer_key_length: int | None = None
    indexer_full: tuple[bool, ...] | None = None
    window: int | None = None
    swa_pattern: tuple[bool, ...] | int | None = None
    shared_kv_layers: int = 0
    nextn_layers: int = 0
    full_attention_interval: int | None = None
    recurrent_layers: tuple[bool, ...] | None = None
    ssm: Ssm = field(factory=Ssm)
    shortconv_cache: int | None = None
    wkv_head_size: int | None = None
    kda_head_dim: int | None = None
    rope_dims: int | None = None
    token_shift_count: int = 2
    experts: int = 0
    experts_used: int = 0
    expert_ff: int | None = None
    expert_shared_ff: int | None = None
    leading_dense: int = 0
    moe_every: int = 1
    embd_per_layer: int | None = None
    causal: bool = True
    pooling: int | None = None
    repositories: tuple[str, ...] = ()
    complete: bool = True

    @property
    def kv_heads_max(self) -> int:
        """KV heads of the widest layer; 0 when the header names no heads."""
        return max(self.kv_heads, default=0)


def shape_of(
    metadata: Metadata, *, complete: bool = True, embd_rows: int | None = None
) -> ModelShape:
    """The shape that ``metadata`` declares; ``embd_rows`` is token_embd's second dimension,
    which tells the vocabulary when no key does."""
    arch = _text(metadata, "general.architecture")
    read = _Reader(metadata, arch)
    layers = read.count("block_count") or 0
    if layers > LAYERS_MAX:
        layers, complete = 0, False
    heads = read.per_layer("attention.head_count", layers)
    pattern = read.pattern("attention.sliding_window_pattern")
    recurrent = read.pattern("attention.recurrent_layers")
    indexer = read.pattern("attention.indexer.types")
    return ModelShape(
        arch=arch,
        layers=layers,
        context=read.count("context_length"),
        embd=read.count("embedding_length"),
        vocab=read.count("vocab_size") or _number(metadata.get(TOKEN_COUNT)) or embd_rows,
        heads=heads,
        kv_heads=read.per_layer("attention.head_count_kv", layers) or heads,
        ff=read.per_layer("feed_forward_length", layers),
        key_length=read.count("attention.key_length"),
        value_length=read.count("attention.value_length"),
        key_length_swa=read.count("attention.key_length_swa"),
        value_length_swa=read.count("attention.value_length_swa"),
        key_length_mla=read.count("attention.key_length_mla"),
        value_length_mla=read.count("attention.value_length_mla"),
        kv_lora_rank=read.count("attention.kv_lora_rank"),
        indexer_key_length=read.count("attention.indexer.key_length"),
        indexer_full=indexer if isinstance(indexer, tuple) else None,
        window=read.count("attention.sliding_window"),
        swa_pattern=pattern,
        shared_kv_layers=read.count("attention.shared_kv_layers") or 0,
        nextn_layers=read.count("nextn_predict_layers") or 0,
        full_attention_interval=read.count("full_attention_interval"),
        recurrent_layers=recurrent if isinstance(recurrent, tuple) else None,
        ssm=Ssm(
            conv_kernel=read.count("ssm.conv_kernel"),
            inner_size=read.count("ssm.inner_size"),
            state_size=read.count("ssm.state_size"),
            group_count=read.count("ssm.group_count") or 0,
            time_step_rank=read.count("ssm.time_step_rank"),
        ),
        shortconv_cache=read.count("shortconv.l_cache"),
        wkv_head_size=read.count("wkv.head_size"),
        kda_head_dim=read.count("kda.head_dim"),
        rope_dims=read.count("rope.dimension_count"),
        token_shift_count=read.count("token_shift_count") or 2,
        experts=read.count("expert_count") or 0,
        experts_used=read.count("expert_used_count") or 0,
        expert_ff=read.count("expert_feed_forward_length"),
        expert_shared_ff=read.count("expert_shared_feed_forward_length"),
        leading_dense=read.count("leading_dense_block_count") or 0,
        moe_every=read.count("interleave_moe_layer_step") or 1,
        embd_per_layer=read.count("embedding_length_per_layer_input"),
        causal=metadata.get(f"{arch}.attention.causal") is not False,
        pooling=read.count("pooling_type"),
        repositories=repositories(metadata),
        complete=complete,
    )


def repositories(metadata: Metadata) -> tuple[str, ...]:
    """``owner/name`` of the repositories this model may come from, likeliest first."""
    named = [_text(metadata, key) for key in REPOSITORY_KEYS]
    for owner, name in (
        ("general.base_model.0.organization", "general.base_model.0.name"),
        ("general.organization", "general.basename"),
    ):
        pair = _text(metadata, owner), _text(metadata, name)
        named.append("/".join(part.strip().replace(" ", "-") for part in pair if part.strip()))
    found = (_owner_and_name(text) for text in named)
    return tuple(dict.fromkeys(text for text in found if text))


def _owner_and_name(text: str) -> str:
    parts = [part for part in text.strip().split("/") if part and not part.endswith(":")]
    if "://" in text:
        parts = parts[1:]
    return "/".join(parts[:2]) if len(parts) >= 2 else ""


@frozen
class _Reader:
    metadata: Metadata
    arch: str

    def count(self, key: str) -> int | None:
        """A count; of an array its largest entry."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if _is_array(value):
            return max(
                (n for n in map(_number, cast(Sequence[Scalar], value)) if n is not None),
                default=None,
            )
        return _number(value)

    def per_layer(self, key: str, layers: int) -> tuple[int, ...]:
        """One count a layer; a scalar holds for all of them, a short array for its own part."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if _is_array(value):
            given = tuple(_number(entry) or 0 for entry in cast(Sequence[Scalar], value))[:layers]
            return given + (0,) * (layers - len(given)) if given else ()
        number = _number(value)
        return () if number is None else (number,) * layers

    def pattern(self, key: str) -> tuple[bool, ...] | int | None:
        """A mask or a period."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if _is_array(value):
            return tuple(bool(entry) for entry in cast(Sequence[Scalar], value))
        return _number(value)


def _is_array(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _number(value: object) -> int | None:
    """``value`` as a count that something can have; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 1 << 53 else None


def _text(metadata: Metadata, key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""
