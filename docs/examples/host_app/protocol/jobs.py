"""What the host's parts say to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A text of ``words`` words to be continued by ``more`` of them."""

    title: str
    words: int
    more: int
