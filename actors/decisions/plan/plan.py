"""The plan of one launch: what it takes where, the context and split chosen, and why.

``make_plan`` is a pure function of the model's facts, the memory readings, the arguments and the
environment, so that a recorded input gives the same plan again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from attrs import evolve, field, frozen

from kvalet.actors.decisions.plan.arch import MEASURED
from kvalet.actors.decisions.plan.devices import DEFAULT, MIB, Budget, Gpu
from kvalet.actors.decisions.plan.draft_reserve import DraftReserve
from kvalet.actors.decisions.plan.extras import split_mode_of
from kvalet.actors.decisions.plan.fit import (
    CTX_MIN,
    HOST_CTX,
    Choice,
    HostMemory,
    Load,
    advertised_ctx,
    auto_choice,
    explicit_choice,
    host_choice,
)
from kvalet.actors.decisions.plan.flags import Resolved, resolve_flags
from kvalet.actors.decisions.plan.host import HostBytes, host_bytes
from kvalet.actors.decisions.plan.kept import Rules
from kvalet.actors.decisions.plan.placement import HOST, Device
from kvalet.actors.decisions.plan.price import Offer, Price, price
from kvalet.actors.decisions.plan.scrub import LaunchDecision, overriding_variables
from kvalet.actors.decisions.plan.server_flags import ServerFlags, Split
from kvalet.actors.decisions.plan.sizes import asked_cells
from kvalet.actors.decisions.plan.tensor_split import (
    Downgrade,
    TensorLoad,
    TensorPlan,
    layer_again,
    tensor_attempt,
    tensor_or_layer,
)

KNOWN_BUILDS: Final = ("b10434", "b11434")
"""Builds whose allocations were measured and found to follow the same rules."""


@frozen(kw_only=True)
class PlanInput:
    """Everything a plan depends on. ``argv`` are llama-server's arguments, the program left out.

    ``host`` is None when host memory is not known. ``parking`` bytes of it are set aside for
    parked chats. ``choose_ctx`` says that the largest context that fits is wanted where the
    arguments name none, without cards up to ``fit.HOST_CTX``; otherwise the server's own choice
    is priced.
    """

    offer: Offer
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict[str, str])
    gpus: tuple[Gpu, ...] = ()
    host: int | None = None
    parking: int = 0
    build: str = ""
    budget: Budget = DEFAULT
    choose_ctx: bool = False

    @property
    def host_memory(self) -> HostMemory | None:
        """Host memory for the launch, less what parked chats may take."""
        if self.host is None:
            return None
        return HostMemory(available=self.host, parking=self.parking)


@frozen(kw_only=True)
class Plan:
    """A launch as it was planned. Sizes are cells or bytes; ``fits`` says that every device holds
    its part within its budget (devices of unknown memory hold anything).

    ``max_ctx`` is the most that would fit, ``native_ctx`` what the model was trained for, 0 where
    its header does not say. ``added`` are the arguments that the plan puts behind the given ones.
    """

    arch: str
    build: str
    price: Price
    host: HostBytes
    flags: ServerFlags
    split: Split
    tensor_split: tuple[int, ...] = ()
    cards: tuple[int, ...] = ()
    budgets: Mapping[str, int] = field(factory=dict[str, int])
    fits: bool = True
    certain: bool = True
    max_ctx: int = 0
    native_ctx: int = 0
    added: tuple[str, ...] = ()
    env_removed: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether the plan names the cards, so that nothing is left for the server to fit."""
        return "-dev" in self.added


def rules_of(build: str) -> tuple[Rules, bool]:
    """The rule set for ``build``, and whether it was measured with it."""
    return ("b11434", True) if build in KNOWN_BUILDS else ("larger", False)


def device_name(index: int) -> str:
    """llama-server's name of a card."""
    return f"CUDA{index}"


