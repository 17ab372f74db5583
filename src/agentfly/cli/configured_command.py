"""ConfiguredCommand: a command whose further words are ``key=value`` fields of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from agentfly.errors import ConfigError


class ConfiguredCommand(TyperCommand):
    """A command that tells how to write a field that was written as an option, as in ``--steps 3``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words apart.

        Raises:
            ConfigError: an option is none, and is called like a field.
        """
        known = {"--help"}.union(*(parameter.opts for parameter in self.params))
        for index, word in enumerate(args):
            option, _, value = word.partition("=")
            if option.startswith("--") and option not in known:
                _refuse_field(option, value or _value_after(args, index))
        return super().parse_args(ctx, args)


def _refuse_field(option: str, value: str) -> None:
    from agentfly.cli.field_list import field_called

    field = field_called(option.removeprefix("--").replace("-", "_"))
    if field is not None:
        raise ConfigError(f"There is no option {option}: fields are written without dashes. Write {field}={value}.")


def _value_after(args: Sequence[str], index: int) -> str:
    following = args[index + 1] if index + 1 < len(args) else "-"
    return "…" if following.startswith("-") else following
