"""Settings as frozen values. Read once; flags over environment over file over defaults.

``resolve`` returns the configuration together with the level that decided each field, so
that ``kvalet config`` can print both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from cattrs import transform_error
from cattrs.errors import ClassValidationError
from cattrs.v import format_exception

from kvalet.actors.decisions.plan.devices import budget_of
from kvalet.actors.decisions.plan.scrub import SIMULATION
from kvalet.actors.decisions.preemption import POLICIES
from kvalet.protocol.commands import DEFAULTS
from kvalet.protocol.errors import ConfigFault

DEFAULT_PARALLEL = 4
MODES = ("auto", "proxy", "server")
MODE_ALIASES = {"studio": "proxy"}
ENV_PREFIX = "KVALET_"
# Variables of ours that are no settings of this table.
ENV_OTHER = frozenset(
    {
        *("KVALET_CONFIG", "KVALET_UPSTREAM_KEY", "KVALET_PREEMPT_MODE", "KVALET_HOME"),
        "KVALET_OFFLINE",
    }
)


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/kvalet``, or the same under the home directory."""
    home = os.environ.get("KVALET_HOME")
    if home:
        return Path(home)
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "kvalet"


def _positive(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be positive, not {value}")


def _not_negative(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{attribute.name} must not be negative, not {value}")


def _one_of(*names: str) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: str) -> None:
        if value not in names:
            raise ValueError(f"{attribute.name} must be one of {', '.join(names)}, not {value!r}")

    return check


def _fraction(_: Any, __: attrs.Attribute[Any], value: float) -> None:
    try:
        budget_of(value)
    except ConfigFault as fault:
        raise ValueError(f"vram_fraction: {fault}") from None


@attrs.frozen(kw_only=True)
class Config:
    """The whole product's settings. Sizes are cells unless the name says otherwise.

    ``attach`` is the URL of a running llama-server; without it one is launched with
    ``model``. ``ctx`` is the unified pool, ``parallel`` the slots that share it; left out, a
    launch takes what the plan finds (all that fits the cards, or 8192 cells without any) and 4
    slots, an attached server is believed. ``vram_fraction`` is the part of a card to use.
    """

    model: Path | None = None
    demo: bool = False
    attach: str | None = None
    server_bin: Path | None = None
    server_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = attrs.field(default=8383, validator=_not_negative)
    parallel: int | None = attrs.field(default=None, validator=_positive)
    ctx: int | None = attrs.field(default=None, validator=_positive)
    mode: str = attrs.field(default="auto", validator=_one_of(*MODES))
    preempt: bool = True
    debug: bool = False
    exact: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_one_of("auto", "off", "on"))
    )
    api_key_file: Path | None = None
    state_dir: Path = attrs.field(factory=default_state_dir)
    policy: str = attrs.field(default=DEFAULTS.policy, validator=_one_of(*POLICIES))
    park_method: str = attrs.field(default="auto", validator=_one_of("auto", "save", "recompute"))
    park_ram_mib: int | None = attrs.field(default=None, validator=_not_negative)
    block_min: int = attrs.field(default=DEFAULTS.block_min, validator=_positive)
    first_block: int = attrs.field(default=DEFAULTS.first_block, validator=_positive)
    quantum: int = attrs.field(default=DEFAULTS.quantum, validator=_positive)
    resume_max: int = attrs.field(default=DEFAULTS.resume_max, validator=_positive)
    queue_max: int = attrs.field(default=DEFAULTS.queue_max, validator=_positive)
    body_max_mib: int = attrs.field(default=16, validator=_positive)
    first_token_s: float = attrs.field(default=DEFAULTS.first_token_s, validator=_positive)
    stall_s: float = attrs.field(default=DEFAULTS.stall_s, validator=_positive)
    keepalive_s: float = attrs.field(default=2.0, validator=_positive)
    drain_s: float = attrs.field(default=10.0, validator=_positive)
    restarts_max: int = attrs.field(default=3, validator=_not_negative)
    restart_window_s: float = attrs.field(default=300.0, validator=_positive)
    restart_wait_s: float = attrs.field(default=1.0, validator=_positive)
    health_s: float = attrs.field(default=5.0, validator=_positive)
    vram_fraction: float = attrs.field(default=0.95, validator=_fraction)

    @property
    def journal_path(self) -> Path:
        """Where the event log lies."""
        return self.state_dir / "journal.jsonl"


FIELDS = tuple(field.name for field in attrs.fields(Config))


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(Path, lambda value, _: Path(str(value)).expanduser())
    converter.register_structure_hook(bool, _to_bool)
    converter.register_structure_hook(int, _to_int)
    converter.register_unstructure_hook(Path, str)
    return converter


def _to_bool(value: Any, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _to_int(value: Any, _: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not a whole number")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


converter = _converter()


def structure(values: Mapping[str, Any]) -> Config:
    """A Config from plain values. Raises ConfigFault with every problem at once."""
    values = dict(values)
    if "mode" in values:
        values["mode"] = MODE_ALIASES.get(str(values["mode"]), values["mode"])
    try:
        return converter.structure(values, Config)
    except ClassValidationError as error:
        problems = transform_error(error, path="", format_exception=_problem)
        raise ConfigFault([problem.removesuffix(" @ ") for problem in problems]) from error


def _problem(error: BaseException, kind: type | None) -> str:
    """One problem in words: a validator's own, else what cattrs makes of it."""
    if isinstance(error, ValueError) and error.args:
        return str(error)
    return format_exception(error, kind)


def load_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises ConfigFault."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigFault(f"cannot read the configuration {path}: {error}") from error


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings in ``KVALET_*`` variables. An unknown one is a ConfigFault."""
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name.startswith(SIMULATION) or name in ENV_OTHER:
            continue
        field = name[len(ENV_PREFIX) :].lower()
        if field not in FIELDS:
            unknown.append(f"unknown environment variable {name}")
        elif field == "server_args":
            values[field] = environ[name].split()
        else:
            values[field] = environ[name]
    if "KVALET_PREEMPT_MODE" in environ:
        values.setdefault("mode", environ["KVALET_PREEMPT_MODE"])
    if unknown:
        raise ConfigFault(unknown)
    return values


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> tuple[Config, dict[str, str]]:
    """The effective configuration and, for each field, flag, environment, file or default."""
    levels = {
        "default": {},
        "file": load_file(file) if file is not None else {},
        "environment": from_environment(environ),
        "flag": {name: value for name, value in flags.items() if value is not None},
    }
    merged: dict[str, Any] = {}
    decided = dict.fromkeys(FIELDS, "default")
    for level, values in levels.items():
        merged |= values
        decided |= dict.fromkeys(values, level)
    return structure(merged), decided


def unstructure(config: Config) -> dict[str, Any]:
    """Plain values of a Config. It holds no secret: keys live in files."""
    return dict(converter.unstructure(config))
