"""kvalet: parallel chats share one llama-server without killing each other.

A host embeds the whole product with ``serve``, or the scheduler alone with
``run_scheduler``; both are started in a nursery that the host owns:

    handle = await nursery.start(kvalet.serve, kvalet.Config(attach="http://127.0.0.1:8080"))

``kvalet.testing`` is for the host's tests. Nothing here configures logging, and a name is
loaded when it is first used, so that importing kvalet costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from kvalet.actors.app import Handle, serve
    from kvalet.actors.config import Config
    from kvalet.actors.leases import Ended, Extended, Lease, Parking, Resumed
    from kvalet.actors.scheduler import SchedulerConfig, SchedulerHandle, run_scheduler
    from kvalet.protocol.errors import (
        ClientFault,
        ConfigFault,
        EnvironmentFault,
        JournalFault,
        KvaletError,
        ServerFault,
    )

__version__ = "0.1.0"

__all__ = [
    "ClientFault",
    "Config",
    "ConfigFault",
    "Ended",
    "EnvironmentFault",
    "Extended",
    "Handle",
    "JournalFault",
    "KvaletError",
    "Lease",
    "Parking",
    "Resumed",
    "SchedulerConfig",
    "SchedulerHandle",
    "ServerFault",
    "__version__",
    "load_config",
    "run_scheduler",
    "serve",
]

_HOMES = {
    "kvalet.actors.app": ("Handle", "serve"),
    "kvalet.actors.config": ("Config",),
    "kvalet.actors.leases": ("Ended", "Extended", "Lease", "Parking", "Resumed"),
    "kvalet.actors.scheduler": ("SchedulerConfig", "SchedulerHandle", "run_scheduler"),
    "kvalet.protocol.errors": (
        *("ClientFault", "ConfigFault", "EnvironmentFault"),
        *("JournalFault", "KvaletError", "ServerFault"),
    ),
}


def load_config(
    file: Path | None = None, environ: Mapping[str, str] | None = None, **settings: Any
) -> Config:
    """The configuration that the command line would have: ``settings`` stand for its flags.

    They win over ``KVALET_*`` in ``environ`` (None: this process's own), which wins over the
    TOML ``file`` (None: the one that ``KVALET_CONFIG`` names, if any), which wins over the
    defaults. Raises ConfigFault, which lists every problem.

        config = kvalet.load_config(Path("kvalet.toml"), port=0)
    """
    import os
    from pathlib import Path

    from kvalet.actors.config import resolve

    if environ is None:
        environ = os.environ
    if file is None and environ.get("KVALET_CONFIG"):
        file = Path(environ["KVALET_CONFIG"])
    return resolve(settings, environ, file)[0]


# Hidden from the type checkers: they know every name from above, and a wrong one is an error.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(home), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'kvalet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
