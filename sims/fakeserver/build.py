"""The generations of llama-server that can be met, as one table, and what each says of itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from attrs import evolve, frozen

from kvalet.protocol.notices import Notice
from kvalet.sims.fakeserver.constants import OLD_BUDGET_MIB

RELEASE: Final = 11434
"""The stock release whose flags all generations have."""

IndexRule = Literal["never", "above zero", "always"]
"""Which notices of a request with several answers name theirs; one answer is never named."""

_HELP: Final = Path(__file__).with_name("help.txt")
_ROW_BEFORE: Final = "--cache-idle-slots,"
_WORD: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")
_DESCRIPTION: Final = re.compile(r"(?<![,\s])\s{2,}")


@frozen(kw_only=True)
class Build:
    """One generation. ``default_mib``: what ``--preempt-ram`` is when nothing is said.

    ``opens_at_park``: a park before the first token sends the headers at once; a build
    without keeps its notices until there is something to say.
    """

    name: str
    parks: bool = False
    default_mib: int = 0
    asynchronous: bool = False
    comments: bool = False
    recomputed_comment: bool = False
    opens_at_park: bool = False
    index: IndexRule = "never"
    recompute: bool = False
    record: bool = False
    """``preempt`` in final objects, ``n_recompute`` and ``is_transferring`` in ``/slots``."""
    exact: bool = False
    """Exact mode, and its key in ``/props``."""

    @property
    def info(self) -> str:
        """``build_info`` of ``/props`` and ``system_fingerprint`` of answers."""
        return f"b{RELEASE}-sim{self.name.lower()}"

    @property
    def version_text(self) -> str:
        """What ``--version`` prints."""
        return f"version: {RELEASE} (sim-{self.name.lower()})\nbuilt with kvalet for any platform\n"

    @property
    def help_text(self) -> str:
        """What ``--help`` prints."""
        text = _HELP.read_text()
        if not self.parks:
            return text
        at = text.index(_ROW_BEFORE)
        return text[:at] + self._rows() + text[at:]

    @property
    def flags(self) -> frozenset[str]:
        """Every spelling of every option that ``--help`` names."""
        heads = (
            _DESCRIPTION.split(line, maxsplit=1)[0]
            for line in self.help_text.splitlines()
            if line.startswith("-") and not line.startswith("-----")
        )
        return frozenset(word for head in heads for word in _WORD.findall(head))

    def notice(self, notice: Notice, index: int, answers: int) -> bytes:
        """The comment for a notice about one of several answers; empty: this build has none."""
        if not self.comments or (notice is Notice.RECOMPUTED and not self.recomputed_comment):
            return b""
        numbered = self.index == "always" or (self.index == "above zero" and index > 0)
        numbered = numbered and answers > 1 and notice is not Notice.KEEPALIVE
        return f": {notice.value}{f' {index}' if numbered else ''}\n\n".encode()

    def _rows(self) -> str:
        default = "0 - disabled, -1 - no limit" if self.default_mib == 0 else ""
        default = default or f"{self.default_mib}, -1 - no limit, 0 - disable"
        rows = _row(
            "--preempt-ram N",
            "with a unified KV cache, park a slot in host RAM when the",
            "cache fills, where every slot would fail otherwise; N is the",
            "most host RAM that parked sequences may take in MiB",
            f"(default: {default})",
            "(env: LLAMA_ARG_PREEMPT_RAM)",
        )
        if self.asynchronous:
            rows += _row(
                "--preempt-async, --no-preempt-async",
                "copy parked sequences while others decode (default: enabled)",
                "(env: LLAMA_ARG_PREEMPT_ASYNC)",
            )
        return rows


def _row(head: str, *lines: str) -> str:
    first, *rest = lines
    return "".join(
        f"{part:<40}{line}\n" for part, line in [(head, first), *(("", r) for r in rest)]
    )


_G1: Final = Build(name="G1", parks=True, default_mib=OLD_BUDGET_MIB)
_G2: Final = evolve(_G1, name="G2", asynchronous=True)
_G3: Final = evolve(_G2, name="G3", comments=True, opens_at_park=True, index="above zero")
_G4: Final = evolve(
    _G3,
    name="G4",
    default_mib=0,
    recomputed_comment=True,
    index="always",
    recompute=True,
    record=True,
    exact=True,
)

BUILDS: Final = {
    build.name: build
    for build in (
        Build(name="G0"),
        _G1,
        _G2,
        _G3,
        evolve(_G3, name="G3-early", opens_at_park=False),
        _G4,
        evolve(_G4, name="G4-counts", recomputed_comment=False),
    )
}
"""By the name that ``KVALET_SIM_BUILD`` gives."""
