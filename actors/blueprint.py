"""What one start of a llama-server is made of: its arguments, its environment and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from kvalet.actors.binaries import ServerBinary, list_devices
from kvalet.actors.decisions.capabilities import Capabilities, understood
from kvalet.actors.decisions.exact import (
    NOT_STARTED,
    Evidence,
    Start,
    Verdict,
    Wish,
    contradictions,
    exact_variable,
    judge,
    preflight,
)
from kvalet.actors.decisions.launch import (
    CELL_STEP,
    LaunchArgv,
    LaunchRequest,
    build_argv,
    child_environment,
    round_cells,
)
from kvalet.actors.decisions.parker import (
    Mode,
    ParkerDecision,
    ParkerWish,
    affordable,
    budget_in_force,
    budgeted,
    decide_parker,
    parking_need,
    server_parks,
)
from kvalet.actors.decisions.plan.concede import (
    TOLD,
    Conceded,
    Concession,
    conceded,
    next_concession,
)
from kvalet.actors.decisions.plan.devices import DEFAULT, MIB, Budget
from kvalet.actors.decisions.plan.extras import layer_extras, split_mode_of, tensor_extras
from kvalet.actors.decisions.plan.fit import HOST_CTX
from kvalet.actors.decisions.plan.flag_values import MODEL_TYPES, MTP_TYPES
from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.plan import Plan, device_name
from kvalet.actors.decisions.plan.scrub import LaunchDecision, child_variables
from kvalet.actors.decisions.plan.speculation import effective_spec_types
from kvalet.actors.planner import Machine, plan_launch, read_machine
from kvalet.protocol.errors import ConfigFault, KvaletError
from kvalet.protocol.ids import Cells

TOLD_OF_PLAN: Final = ("does-not-fit", "flag", "tensor-downgraded", "cache-type")
"""Warnings of a plan that say something about the launch, not about the plan."""

_NO_PORT: Final = 0


@frozen(kw_only=True)
class LaunchConfig:
    """What to launch: ``ctx`` is the pool in cells, None for what the plan finds; ``parallel``
    the slots that share it. ``machine`` None: what there is is read."""

    model: Path
    server_bin: Path | None = None
    ctx: int | None = None
    parallel: int = 4
    mode: Mode = "auto"
    preempt: bool = True
    exact: Wish = "off"
    extra_args: tuple[str, ...] = ()
    state_dir: Path
    budget: Budget = DEFAULT
    parking: int = 0
    machine: Machine | None = None
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 3.0


@frozen(kw_only=True)
class Blueprint:
    """One start, the same for every port.

    ``inherited`` is what of the environment reaches the child. ``plan`` is None where none could
    be made: such a launch is left to the server's own fitting. ``given`` was given up.
    """

    request: LaunchRequest
    capabilities: Capabilities
    decision: LaunchDecision
    inherited: Mapping[str, str]
    plan: Plan | None
    given: tuple[Concession, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()
    exact: Wish = "off"
    start: Start = NOT_STARTED

    @property
    def _words(self) -> tuple[str, ...]:
        """The arguments but for the port, as the child's own reader gets them."""
        return self.argv(_NO_PORT).argv[1:]

    @property
    def cells(self) -> Cells:
        """The pool that the server will have."""
        if self.request.cells is not None:
            return round_cells(self.request.cells)
        return round_cells(self.plan.price.context.sizes.ctx if self.plan else HOST_CTX)

    @property
    def drafting(self) -> tuple[str, ...]:
        """The types of drafting that the server runs with."""
        return effective_spec_types(self._words, self.inherited)

    @property
    def drafts(self) -> bool:
        """Whether it drafts with a model, or with heads of its own: what fails, if anything."""
        return not {*MTP_TYPES, *MODEL_TYPES}.isdisjoint(self.drafting)

    @property
    def split(self) -> str:
        """How the model is spread over the cards: none, layer or tensor."""
        if self.plan is not None:
            return self.plan.split
        return resolve_flags(self._words, self.inherited).flags.split_mode or "layer"

    @property
    def parks(self) -> bool:
        """Whether this very launch makes the server park chats by itself."""
        return server_parks(self._words, self.inherited, self.capabilities)

    def argv(self, port: int) -> LaunchArgv:
        """The command line on ``port``, and every warning about it."""
        launch = build_argv(evolve(self.request, port=port), self.capabilities)
        return evolve(launch, warnings=(*launch.warnings, *self.warnings))

    def child_env(
        self, env: Mapping[str, str], *, api_key: str, config_home: str, library_path: Sequence[str]
    ) -> dict[str, str]:
        """What the child inherits of ``env``."""
        return child_environment(
            env,
            api_key=api_key,
            config_home=config_home,
            library_path=library_path,
            decision=self.decision,
        )

    def judge(self, reported: bool | None, refusal: str, free_bytes: int | None) -> Verdict:
        """The certificate of exact concurrency, from what was spawned and what its server says
        (``/props``, or the ``refusal`` of an earlier start)."""
        argv, plan = self._words, self.plan
        evidence = Evidence(
            start=self.start,
            refusal=refusal,
            reported=reported,
            parks=self.parks,
            contradictions=contradictions(argv, self.inherited),
            need_mib=None if plan is None else _parking_need(plan, self.request.slots),
            budget_mib=budget_in_force(argv, self.inherited, self.capabilities),
            free_mib=None if free_bytes is None else free_bytes // MIB,
        )
        return judge(self.exact, evidence)

    def after(self, kind: str, refusal: str = "") -> tuple[Concession, ...] | None:
        """All that the next start gives up, when this one ended with ``kind``, or with its
        ``refusal`` of exact concurrency; None: no more."""
        if refusal and self.start.given:
            return None if self.exact == "on" else (*self.given, "no-exact")
        flags = resolve_flags(self._words, self.inherited).flags
        more = next_concession(
            self.given,
            kind=kind,
            split="tensor" if self.split == "tensor" else "layer",
            pinned=self.plan is not None and self.plan.pinned,
            flags=flags,
        )
        return None if more is None else (*self.given, more)


