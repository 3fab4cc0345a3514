"""Token ids to text while they arrive: never half a character, whatever the cut."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from surefoot.text.pieces import count_spaces
from surefoot.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence of tokens.

    All texts returned, joined, equal `tokenizer.decode` of all tokens pushed, however they were
    cut. Bytes of an unfinished character, three at most, are held back. Each token costs the
    same, however long the text has become.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False
    ) -> None:
        """Begin a text.

        Args:
            tokenizer: spells the tokens.
            skip_special: leave special tokens out of the text.
            continues: the text goes on after another one, so the space before its first word
                stays; `tokenizer.decode` is about texts that do not.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._begins = not continues
        self._spaces_to_drop = 0 if continues else tokenizer.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete, which may be empty."""
        pieces = list(self._tokenizer.pieces(ids, self._skip_special, self._begins))
        if pieces:
            self._begins = False
        return self._trim(self._utf8.decode(b"".join(pieces)))

    def finish(self) -> str:
        """End the text and return what was held back: U+FFFD for an unfinished character."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if not self._spaces_to_drop or not text:
            return text
        dropped = count_spaces(text, self._spaces_to_drop)
        only_spaces = dropped == len(text)
        self._spaces_to_drop = self._spaces_to_drop - dropped if only_spaces else 0
        return text[dropped:]
