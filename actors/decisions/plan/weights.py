"""What a model's tensors weigh, layer by layer. Pure: sizes come from the file's own list."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Final

from attrs import frozen

from kvalet.actors.decisions.plan.shape import LAYERS_MAX

OUTPUT: Final = "output.weight"
EMBEDDINGS: Final = "token_embd.weight"
_BLOCK: Final = re.compile(r"blk\.(\d{1,4})\.")
_INPUT: Final = ("token_embd", "token_types", "position_embd")
_PER_LAYER: Final = "per_layer_token_embd.weight"
_EXPERTS: Final = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")


@frozen(kw_only=True)
class Tensor:
    """One tensor: ``dims`` in elements, fastest first; ``kind`` as ggml names its type."""

    name: str
    kind: str
    dims: tuple[int, ...]
    n_bytes: int

    @property
    def block(self) -> int | None:
        """The layer this tensor belongs to; None for those outside the layers."""
        found = _BLOCK.match(self.name)
        return int(found[1]) if found and int(found[1]) < LAYERS_MAX else None

    @property
    def is_expert(self) -> bool:
        """Whether it holds routed experts, which ``--cpu-moe`` keeps in host memory."""
        return _EXPERTS.search(self.name) is not None


@frozen(kw_only=True, slots=False)
class Weights:
    """All tensors of a model. Sizes in bytes, without the padding a device adds to each."""

    tensors: tuple[Tensor, ...] = ()

    @cached_property
    def by_layer(self) -> tuple[int, ...]:
        """One size for each layer up to the last one that has a tensor."""
        return self._by_layer(experts_only=False)

    @cached_property
    def experts_by_layer(self) -> tuple[int, ...]:
        """The share of the routed experts in ``by_layer``."""
        return self._by_layer(experts_only=True)

    @cached_property
    def largest_by_layer(self) -> tuple[int, ...]:
        """The largest tensor of each layer."""
        largest = [0] * len(self.by_layer)
        for tensor in self.tensors:
            block = tensor.block
            if block is not None:
                largest[block] = max(largest[block], tensor.n_bytes)
        return tuple(largest)

    @cached_property
    def input_bytes(self) -> int:
        """Token and position embeddings: looked up by row, so llama-server keeps them on the
        host whatever is offloaded."""
        return sum(t.n_bytes for t in self.tensors if t.name.split(".")[0] in _INPUT)

    @cached_property
    def per_layer_embd_bytes(self) -> int:
        """Per-layer embeddings (gemma3n, gemma4): where they go is the build's choice."""
        return self._named(_PER_LAYER)

    @cached_property
    def output_bytes(self) -> int:
        """The output matrix; with tied embeddings, the copy of them that takes its place."""
        return self._named(OUTPUT) or self._named(EMBEDDINGS)

    @cached_property
    def other_bytes(self) -> int:
        """Norms and projections that no other part holds; the parts make up ``total_bytes``."""
        named = self.input_bytes + self.per_layer_embd_bytes + self._named(OUTPUT)
        return self.total_bytes - sum(self.by_layer) - named

    @cached_property
    def total_bytes(self) -> int:
        """Everything that the file stores; a copy of tied embeddings is not stored."""
        return sum(t.n_bytes for t in self.tensors)

    @cached_property
    def is_tied(self) -> bool:
        """Whether the token embeddings serve as the output matrix too."""
        return self._named(OUTPUT) == 0

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Tensor types present, the heaviest first."""
        sums: dict[str, int] = {}
        for tensor in self.tensors:
            sums[tensor.kind] = sums.get(tensor.kind, 0) + tensor.n_bytes
        return tuple(sorted(sums, key=lambda kind: (-sums[kind], kind)))

    def _named(self, name: str) -> int:
        return sum(t.n_bytes for t in self.tensors if t.name == name)

    def _by_layer(self, *, experts_only: bool) -> tuple[int, ...]:
        blocks = [(tensor.block, tensor) for tensor in self.tensors]
        count = max((block for block, _ in blocks if block is not None), default=-1) + 1
        sums = [0] * count
        for block, tensor in blocks:
            if block is not None and (tensor.is_expert or not experts_only):
                sums[block] += tensor.n_bytes
        return tuple(sums)
