"""Collects the facts that a plan needs, and plans: the shell around the pure planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from kvalet.actors.decisions.plan.devices import DEFAULT, Budget, Gpu
from kvalet.actors.decisions.plan.flags import resolve_flags
from kvalet.actors.decisions.plan.plan import Plan, PlanInput, make_plan
from kvalet.actors.decisions.plan.price import Model, Offer
from kvalet.actors.decisions.plan.speculation import drafter_of, emits_draft_model
from kvalet.actors.facts import ModelFile, read_gguf
from kvalet.actors.facts_gpu import GpuSample, read_gpus
from kvalet.actors.facts_host import read_host
from kvalet.actors.windows import find_hint
from kvalet.protocol.errors import EnvironmentFault


@frozen(kw_only=True)
class Machine:
    """What this machine has: cards, and host memory where it is known."""

    gpus: tuple[Gpu, ...] = ()
    host: int | None = None


def read_machine(env: Mapping[str, str], cards: tuple[Gpu, ...] | None = None) -> Machine:
    """Read the cards that a server started with ``env`` would see, and host memory; ``cards``
    are taken as they are given, and the driver is not asked."""
    gpus = _cards(read_gpus(env)) if cards is None else cards
    return Machine(gpus=gpus, host=read_host().available or None)


def plan_launch(
    model: Path,
    argv: Sequence[str],
    env: Mapping[str, str],
    machine: Machine,
    *,
    build: str,
    parking: int = 0,
    choose_ctx: bool = False,
    budget: Budget = DEFAULT,
) -> Plan:
    """Plan a launch of ``model`` with llama-server's arguments ``argv``.

    Blocks: where no file says which layers have a window, a library or a hub may be asked.
    Raises EnvironmentFault for a model, drafter or projector that cannot be read, ConfigFault
    where the server would refuse to start.
    """
    resolved = resolve_flags(argv, env)
    drafter = drafter_of(resolved)
    loads = drafter is not None and emits_draft_model(resolved.flags)
    second: ModelFile | None = None
    if loads and drafter is not None and drafter.sizeable and drafter.path:
        second = read_gguf(Path(drafter.path))
    projector = resolved.flags.mmproj
    offer = Offer(
        model=_model(read_gguf(model)),
        drafter=_model(second) if second is not None else None,
        drafter_on_gpu=drafter is None or drafter.on_gpu,
        drafter_unsized=loads and second is None,
        projector=_size(Path(projector)) if projector else 0,
    )
    return make_plan(
        PlanInput(
            offer=offer,
            argv=tuple(argv),
            env=dict(env),
            gpus=machine.gpus,
            host=machine.host,
            parking=parking,
            build=build,
            budget=budget,
            choose_ctx=choose_ctx,
        )
    )


def _model(file: ModelFile) -> Model:
    return Model(shape=file.shape, weights=file.weights, hint=find_hint(file.shape))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise EnvironmentFault(f"cannot read the projector {path}: {error.strerror}") from error


def _cards(samples: Sequence[GpuSample]) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(number, sample.free_mib, sample.total_mib) for number, sample in enumerate(samples)
    )
