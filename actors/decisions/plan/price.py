"""What one launch takes on each device, term by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import evolve, field, frozen

from kvalet.actors.decisions.plan.compute import ComputeBytes, compute_bytes
from kvalet.actors.decisions.plan.drafting import draft_context, draft_types
from kvalet.actors.decisions.plan.kept import ContextBytes, Rules, cache_types, context_bytes
from kvalet.actors.decisions.plan.layers import Hint
from kvalet.actors.decisions.plan.overheads import EXTRA_CARD, soft_overhead
from kvalet.actors.decisions.plan.placement import HOST, Device, Placement, place
from kvalet.actors.decisions.plan.server_flags import ServerFlags
from kvalet.actors.decisions.plan.shape import ModelShape
from kvalet.actors.decisions.plan.weights import Weights

TermName = Literal[
    "weights", "kv", "state", "draft", "compute", "draft-compute", "output", "projector", "runtime"
]
STAGED_FROM: Final = 32
"""Tokens of a micro-batch from which weights on the host are copied to a device to compute."""


@frozen(kw_only=True)
class Model:
    """A model to be loaded: its shape, and what its tensors weigh.

    ``hint`` is what was found outside of its file about its windows.
    """

    shape: ModelShape
    weights: Weights
    hint: Hint | None = None


@frozen(kw_only=True)
class Offer:
    """What does not change while a context is searched for: the models and the rules.

    ``drafter_unsized``: one will load that no file on this machine tells anything of.
    """

    model: Model
    drafter: Model | None = None
    drafter_on_gpu: bool = True
    drafter_unsized: bool = False
    projector: int = 0
    rules: Rules = "b11434"


@frozen(kw_only=True)
class Term:
    """``bytes`` on one device, and for what. ``known``: by a rule that was measured to hold."""

    name: TermName
    device: str
    bytes: int
    known: bool = True
    why: str = ""


@frozen(kw_only=True)
class Price:
    """One launch on given devices. ``terms`` add up to what each device must hold."""

    context: ContextBytes
    draft: ContextBytes | None
    compute: ComputeBytes
    draft_compute: ComputeBytes | None
    placement: Placement
    terms: tuple[Term, ...] = field(factory=tuple[Term, ...])

    @property
    def certain(self) -> bool:
        """Whether every term follows a rule that was measured to hold."""
        return all(term.known for term in self.terms)

    def on(self, device: str) -> int:
        """Bytes that ``device`` must hold."""
        return sum(term.bytes for term in self.terms if term.device == device)

    def of(self, *names: TermName) -> Mapping[str, int]:
        """Bytes of these terms by device; devices without any are left out."""
        sums = Counter[str]()
        for term in self.terms:
            if term.name in names and term.bytes:
                sums[term.device] += term.bytes
        return dict(sums)


def price(offer: Offer, flags: ServerFlags, devices: Sequence[Device] = ()) -> Price:
    """Price ``flags`` on ``devices``, in their order. Raises ConfigFault where the server would
    refuse to start."""
    shape = offer.model.shape
    target = context_bytes(shape, flags, rules=offer.rules, hint=offer.model.hint)
    drafter = offer.drafter.shape if offer.drafter is not None else None
    drafts = offer.model if offer.drafter is None else offer.drafter
    draft = draft_context(shape, flags, target.sizes, drafter, hint=drafts.hint)
    placement = _placement(shape, flags, devices)
    compute = compute_bytes(
        shape, target, flags, cache_types(flags), placement, staged=_staged(offer, flags, placement)
    )
    draft_placement = placement
    draft_compute = None
    if draft is not None:
        if drafter is not None:
            there = devices if offer.drafter_on_gpu else ()
            draft_placement = place(drafter.layers, there, gpu_layers=flags.draft_gpu_layers)
        draft_compute = compute_bytes(
            drafter or shape, draft, flags, draft_types(flags), draft_placement
        )
    priced = Price(
        context=target,
        draft=draft,
        compute=compute,
        draft_compute=draft_compute,
        placement=placement,
    )
    return evolve(priced, terms=tuple(_terms(offer, flags, priced, draft_placement)))


def weights_by_device(
    model: Model, placement: Placement, flags: ServerFlags | None = None
) -> Mapping[str, int]:
    """Where the tensors go: input embeddings stay on the host, and tied ones are copied to the
    device of the output; routed experts of ``--cpu-moe`` layers stay on the host as well."""
    weights = model.weights
    if placement.output == HOST and set(placement.layers) <= {HOST}:
        return {HOST: weights.total_bytes}
    kept = _host_expert_layers(flags, len(weights.by_layer))
    held = Counter({HOST: weights.input_bytes + weights.per_layer_embd_bytes})
    for index, size in enumerate(weights.by_layer):
        device = placement.layers[index] if index < len(placement.layers) else placement.output
        experts = weights.experts_by_layer[index] if index < kept else 0
        held[HOST] += experts
        held[device] += size - experts
    if placement.output != HOST or not weights.is_tied:
        held[placement.output] += weights.output_bytes
    held[placement.output] += weights.other_bytes
    return held


def _host_expert_layers(flags: ServerFlags | None, layers: int) -> int:
    if flags is None:
        return 0
    return layers if flags.cpu_moe else min(layers, flags.n_cpu_moe)


def _placement(shape: ModelShape, flags: ServerFlags, devices: Sequence[Device]) -> Placement:
    return place(
        shape.layers,
        devices,
        gpu_layers=flags.gpu_layers,
        kv_offload=flags.kv_offload,
        split=flags.tensor_split,
    )


def _staged(offer: Offer, flags: ServerFlags, placement: Placement) -> int:
    """The largest tensor of a layer on the host: it passes through a device for large batches."""
    if not placement.devices or placement.all_on_devices:
        return 0
    if not flags.op_offload or min(flags.batch, flags.ubatch) < STAGED_FROM:
        return 0
    largest = offer.model.weights.largest_by_layer
    on_host = (index for index, name in enumerate(placement.layers) if name == HOST)
    return max((largest[index] for index in on_host if index < len(largest)), default=0)


def _terms(
    offer: Offer, flags: ServerFlags, priced: Price, draft_placement: Placement
) -> Iterator[Term]:
    placement = priced.placement
    for device, size in weights_by_device(offer.model, placement, flags).items():
        yield Term(name="weights", device=device, bytes=size, known=not flags.override_tensors)
    for device, size in priced.context.caches_per_device(placement).items():
        yield Term(name="kv", device=device, bytes=size)
    for device, size in priced.context.state_per_device(placement).items():
        yield Term(name="state", device=device, bytes=size)
    yield from _compute_terms("compute", priced.compute)
    yield Term(name="output", device=HOST, bytes=priced.compute.output)
    if offer.drafter is not None:
        for device, size in weights_by_device(offer.drafter, draft_placement).items():
            yield Term(name="weights", device=device, bytes=size, why="drafter")
    if priced.draft is not None and priced.draft_compute is not None:
        for device, size in priced.draft.per_device(draft_placement).items():
            yield Term(name="draft", device=device, bytes=size)
        yield from _compute_terms("draft-compute", priced.draft_compute)
        yield Term(name="output", device=HOST, bytes=priced.draft_compute.output, why="drafter")
    first = placement.devices[0].name if placement.devices else HOST
    if offer.projector:
        there = first if flags.mmproj_offload else HOST
        yield Term(name="projector", device=there, bytes=offer.projector)
    for number, card in enumerate(placement.devices):
        soft = (
            EXTRA_CARD
            if number
            else soft_overhead(
                on_gpu=True,
                projector=offer.projector if flags.mmproj_offload else 0,
                drafting=priced.draft is not None,
            )
        )
        yield Term(name="runtime", device=card.name, bytes=soft, known=False, why="not in the log")


def _compute_terms(
    name: Literal["compute", "draft-compute"], compute: ComputeBytes
) -> Iterator[Term]:
    for device, size in compute.per_device.items():
        yield Term(name=name, device=device, bytes=size, known=compute.known, why=compute.why)
