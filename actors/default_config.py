"""What an installed ``transformers`` says of an architecture's windows: a program of its own.

It runs in a fresh interpreter, so that whatever the package imports, prints, patches or fails
at stays there. It imports nothing of kvalet. On stdin it reads a JSON document: ``arch``, and
the ``path`` to import from; its last line on stdout is a configuration document, or null.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, cast

FIELDS: Final = ("sliding_window_pattern", "layer_types")
TEXT: Final = "text_config"
_DEFAULT: Final = re.compile(
    r"""\bsliding_window_pattern["']?  (?:\s*:[^=\n]*)?  \s*[=,]\s*  (?P<period>\d+)\b""",
    re.VERBOSE,
)
"""An argument, an attribute or a ``kwargs.get`` with a whole number for its default."""


def default_config(arch: str) -> dict[str, Any] | None:
    """The windows of the architecture's default configuration; None when it is not known.

    ``arch`` is spelled as a GGUF header does; hyphens and underscores are the same. Raises
    whatever the package raises when it cannot be imported.
    """
    mapping: Mapping[str, Any] = importlib.import_module("transformers").CONFIG_MAPPING
    known = {name.replace("-", "_"): name for name in list(mapping.keys())}
    named = arch.replace("-", "_")
    if named not in known:
        return None
    kind = mapping[known[named]]
    try:
        return _said(kind())
    except Exception:
        # Any class may want arguments, or fail at its own defaults: its source still tells.
        text = getattr(kind, "sub_configs", {}).get(TEXT)
        if text is None and f"{named}_text" in known:
            text = mapping[known[f"{named}_text"]]
        return _written(kind) or (_written(text) if text is not None else None)


def _said(config: Any) -> dict[str, Any]:
    document = {name: _plain(_field(config, name)) for name in FIELDS}
    text = _field(config, TEXT)
    return document if text is None else {**document, TEXT: _said(text)}


def _field(config: Any, name: str) -> Any:
    if isinstance(config, dict):
        return cast("dict[str, Any]", config).get(name)
    return getattr(config, name, None)


def _plain(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    return [str(one) for one in cast("list[Any]", value)]


def _written(kind: Any) -> dict[str, Any] | None:
    found = _DEFAULT.search(inspect.getsource(kind))
    return None if found is None else {"sliding_window_pattern": int(found["period"])}


def main() -> None:
    """Read the question, print the answer."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    answers, sys.stdout = sys.stdout, sys.stderr
    answers.write("\n" + json.dumps(default_config(asked["arch"])) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
