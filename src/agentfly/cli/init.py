"""``agentfly init``: a small project that trains as it stands.

A new project: the template, written out under a name of its own.
"""

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


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the project goes; it is called so.")],
) -> None:
    """Begin a project: a task with its tool, reward, configuration and tests, which trains as it stands."""

    written = new_project(directory)
    typer.echo(f"{directory}: {', '.join(path.name for path in written)}")
    typer.echo("\nwhat can be done next")
    if directory.absolute() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(directory))}")
    for command in ("agentfly check config.yaml", "agentfly train config.yaml", "pytest"):
        typer.echo(f"  {command}")


TEMPLATE = Path(__file__).parent / "project_template"
"""A project that works as it lies there, called ``my-task``."""

FILES = ("README.md", "config.yaml", "my_task.py", "test_my_task.py")

_NAME, _MODULE, _INSTALL = "my-task", "my_task", "INSTALL-TRAIN"


def new_project(directory: Path) -> list[Path]:
    """Write a small project that trains as it stands: task, tool, reward, configuration, tests and a README.

    Args:
        directory: where it goes; made if it is missing. The project is called after it.

    Returns:
        The files that were written.

    Raises:
        ConfigError: the directory is not empty, or nothing can be called after it.
        PrerequisiteError: it cannot be written.
    """
    directory = directory.absolute()
    name, module = directory.name, module_name(directory.name)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file. Name a directory that is not there yet, or is empty.")
    try:
        if directory.is_dir() and (found := sorted(entry.name for entry in directory.iterdir())):
            raise ConfigError(
                f"{directory} is not empty: it holds {', '.join(found[:3])}{', …' if len(found) > 3 else ''}. Name a "
                "directory that is not there yet, or is empty."
            )
        directory.mkdir(parents=True, exist_ok=True)
        written = []
        for file in FILES:
            text = (TEMPLATE / file).read_text(encoding="utf-8")
            for placeholder, meant in ((_NAME, name), (_MODULE, module), (_INSTALL, install_command("train"))):
                text = text.replace(placeholder, meant)
            path = directory / file.replace(_MODULE, module)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except PermissionError as error:
        raise PrerequisiteError(
            f"The project {directory} cannot be made: {error.strerror}. Name a directory that you may write."
        ) from error
    return written


def module_name(name: str) -> str:
    """What the Python module of a project is called: the name as an identifier that shadows no other module.

    ``my-task`` gives ``my_task``, ``2048`` gives ``task_2048``, and ``json`` gives ``json_task``.

    Raises:
        ConfigError: there is neither a letter nor a digit in the name.
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