def draw(
    config: LaunchConfig,
    binary: ServerBinary,
    capabilities: Capabilities,
    env: Mapping[str, str],
    slot_directory: Path,
    given: tuple[Concession, ...] = (),
) -> Blueprint:
    """Plan one start and compose it; blocks while the model's header is read.

    A launch that cannot be planned is launched all the same: the server has its own word.
    Raises ConfigFault or EnvironmentFault as ``build_argv`` does.
    """
    if "smaller-context" in given:
        rest: tuple[Concession, ...] = tuple(one for one in given if one != "smaller-context")
        whole = draw(config, binary, capabilities, env, slot_directory, rest)
        config = evolve(config, ctx=max(CELL_STEP, whole.cells // 2))
    wish = conceded(config.extra_args, env, given, known=capabilities.flags)
    parker = decide_parker(
        ParkerWish(
            mode=config.mode,
            preempt=config.preempt,
            slots=config.parallel,
            extra_args=wish.extra_args,
        ),
        capabilities,
        env,
    )
    wish = evolve(wish, extra_args=parker.extra_args, forced={**wish.forced, **parker.forced})
    request = LaunchRequest(
        program=str(binary.path),
        model=str(config.model),
        port=_NO_PORT,
        cells=config.ctx,
        slots=config.parallel,
        slot_directory=str(slot_directory),
        preempt=parker.parker == "kvalet",
        extra_args=wish.extra_args,
    )
    argv = build_argv(request, capabilities).argv[1:]
    inherited = child_variables(env, LaunchDecision(forced=wish.forced))
    start = _exact_start(config, parker, argv, inherited, given)
    wish = evolve(wish, forced={**wish.forced, **exact_variable(start)})
    inherited = child_variables(env, LaunchDecision(forced=wish.forced))
    machine = Machine()
    # What a server parks it budgets by itself.
    parking = config.parking if request.preempt else 0
    try:
        machine, listed = _machine(config, binary, inherited)
        plan = _plan(config, machine, listed, capabilities, inherited, argv, parking)
    except KvaletError as fault:
        parker = _with_budget(parker, None, start, config, machine)
        unplanned = ("no-plan", f"memory is not planned: {fault}")
        return Blueprint(
            request=evolve(request, cells=config.ctx or HOST_CTX, planned=parker.added),
            capabilities=capabilities,
            decision=LaunchDecision(extra_args=wish.extra_args, forced=wish.forced),
            inherited=inherited,
            plan=None,
            given=given,
            warnings=(*_told(given), *parker.warnings, unplanned),
            exact=config.exact,
            start=start,
        )
    if "own-fitting" in given:
        plan = _unpinned(plan)
    parker = _with_budget(parker, plan, start, config, machine)
    followed = _follow(plan, parker, request, capabilities, inherited, wish, given)
    return evolve(followed, exact=config.exact, start=start)


def _exact_start(
    config: LaunchConfig,
    parker: ParkerDecision,
    argv: Sequence[str],
    env: Mapping[str, str],
    given: Sequence[Concession],
) -> Start:
    """Whether the child is given exact concurrency. Raises ConfigFault where it must have it and
    cannot."""
    if "no-exact" in given:
        return Start(given=False, reason="the server refused it")
    start = preflight(
        config.exact,
        parker=parker.parker,
        preempt=config.preempt,
        parks=parker.parker == "server",
        slots=config.parallel,
        excluded=contradictions(argv, env),
    )
    if config.exact == "on" and not start.given:
        raise ConfigFault(f"exact concurrency cannot be had: {start.reason}")
    return start


def _parking_need(plan: Plan, slots: int) -> int:
    draft = 0 if plan.price.draft is None else plan.price.draft.bytes
    return parking_need(plan.price.context.bytes, draft, slots)


def _told(given: Sequence[Concession]) -> tuple[tuple[str, str], ...]:
    return tuple((one, TOLD[one]) for one in given)


def _with_budget(
    parker: ParkerDecision,
    plan: Plan | None,
    start: Start,
    config: LaunchConfig,
    machine: Machine,
) -> ParkerDecision:
    """Memory for all parks at once. A launch that is not exact may compute the rest again, and
    takes what the host can spare."""
    spare = machine.host
    if plan is None:
        return budgeted(parker, None if spare is None else affordable(spare // MIB, spare))
    need = _parking_need(plan, config.parallel)
    if spare is not None:
        spare = max(0, spare - plan.price.on("CPU"))
    if not start.given:
        return budgeted(parker, affordable(need, spare))
    if spare is not None and need * MIB > spare:
        told = f"its parks may need {need} MiB of host memory, and {spare // MIB} MiB are free"
        parker = evolve(parker, warnings=(*parker.warnings, ("park-budget", told)))
    return budgeted(parker, need)


def _machine(
    config: LaunchConfig, binary: ServerBinary, env: Mapping[str, str]
) -> tuple[Machine, frozenset[str]]:
    """What this launch can use, and the names of the cards that its build lists."""
    machine = config.machine or read_machine(env)
    if config.machine is not None or not machine.gpus:
        return machine, frozenset(device_name(gpu.index) for gpu in machine.gpus)
    listed = list_devices(binary, env)
    # A build for the CPU alone has no use for cards.
    return (machine if listed else evolve(machine, gpus=())), listed


def _plan(
    config: LaunchConfig,
    machine: Machine,
    listed: frozenset[str],
    capabilities: Capabilities,
    env: Mapping[str, str],
    argv: Sequence[str],
    parking: int,
) -> Plan:
    plan = plan_launch(
        config.model,
        argv,
        env,
        machine,
        build=capabilities.build,
        parking=parking,
        choose_ctx=config.ctx is None,
        budget=config.budget,
    )
    named = {device_name(index) for index in plan.cards}
    return plan if named <= listed else _unpinned(plan)


def _unpinned(plan: Plan) -> Plan:
    """The plan with its context alone: where the layers go is left to the server."""
    kept = plan.added[:2] if plan.added[:1] == ("-c",) else ()
    return evolve(plan, added=kept)


def _follow(
    plan: Plan,
    parker: ParkerDecision,
    request: LaunchRequest,
    capabilities: Capabilities,
    env: Mapping[str, str],
    wish: Conceded,
    given: tuple[Concession, ...],
) -> Blueprint:
    """The launch as ``plan`` has it, the user's own arguments still last where they agree."""
    extra_args = wish.extra_args
    if plan.split == "tensor":
        extra_args = tensor_extras(extra_args)
    elif split_mode_of(resolve_flags(extra_args, env)) == "tensor":
        extra_args = (*layer_extras(extra_args), "--split-mode", "layer")
    forced = dict(wish.forced)
    if plan.pinned:
        # The cards are numbered as the driver does; the runtime's own order is by speed.
        forced["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    decision = LaunchDecision(
        split="tensor" if plan.split == "tensor" else "layer" if plan.cards else None,
        extra_args=extra_args,
        forced=forced,
    )
    return Blueprint(
        request=evolve(
            request,
            planned=(*parker.added, *understood(plan.added, capabilities)),
            extra_args=extra_args,
        ),
        capabilities=capabilities,
        decision=decision,
        inherited=child_variables(env, decision),
        plan=plan,
        given=given,
        warnings=(
            *_told(given),
            *parker.warnings,
            *(one for one in plan.warnings if one[0] in TOLD_OF_PLAN),
        ),
    )
