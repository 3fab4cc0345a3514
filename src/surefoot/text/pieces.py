"""What bytes a token stands for: text is nothing but these bytes in order, read as UTF-8.

A decoder turns a list of tokens into text at once. Streaming needs the same one token at a time,
so its steps are read once and become a rule per token. Broken UTF-8 becomes U+FFFD, one for each
longest broken sequence, whatever the kind of vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend
from tokenizers import models

from surefoot.errors import TokenizerError

Spell = Callable[[str], bytes]
Step = Mapping[str, object]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"


@dataclass(frozen=True)
class Spelling:
    """How the tokens of one vocabulary are spelled.

    Attributes:
        first: bytes of a token that begins the text.
        rest: bytes of a token that follows others.
        leading_spaces: at most this many spaces are dropped where the text begins.
    """

    first: Spell
    rest: Spell
    leading_spaces: int = 0

    def trim(self, text: str) -> str:
        """Drop the spaces that a vocabulary puts before the first word."""
        return text[count_spaces(text, self.leading_spaces) :]


@dataclass
class PieceTable:
    """The bytes of each token id, spelled when first asked for.

    Attributes:
        backend: gives a token's text by its id.
        spelling: turns that text into bytes.
    """

    backend: Backend
    spelling: Spelling
    _rest: dict[int, bytes | None] = field(default_factory=dict)

    def first(self, token: int) -> bytes | None:
        """Bytes of `token` where the text begins; None if the id names no token."""
        return self._spell(self.spelling.first, token)

    def rest(self, token: int) -> bytes | None:
        """Bytes of `token` after other tokens; None if the id names no token."""
        if token not in self._rest:
            self._rest[token] = self._spell(self.spelling.rest, token)
        return self._rest[token]

    def _spell(self, spell: Spell, token: int) -> bytes | None:
        text = self.backend.id_to_token(token) if token >= 0 else None
        return None if text is None else spell(text)


def count_spaces(text: str, most: int) -> int:
    """How many spaces `text` begins with, `most` at the highest."""
    return min(most, len(text) - len(text.lstrip(" ")))


def spelling_of(backend: Backend) -> Spelling:
    """Read the spelling rule from the decoder of `backend`.

    Raises:
        TokenizerError: the decoder is of a kind that cannot be applied token by token.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(spell_byte_level, spell_byte_level)
    if not steps or kinds in (["Metaspace"], ["WordPiece"]):
        return _local_spelling(backend)
    return _replacing_spelling(steps)


def _decoder_steps(backend: Backend) -> list[Step]:
    # A backend of its own, since writing out the real one would write its whole vocabulary.
    probe = Backend(models.BPE())
    probe.decoder = backend.decoder
    decoder: dict[str, object] | None = json.loads(probe.to_str())["decoder"]
    return _flatten(decoder) if decoder else []


def _flatten(decoder: Step) -> list[Step]:
    inner = decoder.get("decoders")
    if not isinstance(inner, list):
        return [decoder]
    return [step for part in inner for step in _flatten(part)]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


def spell_byte_level(text: str) -> bytes:
    """Bytes of a byte-level token; one with any other character stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in text])
    except KeyError:
        return text.encode()


def _local_spelling(backend: Backend) -> Spelling:
    """Decoders that look at one token and at whether it is the first, or no decoder at all."""
    decoder = backend.decoder
    if decoder is None:
        return Spelling(str.encode, lambda text: b" " + text.encode())

    def rest(text: str) -> bytes:
        decoded: str = decoder.decode([_ANCHOR, text])
        return decoded[len(_ANCHOR) :].encode()

    return Spelling(lambda text: str(decoder.decode([text])).encode(), rest)


def _replacing_spelling(steps: Sequence[Step]) -> Spelling:
    """SentencePiece style: replacements, then bytes written as <0xNN>, then a leading space."""
    rest = list(steps)
    replacements = [_replacement(step) for step in _take(rest, "Replace")]
    byte_fallback = bool(_take(rest, "ByteFallback"))
    fused = bool(_take(rest, "Fuse"))
    strips = _take(rest, "Strip") if fused else []
    if rest or len(strips) > 1:
        raise _unsupported(steps)
    leading = _leading_spaces(strips[0]) if strips else 0

    def spell(text: str) -> bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(text) if byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else text.encode()

    return Spelling(spell, spell, leading)


def _take(steps: list[Step], kind: str) -> list[Step]:
    """Remove the steps of one kind that stand in front."""
    count = next((i for i, step in enumerate(steps) if step["type"] != kind), len(steps))
    taken, steps[:] = steps[:count], steps[count:]
    return taken


def _replacement(step: Step) -> tuple[str, str]:
    pattern, content = step["pattern"], step["content"]
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise _unsupported([step])
    return str(pattern["String"]), str(content)


def _leading_spaces(step: Step) -> int:
    start = step["start"]
    if step["content"] != " " or step["stop"] != 0 or not isinstance(start, int):
        raise _unsupported([step])
    return start


def _unsupported(steps: Sequence[Step]) -> TokenizerError:
    named = ", ".join(json.dumps(dict(step), ensure_ascii=False) for step in steps)
    return TokenizerError(
        f"the tokenizer's decoder [{named}] cannot be streamed; supported are none, ByteLevel, "
        "Metaspace, WordPiece, and Replace + ByteFallback + Fuse + Strip of leading spaces"
    )
