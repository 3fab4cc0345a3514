"""Flags from a YAML file, for every command: `--config FILE`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml
from cyclopts import App, Argument, ArgumentCollection, Token

from surefoot.errors import SettingError

CONFIG = "--config"
_MOST_BYTES = 1 << 20


def apply_settings_file(
    _app: App, _commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Give each flag that the command line left out its value from the file that --config names.

    Raises:
        SettingError: the file cannot be read, or has a key that is no flag of this command.
    """
    named = [
        token.value
        for argument in arguments
        for token in argument.tokens
        if CONFIG in argument.names
    ]
    if not named:
        return
    path = Path(named[-1]).expanduser()
    for key, value in read_settings(path).items():
        _apply(arguments, key, value, path)


def read_settings(path: Path) -> Mapping[str, object]:
    """The file's keys and values; an empty file has none.

    Raises:
        SettingError: it is absent, no YAML, or not a mapping from names to values.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SettingError("config", f"{path} is larger than 1 MiB, which no such file is")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError("config", f"{path} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SettingError("config", f"{path}{line} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingError("config", f"{path} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingError("config", f"{path} must map flag names to values")
    return content


def _apply(arguments: ArgumentCollection, key: str, value: object, path: Path) -> None:
    flag = f"--{key.replace('_', '-')}"
    try:
        argument, _, switched = arguments.match(flag)
    except ValueError:
        raise SettingError(
            key, f"unknown key in {path}; it must be a flag of this command"
        ) from None
    if flag == CONFIG:
        raise SettingError(key, f"{path} cannot name another file")
    if argument.tokens or value is None:
        return
    if isinstance(value, bool) and isinstance(switched, bool):
        # A spelling such as no-prefix-cache sets False when it is true.
        value = value == switched
    for text in _texts(argument, key, value):
        argument.append(Token(keyword=flag, value=text, source=str(path)))


def _texts(argument: Argument, key: str, value: object) -> list[str]:
    """The value as the command line has it, once for each time it would be given there."""
    if not isinstance(value, list):
        return [_text(key, value)]
    texts = [_text(key, entry) for entry in value]
    repeats = argument.token_count()[1]
    return texts if repeats else [",".join(texts)]


def _text(key: str, value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float():
            return str(value)
        case dict():
            return json.dumps(value)
    raise SettingError(key, f"must be a text, a number, a list or a mapping, not {value!r}")
