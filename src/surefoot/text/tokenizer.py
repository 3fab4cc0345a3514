"""Text to token ids and back, from the tokenizer files of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from surefoot.errors import PromptError, TokenizerError
from surefoot.text.pieces import PieceTable, spelling_of

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
# Any of these says that the folder means to bring a tokenizer.
_SIGNS = (
    TOKENIZER_FILE,
    SETTINGS_FILE,
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_ADDED_TOKEN_KEYS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

Json = Mapping[str, object]


class Tokenizer:
    """A vocabulary: encodes text, decodes token ids, and knows its special tokens.

    Attributes:
        begin_id: the token that begins a text, if there is one. `encode` adds it by itself where
            the model wants it.
        end_ids: tokens after which the model has nothing more to say.
        special_ids: tokens that are marks, not text.
        special_tokens: their texts by role ("bos_token", "eos_token", ...), for chat templates.
        chat_template: Jinja source of the model's own chat template, if it has one.
        vocab_size: the highest token id plus one, added tokens included.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        end_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wrap a backend whose special tokens are already marked as such.

        Raises:
            TokenizerError: the backend's decoder is of an unsupported kind.
        """
        # A file may carry the cut and the padding of its training; a prompt is served whole.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = PieceTable(backend, spelling_of(backend))
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        self.begin_id = self._role_id("bos_token")
        self.end_ids = frozenset(end_ids)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised.

        Args:
            text: any text without lone surrogates.
            add_special: add what the model wants around a text, such as its begin token. Leave it
                out for text that a chat template has rendered.

        Raises:
            PromptError: `text` has a lone surrogate, which no encoding of Unicode can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"character {error.start} is the lone surrogate {text[error.start]!r}; "
                "send text that is valid Unicode"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`, as if nothing came before them; broken UTF-8 becomes U+FFFD.

        Ids without a token, which a model with a padded vocabulary may emit, have no text.
        """
        raw = b"".join(self.pieces(ids, skip_special))
        return self._pieces.spelling.trim(raw.decode("utf-8", "replace"))

    def pieces(
        self, ids: Iterable[int], skip_special: bool = True, begins: bool = True
    ) -> Iterator[bytes]:
        """The bytes of each token that has text, in order.

        Args:
            ids: token ids.
            skip_special: leave special tokens out.
            begins: whether the text begins here, which some vocabularies spell differently.
        """
        for token in ids:
            if skip_special and token in self.special_ids:
                continue
            piece = self._pieces.first(token) if begins else self._pieces.rest(token)
            if piece is not None:
                begins = False
                yield piece

    def token_text(self, token: int) -> str:
        """Text of one token as it stands after others, special or not; for display."""
        return (self._pieces.rest(token) or b"").decode("utf-8", "replace")

    @property
    def leading_spaces(self) -> int:
        """At most this many spaces are dropped where a text begins."""
        return self._pieces.spelling.leading_spaces

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, or None where the folder has no tokenizer files.

    End tokens are those of generation_config.json, else of config.json, and the tokenizer's own.
    The begin token is added where tokenizer.json says so.

    Raises:
        TokenizerError: a file is damaged, or only formats other than tokenizer.json are there.
    """
    present = [name for name in _SIGNS if (folder / name).is_file()]
    if not present:
        return None
    if TOKENIZER_FILE not in present:
        raise TokenizerError(
            f"{folder} has {', '.join(present)} but no {TOKENIZER_FILE}, the one format that is "
            "read; make it by loading the tokenizer with transformers and saving it"
        )
    backend = _load_backend(folder / TOKENIZER_FILE)
    settings = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / SETTINGS_FILE),
    }
    special = _special_tokens(settings)
    _mark_added(backend, settings.get("added_tokens_decoder"), folder / SETTINGS_FILE)
    _mark_special(backend, [*special.values(), *_further_special(settings)])
    own_end = backend.token_to_id(special.get("eos_token", ""))
    return Tokenizer(
        backend,
        special_tokens=special,
        end_ids=read_end_ids(folder) | ({own_end} if own_end is not None else set()),
        chat_template=_read_template(folder, settings),
    )


def read_end_ids(folder: Path) -> frozenset[int]:
    """End tokens that a checkpoint folder names apart from its tokenizer.

    Raises:
        TokenizerError: a file is damaged or names something that is no token id.
    """
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        inner = config.get("text_config")
        places = (config, inner) if isinstance(inner, dict) else (config,)
        for place in places:
            if place.get("eos_token_id") is not None:
                return _token_ids(place["eos_token_id"], folder / name)
    return frozenset()


def _token_ids(value: object, path: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise TokenizerError(f"{path}: eos_token_id must be token ids, not {value!r}")
    return frozenset(ids)


def _load_backend(path: Path) -> Backend:
    try:
        return Backend.from_str(_read_text(path))
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises no narrower kind
        raise _damaged(path, error) from error


def _read_json(path: Path) -> Json:
    """An object from a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TokenizerError:
    return TokenizerError(f"{path} is damaged: {error}; fetch the file again")


def _content(value: object) -> str | None:
    """Text of a special token, written as itself or as an object with its matching rules."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(settings: Json) -> dict[str, str]:
    named = {role: _content(value) for role, value in settings.items() if role.endswith("_token")}
    return {role: text for role, text in named.items() if text is not None}


def _further_special(settings: Json) -> list[str]:
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(name)
        values = value.values() if isinstance(value, dict) else value
        if isinstance(values, Iterable) and not isinstance(values, str):
            found.extend(text for text in map(_content, values) if text is not None)
    return found


def _mark_special(backend: Backend, texts: Iterable[str]) -> None:
    """Make whole, special tokens of those texts that the vocabulary knows as ordinary ones."""
    added = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(texts)
            if text not in added and backend.token_to_id(text) is not None
        ]
    )


def _mark_added(backend: Backend, described: object, path: Path) -> None:
    """Apply the added tokens that the settings describe otherwise than tokenizer.json."""
    if not isinstance(described, dict):
        return
    try:
        wanted = {int(token): _added_token(entry) for token, entry in described.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: added_tokens_decoder is damaged: {error}") from error
    added = backend.get_added_tokens_decoder()
    for token, entry in sorted(wanted.items()):
        known = backend.token_to_id(entry.content)
        appends = known is None and token == backend.get_vocab_size()
        if appends or (known == token and repr(entry) != repr(added.get(token))):
            backend.add_tokens([entry])


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{key: entry[key] for key in _ADDED_TOKEN_KEYS if key in entry})


def _read_template(folder: Path, settings: Json) -> str | None:
    """The default chat template: from its own file, else from the tokenizer's settings."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    source = settings.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if _is_object(entry)}
        source = named.get("default") or next(iter(named.values()), None)
    return source if isinstance(source, str) else None


def _is_object(value: object) -> bool:
    return isinstance(value, dict)
