"""ChatTemplate: a model's Jinja chat template, compiled once, in the surroundings that it is written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates look for an assistant's thoughts."""


class ChatTemplate:
    """Renders conversations as `transformers` does, without its copies and checks of every message.

    The template's code is sandboxed. What it knows of the time is the moment at which it was compiled, so that a
    conversation that goes on past midnight is not written differently.

    Args:
        source: the Jinja template.
        variables: what else it may refer to, such as ``bos_token``.

    Raises:
        TemplateError: the source is no Jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        environment = _environment()
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """A conversation as text.

        Raises:
            TemplateError, TypeError, ValueError, KeyError: the template refuses the conversation.
        """
        return self._template.render(
            messages=[_known_as(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )

    def written(self) -> list[str]:
        """The texts that the template may write: all but its code."""
        return [text for _, kind, text in self._template.environment.lex(self.source) if kind in ("data", "string")]


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``, which some templates put around what the model says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Only what stands between the two."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _known_as(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without empty fields, its thoughts under every name by which templates know them."""
    known = {name: value for name, value in message.items() if value is not None}
    thoughts = next((known[name] for name in REASONING_FIELDS if name in known), None)
    return known if thoughts is None else {**dict.fromkeys(REASONING_FIELDS, thoughts), **known}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(why: str) -> None:
    raise TemplateError(why)
