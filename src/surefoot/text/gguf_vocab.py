"""The tokenizer that a GGUF file describes in its metadata.

A GGUF file names how text is split before the merges only by a word, `tokenizer.ggml.pre`; what
the word means is known for those in PRE_TOKENIZERS, and guessing would give wrong tokens quietly.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from surefoot.errors import TokenizerError
from surefoot.text.tokenizer import Tokenizer

Metadata = Mapping[str, object]
_T = TypeVar("_T")

_SPACE = "\u2581"  # SentencePiece writes a space as this character
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Kind(enum.IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before it merges bytes.

    Attributes:
        splits: regular expressions, each applied to what the ones before left whole; a match and
            what lies between matches become pieces of their own.
        normalize: Unicode composition (NFC) comes first.
        whole_words: a piece that is a token is taken as it is, without merging.
        add_begin: the begin token is added unless the file says otherwise.
    """

    splits: tuple[str, ...]
    normalize: bool = False
    whole_words: bool = False
    add_begin: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = "|".join([_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _LINES])
_QWEN2 = "|".join([_CONTRACTIONS, _WORD, r"\p{N}", _PUNCTUATION, _LINES])
_QWEN35 = "|".join(
    [
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _LINES,
    ]
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _LINES,
    ]
)

_LLAMA3_RULE = PreTokenizer((_LLAMA3,), whole_words=True, add_begin=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    # What the format's own reader does where a file says "default"; not the same as "gpt-2".
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": PreTokenizer((_QWEN2,), normalize=True),
    "qwen35": PreTokenizer((_QWEN35,), normalize=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_begin=True),
}


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Args:
        metadata: the file's key-value pairs as Python values, arrays as lists.

    Raises:
        TokenizerError: a key is missing or of the wrong type, the parts contradict each other, or
            the vocabulary or its pre-tokenizer is of an unsupported kind; the message names it.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builder = _BUILDERS.get(kind) if isinstance(kind, str) else None
    if builder is None:
        raise TokenizerError(
            f"tokenizer.ggml.model is {kind!r}; supported are {', '.join(sorted(_BUILDERS))}"
        )
    return builder(_Vocabulary.read(metadata))


@dataclass(frozen=True)
class _Vocabulary:
    """The checked parts that both kinds of vocabulary share."""

    metadata: Metadata
    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int] = field(repr=False)

    @classmethod
    def read(cls, metadata: Metadata) -> _Vocabulary:
        tokens = _array(metadata, "tokens", str)
        kinds: Sequence[int] = [_Kind.NORMAL] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata:
            kinds = _array(metadata, "token_type", int, len(tokens))
        ids = {text: token for token, text in enumerate(tokens)}
        if len(ids) < len(tokens):
            token = next(token for token, text in enumerate(tokens) if ids[text] != token)
            raise TokenizerError(
                f"tokenizer.ggml.tokens has {tokens[token]!r} twice, as token {token} and as "
                f"{ids[tokens[token]]}; the file is damaged"
            )
        return cls(metadata, tokens, kinds, ids)

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{name} must be true or false, not {value!r}")
        return value

    def token_id(self, name: str, default: int | None = None) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.{name} must be a token below {len(self.tokens)}, not {value!r}"
            )
        return value

    def finish(
        self, backend: Backend, add_begin: bool, defaults: Mapping[str, int] | None = None
    ) -> Tokenizer:
        """Add special tokens, what surrounds a text, and the chat template."""
        defaults = defaults or {}
        self._add_whole_tokens(backend)
        ids = {role: self.token_id(key, defaults.get(role)) for role, key in _ROLES.items()}
        begin = ids["bos_token"] if self.flag("add_bos_token", add_begin) else None
        end = ids["eos_token"] if self.flag("add_eos_token", False) else None
        if self.flag("add_bos_token", add_begin) and begin is None:
            raise TokenizerError("tokenizer.ggml.add_bos_token is set but bos_token_id is missing")
        backend.post_processor = self._surroundings(begin, end)
        template = self.metadata.get("tokenizer.chat_template")
        ends = {self.token_id(key) for key in _END_KEYS} | {ids["eos_token"]}
        return Tokenizer(
            backend,
            special_tokens={
                role: self.tokens[token] for role, token in ids.items() if token is not None
            },
            end_ids=[token for token in ends if token is not None],
            chat_template=template if isinstance(template, str) else None,
        )

    def _add_whole_tokens(self, backend: Backend) -> None:
        special = {_Kind.UNKNOWN, _Kind.CONTROL}
        backend.add_tokens(
            [
                AddedToken(text, normalized=False, special=kind in special)
                for text, kind in zip(self.tokens, self.kinds, strict=True)
                if text and (kind in special or kind == _Kind.USER_DEFINED)
            ]
        )

    def _surroundings(self, begin: int | None, end: int | None) -> processors.PostProcessor:
        marks = {"begin": begin, "end": end}
        used = {name: token for name, token in marks.items() if token is not None}
        single = [f"{name}:0" if name in used else "" for name in ("begin", "end")]
        return processors.TemplateProcessing(
            single=f"{single[0]} $A:0 {single[1]}".split(),
            special_tokens=[
                {"id": name, "ids": [token], "tokens": [self.tokens[token]]}
                for name, token in used.items()
            ],
        )


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Merges of bytes, as in GPT-2 (`tokenizer.ggml.model` is "gpt2")."""
    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    lines = _array(vocabulary.metadata, "merges", str)
    backend = _bpe(vocabulary, [_pair(line) for line in lines], ignore_merges=rule.whole_words)
    if rule.normalize:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return vocabulary.finish(backend, rule.add_begin)


def _sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    """Merges by score with bytes for unknown characters (`tokenizer.ggml.model` is "llama")."""
    defaults = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
    unknown = vocabulary.token_id("unknown_token_id", defaults["unk_token"])
    backend = _bpe(
        vocabulary,
        _merges_by_score(vocabulary),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Prepend(_SPACE)] if prefix else []),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return vocabulary.finish(backend, add_begin=True, defaults=defaults)


_BUILDERS: Mapping[str, Callable[[_Vocabulary], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: object) -> Backend:
    try:
        return Backend(models.BPE(vocab=dict(vocabulary.ids), merges=merges, **options))
    except Exception as error:  # the tokenizers library raises no narrower kind
        raise TokenizerError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error


def _pair(line: str) -> tuple[str, str]:
    """The two sides of a merge; the first may itself be a space."""
    at = line.find(" ", 1)
    if at < 0:
        raise TokenizerError(f"tokenizer.ggml.merges has {line!r}, which is no pair of tokens")
    return line[:at], line[at + 1 :]


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All pairs that join to a piece, the best-scored piece first.

    SentencePiece joins the neighbours whose union scores highest; ranks of merges say the same.
    """
    scores = _array(vocabulary.metadata, "scores", float, len(vocabulary.tokens))
    mergeable = {
        text: scores[token]
        for token, text in enumerate(vocabulary.tokens)
        if vocabulary.kinds[token] == _Kind.NORMAL
    }
    ranked = sorted(mergeable, key=lambda text: -mergeable[text])
    return [
        (text[:cut], text[cut:])
        for text in ranked
        for cut in range(1, len(text))
        if text[:cut] in mergeable and text[cut:] in mergeable
    ]


def _array(
    metadata: Metadata, name: str, kind: type[_T], length: int | None = None
) -> Sequence[_T]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise TokenizerError(f"{key} must be a list of {kind.__name__}, and is not")
    if length is not None and len(value) != length:
        raise TokenizerError(f"{key} has {len(value)} entries, but there are {length} tokens")
    return value
