"""An answer's text as it comes: whole characters only, and nothing that may be a stop word."""

from __future__ import annotations

import codecs

from attrs import define, field

from kvalet.sims.fakeserver.tokens import BOS, EOS, TURN_END, piece_of


@define(eq=False)
class Speech:
    """One answer being spoken. ``stop`` are the words that end it."""

    stop: tuple[str, ...] = ()
    text: str = ""
    ids: list[int] = field(factory=list[int])
    stopped_by: str = ""
    _sent: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def take(self, token: int) -> str | None:
        """The text that ``token`` lets out; None while its character is not whole.

        A text that may yet become a stop word is kept back: then nothing comes out.
        """
        self.ids.append(token)
        if token in (BOS, EOS, TURN_END):
            return ""
        piece = self._decoder.decode(piece_of(token))
        if not piece:
            return None
        self.text += piece
        found = [
            (at, word) for word in self.stop if (at := self.text.find(word, self._from())) >= 0
        ]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]
        return self._let_out()

    def _from(self) -> int:
        longest = max((len(word) for word in self.stop), default=0)
        return max(0, self._sent - longest)

    def _let_out(self) -> str:
        end = len(self.text) - (0 if self.stopped_by else self._doubtful())
        said = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return said

    def _doubtful(self) -> int:
        """Characters at the end that begin a stop word."""
        for size in range(max(map(len, self.stop), default=1) - 1, 0, -1):
            if any(word.startswith(self.text[-size:]) for word in self.stop if len(word) > size):
                return min(size, len(self.text) - self._sent)
        return 0
