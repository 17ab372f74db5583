"""``agentfly config``: every field of a configuration, with its default and purpose."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentfly.cli.config_fields import ConfigFieldGroup


def config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD|CONFIG.yaml [key=value]...]",
            help="A field or a group, such as training.kl or learning_rate; or a configuration to print.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List every field of a configuration: its type, default and purpose.

    With a configuration file, print that configuration with the effective value of every field.
    """
    from rich.console import Console

    words = words or []
    if words and Path(words[0]).is_file():
        _print_resolved(Path(words[0]), words[1:])
        return
    groups = [group for word in words or [""] for group in _matching_groups(word)]
    if as_json:
        typer.echo(json.dumps([asdict(field) for group in groups for field in group.fields], indent=2))
        return
    console = Console()
    for group in groups:
        console.print(_render_group(group))


def _matching_groups(word: str) -> list[ConfigFieldGroup]:
    """Return the fields that a word names: all, a group with its inner groups, or single fields.

    Raises:
        ConfigError: it names none.
    """
    from dataclasses import replace

    from agentfly.cli.config_fields import field_groups, nearest_field
    from agentfly.cli.config_file import RunConfig
    from agentfly.training.config.base import SYNONYMS

    groups = field_groups(RunConfig)
    if not word:
        return list(groups)
    if meant := SYNONYMS.get(word.removeprefix("training.")):
        typer.echo(f"{word} is called training.{meant} here.", err=True)
        word = f"training.{meant}"
    keys = {group.key for group in groups if group.key == word or group.key.endswith(f".{word}")}
    within = [one for one in groups if one.key in keys or one.key.startswith(tuple(f"{key}." for key in keys))]
    if within:
        return within
    named = [
        replace(group, fields=fields)
        for group in groups
        if (fields := tuple(one for one in group.fields if word in (one.key, one.name)))
    ]
    if not named:
        near = nearest_field(word, RunConfig)
        remedy = f"Did you mean {near!r}?" if near else "agentfly config lists all fields."
        raise ConfigError(f"There is no field, and no configuration file, {word!r}. {remedy}")
    return named


def _print_resolved(path: Path, overrides: list[str]) -> None:
    from agentfly.cli.config_file import config_text, load_config

    typer.echo(config_text(load_config(path, overrides)), nl=False)


def _render_group(group: ConfigFieldGroup) -> RenderableType:
    """Render a group: each key with its default, as an override is written, its type and its purpose."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = [Text(f"{group.key or 'the run'}: {group.about}", "bold underline")]
    for field in group.fields:
        is_text = field.default in ("required", "see below")
        head = Text.assemble((field.key, "bold"), "  " if is_text else "=", field.default, (f"  ({field.kind})", "dim"))
        lines += [head, Padding(Text(field.meaning), (0, 0, 0, 4))]
    return Group(*lines, "")