def make_plan(asked: PlanInput) -> Plan:
    """Plan one launch. Raises ConfigFault where the server would refuse to start."""
    resolved = resolve_flags(asked.argv, asked.env)
    warnings = [("flag", problem) for problem in resolved.problems]
    if asked.offer.drafter_unsized:
        # What cannot be sized is kept free as a flat share of every card.
        asked = evolve(asked, budget=asked.budget.without_flat_draft())
    if asked.gpus and split_mode_of(resolved) == "tensor":
        plan = _tensor_plan(asked, resolved, warnings)
        if plan is not None:
            return plan
        resolved = evolve(resolved, flags=layer_again(resolved.flags))
    return _layer_plan(asked, resolved, warnings)


def _layer_plan(asked: PlanInput, resolved: Resolved, warnings: list[tuple[str, str]]) -> Plan:
    flags = resolved.flags
    pricing = _Pricing(asked, flags)
    native = asked.offer.model.shape.context or pricing.asked_ctx
    gpus = _cards_for(asked, resolved)
    layers = asked.offer.model.shape.layers
    partial = flags.gpu_layers is not None and 0 < flags.gpu_layers <= layers
    wanted = None if asked.choose_ctx and not flags.ctx else pricing.asked_ctx
    if not gpus:
        # Without a card nobody waits for what a whole context would take to compute.
        choice = _on_host(asked, pricing, wanted, min(native, HOST_CTX))
        max_ctx = _on_host(asked, pricing, None, native).ctx
    else:
        load = pricing.load()
        choice = (
            auto_choice(native, gpus, asked.budget, load)
            if wanted is None
            else explicit_choice(wanted, gpus, asked.budget, load)
        )
        max_ctx = advertised_ctx(native, gpus, asked.budget, load, in_use=choice.ctx)
    if not choice.fits:
        warnings.append(("does-not-fit", _shortage(asked, pricing, choice, gpus, max_ctx)))
    chosen = [gpu for gpu in gpus if not choice.cards or gpu.index in choice.cards]
    split: Split = "layer" if len(chosen) > 1 else "none"
    added: tuple[str, ...] = ()
    if wanted is None:
        added += ("-c", str(choice.ctx))
    if gpus and choice.fits and not partial:
        # Pinned cards leave the server nothing to fit; otherwise its own fitting stays on.
        added += _pins(chosen)
        if split == "layer" and not flags.tensor_split:
            # Left alone the server would go by what is free, not by what may be used.
            rooms = (asked.budget.room(gpu) // MIB for gpu in chosen)
            added += ("-ts", ",".join(map(str, rooms)))
    plan = _finished(asked, resolved, pricing, warnings, choice, chosen, split)
    return evolve(plan, max_ctx=max_ctx, added=added)


def _pins(cards: Sequence[Gpu]) -> tuple[str, ...]:
    """All layers on these cards, with nothing left for the server to fit."""
    names = ",".join(device_name(gpu.index) for gpu in cards)
    return ("-ngl", "all", "-fit", "off", "-dev", names)


def _cards_for(asked: PlanInput, resolved: Resolved) -> tuple[Gpu, ...]:
    """The cards that this launch may use: none without layers for them, one without a split."""
    flags = resolved.flags
    if flags.gpu_layers == 0:
        return ()
    if split_mode_of(resolved) == "none":
        main = tuple(gpu for gpu in asked.gpus if gpu.index == flags.main_gpu)
        return main or asked.gpus[:1]
    return asked.gpus


def _tensor_plan(
    asked: PlanInput, resolved: Resolved, warnings: list[tuple[str, str]]
) -> Plan | None:
    """The plan of a tensor split; None when a layer split must do, and ``warnings`` says why."""
    flags = tensor_attempt(resolved.flags)
    pricing = _Pricing(asked, flags)
    shape = asked.offer.model.shape
    one = pricing.on(pricing.asked_ctx, asked.gpus[:1])
    base = max(one.compute.per_device.values(), default=0)
    load = TensorLoad(
        weights=sum(one.of("weights").values()),
        reserve=base,
        kv=lambda ctx: pricing.on(ctx, asked.gpus[:1]).context.bytes,
        draft=DraftReserve(
            lambda ctx: sum(pricing.on(ctx, asked.gpus[:1]).of("draft", "draft-compute").values()),
            flat=asked.offer.drafter_unsized,
        ),
        soft=sum(one.of("runtime").values()),
    )
    native = shape.context or pricing.asked_ctx
    outcome = tensor_or_layer(load, asked.gpus, asked.budget, pricing.asked_ctx, native=native)
    if isinstance(outcome, Downgrade):
        why = {"gpu_count": "too few cards have room", "capacity": "the cards cannot hold it"}
        warnings.append(("tensor-downgraded", f"split by layers instead: {why[outcome.reason]}"))
        return None
    if flags.type_k != resolved.flags.type_k or flags.type_v != resolved.flags.type_v:
        warnings.append(("cache-type", "a tensor split takes no quantised cache: f16 is used"))
    return _tensor_finished(asked, evolve(resolved, flags=flags), pricing, outcome, warnings)


def _tensor_finished(
    asked: PlanInput,
    resolved: Resolved,
    pricing: _Pricing,
    outcome: TensorPlan,
    warnings: list[tuple[str, str]],
) -> Plan:
    chosen = [gpu for gpu in asked.gpus if gpu.index in outcome.cards]
    added: tuple[str, ...] = ("-c", str(outcome.ctx), "--split-mode", "tensor", *_pins(chosen))
    if outcome.split is not None:
        added += ("--tensor-split", ",".join(map(str, outcome.split)))
    choice = Choice(outcome.ctx, outcome.cards, True)
    plan = _finished(asked, resolved, pricing, warnings, choice, chosen, "tensor")
    return evolve(plan, max_ctx=outcome.max_ctx, added=added, tensor_split=outcome.split or ())


class _Pricing:
    """Prices of one set of flags at any context, each computed once."""

    def __init__(self, asked: PlanInput, flags: ServerFlags) -> None:
        self.flags = flags
        self.asked_ctx = asked_cells(asked.offer.model.shape, flags)
        self._asked = asked
        self._offer = evolve(asked.offer, rules=rules_of(asked.build)[0])
        self._priced = lru_cache(maxsize=256)(self._price)

    def on(self, ctx: int, gpus: Sequence[Gpu]) -> Price:
        """The price at ``ctx`` on these cards; on none of them, of a launch on the host."""
        return self._priced(ctx, tuple(gpus))

    def load(self) -> Load:
        """What the search for a context needs to know, over the cards alone."""
        fixed = self.on(self.asked_ctx, self._asked.gpus[:1])
        name = device_name(self._asked.gpus[0].index)
        constant = fixed.of("weights", "projector", "runtime").get(name, 0)
        return Load(
            fixed=constant,
            growing=self._growing,
            per_card=self._per_card,
            placed=self._placed,
        )

    def host_load(self) -> Load:
        """The same of a launch without cards."""
        priced = self.on(self.asked_ctx, ())
        constant = sum(priced.of("weights", "projector").values())
        return Load(fixed=constant, growing=lambda ctx, _: self.on(ctx, ()).on(HOST) - constant)

    def _growing(self, ctx: int, cards: int) -> int:
        priced = self.on(ctx, self._asked.gpus[:cards])
        held = priced.of("kv", "state", "draft", "compute", "draft-compute")
        return sum(size for device, size in held.items() if device != HOST)

    def _per_card(self, ctx: int, cards: int) -> int:
        priced = self.on(ctx, self._asked.gpus[:cards])
        held = priced.of("compute", "draft-compute")
        return max((size for device, size in held.items() if device != HOST), default=0)

    def _placed(self, ctx: int, cards: Sequence[Gpu]) -> bool:
        there = sorted(cards, key=lambda gpu: gpu.index)
        priced = self.on(ctx, there)
        return all(
            priced.on(device_name(gpu.index)) <= self._asked.budget.usable(gpu) for gpu in there
        )

    def _price(self, ctx: int, gpus: tuple[Gpu, ...]) -> Price:
        room = self._asked.budget.room
        devices = [Device(name=device_name(g.index), share=float(max(1, room(g)))) for g in gpus]
        return price(self._offer, evolve(self.flags, ctx=ctx), devices)


def _on_host(asked: PlanInput, pricing: _Pricing, ctx: int | None, native: int) -> Choice:
    memory = asked.host_memory
    if memory is None:
        return Choice(native if ctx is None else ctx, (), True)
    return host_choice(ctx, native, memory, pricing.host_load())


def _shortage(
    asked: PlanInput, pricing: _Pricing, choice: Choice, gpus: Sequence[Gpu], max_ctx: int
) -> str:
    needed = pricing.on(choice.ctx, gpus)
    if gpus:
        need = sum(needed.on(device_name(gpu.index)) for gpu in gpus)
        room, where = asked.budget.pool(gpus), "the cards"
    else:
        memory = asked.host_memory
        need, room = needed.on(HOST), memory.usable if memory is not None else 0
        where = "host memory"
    estimate = ""
    if gpus and CTX_MIN < max_ctx < choice.ctx:
        estimate = (
            f"; {max_ctx} cells is what they are estimated to hold, system memory may be used"
        )
    return (
        f"{choice.ctx} cells need {need // MIB} MiB of {where}, and {max(0, room) // MIB} MiB may "
        f"be used{estimate}: lower the context or the slots, or take a smaller model or cache type"
    )


def _finished(
    asked: PlanInput,
    resolved: Resolved,
    pricing: _Pricing,
    warnings: Sequence[tuple[str, str]],
    choice: Choice,
    gpus: Sequence[Gpu],
    split: Split,
) -> Plan:
    """The plan of ``choice`` on ``gpus``, with everything that is doubtful about it."""
    priced = pricing.on(choice.ctx, gpus)
    terms = [term for term in priced.terms if term.name != "runtime" and not term.known]
    doubts = [*_doubts(asked, resolved, gpus, split), *_guessed(priced)]
    told = [*warnings, *doubts]
    if not asked.offer.model.shape.complete:
        told.append(("header-cut", "the header is cut short: what it holds was used"))
    told += [(f"uncertain-{term.name}", f"{term.device}: {term.why}") for term in terms if term.why]
    budgets = {device_name(gpu.index): max(0, asked.budget.usable(gpu)) for gpu in gpus}
    memory = asked.host_memory
    if memory is not None:
        budgets[HOST] = max(0, memory.usable)
    final: Split = "tensor" if split == "tensor" else "layer"
    decision = LaunchDecision(split=final if gpus else None, extra_args=asked.argv)
    return Plan(
        arch=asked.offer.model.shape.arch,
        native_ctx=asked.offer.model.shape.context or 0,
        build=asked.build,
        price=priced,
        host=host_bytes(priced.context, resolved.flags, priced.draft),
        flags=evolve(resolved.flags, ctx=choice.ctx),
        split=split,
        cards=tuple(gpu.index for gpu in gpus),
        budgets=budgets,
        fits=choice.fits,
        certain=not doubts and not terms,
        env_removed=overriding_variables(asked.env, decision),
        warnings=tuple(dict.fromkeys(told)),
    )


def _doubts(
    asked: PlanInput, resolved: Resolved, gpus: Sequence[Gpu], split: Split
) -> list[tuple[str, str]]:
    """Why this plan rests on rules that were not measured, as (code, message)."""
    doubts: list[tuple[str, str]] = []
    if not rules_of(asked.build)[1]:
        named = f"build {asked.build}" if asked.build else "a build that is not named"
        doubts.append(("unknown-build", f"{named}: the larger of two rule sets is used"))
    arch = asked.offer.model.shape.arch
    if arch not in MEASURED:
        doubts.append(("unmeasured", f"no {arch} model was measured: its figures are derived"))
    if asked.offer.drafter_unsized:
        text = "the drafter comes from a repository and cannot be sized: a flat share is kept free"
        doubts.append(("drafter-unsized", text))
    if gpus and resolved.flags.split_mode == "row":
        doubts.append(("row-split", "a split by rows is planned as one by layers"))
    if resolved.flags.override_tensors:
        doubts.append(("override-tensor", "where -ot puts tensors is not followed"))
    if split == "tensor":
        doubts.append(("tensor-split", "no tensor split was measured: shares are closed forms"))
    return doubts


def _guessed(priced: Price) -> list[tuple[str, str]]:
    drafts = () if priced.draft is None else (priced.draft,)
    if all(one.layers.tier != "estimate" for one in (priced.context, *drafts)):
        return []
    return [("windows-estimated", "nothing says which layers have a window: a quarter has none")]
