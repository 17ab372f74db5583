"""``agentfly init``: a small project from the template, which trains unchanged."""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import re
import shlex
import unicodedata
from pathlib import Path
from typing import Annotated

import typer

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.installation import install_command

TEMPLATE = Path(__file__).parent / "project_template"
"""A working project named ``my-task``."""

FILES = ("README.md", "config.yaml", "my_task.py", "test_my_task.py")

_NAME, _MODULE, _INSTALL = "my-task", "my_task", "INSTALL-TRAIN"


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="The new directory; the project is named after it.")
    ],
) -> None:
    """Create a project that can be trained at once: a task with its tool, reward, configuration and tests."""
    written = new_project(directory)
    typer.echo(f"{directory}: {', '.join(path.name for path in written)}")
    typer.echo("\nwhat can be done next")
    if directory.absolute() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(directory))}")
    for command in ("agentfly check config.yaml", "agentfly train config.yaml", "pytest"):
        typer.echo(f"  {command}")


def new_project(directory: Path) -> list[Path]:
    """Write a small project that trains unchanged: task, tool, reward, configuration, tests and a README.

    Args:
        directory: where to write it; created if missing. The project is named after it.

    Returns:
        The written files.

    Raises:
        ConfigError: the directory is not empty, or its name has no valid characters for a module name.
        PrerequisiteError: the project cannot be written.
    """
    directory = directory.absolute()
    name, module = directory.name, module_name(directory.name)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file. Choose a new or an empty directory.")
    try:
        if directory.is_dir() and (found := sorted(entry.name for entry in directory.iterdir())):
            raise ConfigError(
                f"{directory} is not empty: it contains {', '.join(found[:3])}{', …' if len(found) > 3 else ''}. "
                "Choose a new or an empty directory."
            )
        directory.mkdir(parents=True, exist_ok=True)
        written = []
        for file in FILES:
            text = (TEMPLATE / file).read_text(encoding="utf-8")
            for placeholder, replacement in ((_NAME, name), (_MODULE, module), (_INSTALL, install_command("train"))):
                text = text.replace(placeholder, replacement)
            path = directory / file.replace(_MODULE, module)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise PrerequisiteError(
            f"The project {directory} cannot be made: {error.strerror}. Name a directory that you may write."
        ) from error
    return written


def module_name(name: str) -> str:
    """Return the module name of a project: its name as an identifier that shadows no other module.

    ``my-task`` gives ``my_task``, ``2048`` gives ``task_2048``, and ``json`` gives ``json_task``.

    Raises:
        ConfigError: the name has neither a letter nor a digit.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    made = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    if not made:
        raise ConfigError(
            f"No Python module can be called after {name!r}: it has no letter from a to z and no digit. Choose another "
            "name, for instance my-task."
        )
    if made[0].isdigit():
        made = f"task_{made}"
    taken = keyword.iskeyword(made) or hasattr(builtins, made) or importlib.util.find_spec(made) is not None
    return f"{made}_task" if taken else made
