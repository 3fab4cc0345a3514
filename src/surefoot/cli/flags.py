"""How a flag is declared: its help from a docstring, its default, its value read strictly."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence

from cyclopts import Parameter, Token

_UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)

Converter = Callable[[object, Sequence[Token]], object]


def attribute_help(documented: type) -> Mapping[str, str]:
    """What a dataclass says about its fields under "Attributes:", by field name.

    Where code says None, a command line says nothing.
    """
    text = inspect.getdoc(documented) or ""
    section = text.partition("\nAttributes:\n")[2].partition("\n\n")[0]
    about = {name: " ".join(words.split()) for name, words in _ENTRY.findall(section)}
    return {
        name: words[0].upper() + words[1:].replace("None", "no value")
        for name, words in about.items()
    }


def whole(_kind: object, tokens: Sequence[Token]) -> int:
    """Read a whole number; unlike the parser's own reading, 1.5 is none.

    Raises:
        ValueError: it is something else.
    """
    return _whole_number(tokens[-1].value)


def wholes(_kind: object, tokens: Sequence[Token]) -> list[int]:
    """Read a whole number from each token; raises as `whole` does."""
    return [_whole_number(token.value) for token in tokens]


def number(_kind: object, tokens: Sequence[Token]) -> float:
    """Read a number; its range is checked elsewhere.

    Raises:
        ValueError: it is none.
    """
    try:
        return float(tokens[-1].value)
    except ValueError:
        raise ValueError(f"must be a number, not {tokens[-1].value!r}") from None


def size(_kind: object, tokens: Sequence[Token]) -> int:
    """Read a number of bytes: 512MiB, 2GB, 1073741824.

    Raises:
        ValueError: the number or the unit is not understood.
    """
    text = tokens[-1].value.strip()
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(
            f"must be a number of bytes such as 1073741824, 512MiB or 2GB, not {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()]) if match[2] else int(float(match[1]))


def flag(
    about: str,
    default: object = None,
    alias: tuple[str, ...] = (),
    convert: Converter | None = None,
    metavar: str | None = None,
) -> Parameter:
    """A flag that is None when it was not given.

    Args:
        about: what --help says.
        default: shown as the default, unless None.
        alias: other spellings, dashes included.
        convert: reads the value; None leaves it to the parser.
        metavar: stands for the value in --help.
    """
    return Parameter(
        alias=alias,
        help=about,
        converter=convert,
        metavar=metavar,
        negative=(),
        show_default=False if default is None else lambda _: str(default),
    )


def switch(
    about: str, default: object = None, alias: tuple[str, ...] = (), off: tuple[str, ...] = ()
) -> Parameter:
    """A flag without value that is None when it was not given.

    Args:
        about: what --help says.
        default: shown as the default, unless None.
        alias: other spellings, dashes included.
        off: spellings that mean False.
    """
    return Parameter(
        alias=alias,
        help=about,
        negative=off,
        show_default=False if default is None else lambda _: str(default),
    )


def refused() -> Parameter:
    """A flag that is read only so that the settings can refuse it with their reason."""
    return Parameter(show=False, negative=())


def _whole_number(text: str) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(f"must be a whole number, not {text!r}")
    return int(text)
