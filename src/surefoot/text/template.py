"""Chat templates: messages to the text that a model was trained on.

A template is a program that came with the weights, so it runs in a sandbox and sees plain data
only. The helpers that it may call are those of transformers, which templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surefoot.errors import PromptError, TokenizerError
from surefoot.text.messages import Message, checked, conversation


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja source, as checkpoints carry it.
            special_tokens: texts of special tokens by role ("bos_token", ...), for the template.
            now: the clock behind `strftime_now`.

        Raises:
            TokenizerError: the source is not a valid template; the message names the line.
        """
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"line {error.lineno} of the chat template is invalid: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """See ChatFormat; variables win over special tokens of the same name.

        Raises:
            PromptError: the messages are malformed, or the template rejects them; the message is
                the template's own.
            TokenizerError: the template tries what the sandbox forbids.
        """
        seen: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens}
        seen |= {name: checked(value, name) for name, value in (variables or {}).items()}
        seen["messages"] = conversation(messages)
        seen["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(seen)
        except SecurityError as error:
            raise TokenizerError(f"the chat template is unsafe: {error}") from error
        except Exception as error:  # a template is foreign code and can fail in any way
            raise PromptError(f"the chat template rejects the messages: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model says, for training; here it is only its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as prompts want it; Jinja's own filter would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
