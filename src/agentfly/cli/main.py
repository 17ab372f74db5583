"""The ``agentfly`` command. Every command is a call that a user could make from Python.

A command's module imports what it needs only when the command runs, so that ``agentfly --help`` is fast.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agentfly import __version__
from agentfly.cli import (
    bench,
    check,
    compare,
    config,
    doctor,
    evaluate,
    gateway,
    init,
    models,
    rescore,
    resources,
    rollout,
    sft,
    tokens,
    train,
)
from agentfly.core import signals
from agentfly.core.errors import AgentFlyError, ConfigError, PrerequisiteError, UsageError
from agentfly.core.installation import install_command
from agentfly.policies.load import limit_openmp_spinning


class ConfiguredCommand(TyperCommand):
    """A command that explains how to set a field that was written as an option, as in ``--steps 3``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: an unknown option has the name of a field.
        """
        known = {"--help"}.union(*(parameter.opts for parameter in self.params))
        for index, word in enumerate(args):
            option, _, value = word.partition("=")
            if option.startswith("--") and option not in known:
                _reject_option(option, value or _value_after(args, index))
        return super().parse_args(ctx, args)


def _reject_option(option: str, value: str) -> None:
    from agentfly.cli.config_fields import find_field
    from agentfly.cli.config_file import RunConfig

    field = find_field(option.removeprefix("--").replace("-", "_"), RunConfig)
    if field is not None:
        raise ConfigError(f"There is no option {option}: fields are written without dashes. Write {field}={value}.")


def _value_after(args: Sequence[str], index: int) -> str:
    following = args[index + 1] if index + 1 < len(args) else "-"
    return "…" if following.startswith("-") else following


app = typer.Typer(
    name="agentfly",
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(train.demo)
app.command("init")(init.init)
app.command("check", cls=ConfiguredCommand)(check.check)
app.command("config")(config.config)
app.command("train", cls=ConfiguredCommand)(train.train)
app.command("sft", cls=ConfiguredCommand)(sft.sft)
app.command("eval", cls=ConfiguredCommand)(evaluate.evaluate)
app.command("compare")(compare.compare)
app.command("export")(models.export)
app.command("rollout", cls=ConfiguredCommand)(rollout.rollout)
app.command("gateway")(gateway.gateway)
app.command("rescore")(rescore.rescore)
app.add_typer(tokens.app, name="tokens")
app.add_typer(models.app, name="models")
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(resources.app, name="resources")


_TRAINING_PACKAGES = ("torch", "transformers", "safetensors", "numpy")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"agentfly {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning."""


def main() -> None:
    """Run the ``agentfly`` command; see `run_program`."""
    run_program(app)


def run_program(program: typer.Typer) -> None:
    """Run a command-line program. A failure that a user can fix is one message, without a traceback.

    Exits with 2 for invalid input and with 1 for any other failure. Exits with 130 after Ctrl-C, 143 after SIGTERM and
    129 after SIGHUP, once all resources are released.
    """
    limit_openmp_spinning()  # before any command imports torch
    _unwrap_help(program)
    with signals.signals_end_program():
        try:
            program()
        except Exception as error:
            shown = _user_error(error)
            if shown is None:
                raise
            _print_error(str(shown))
            sys.exit(2 if isinstance(shown, UsageError) else 1)


def run_function(command: Callable[..., None]) -> None:
    """Run a function as a command-line program; see `run_program`."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(command)
    run_program(program)


def _unwrap_help(program: typer.Typer) -> None:
    """Give all commands help texts with one line per paragraph: the line breaks of the source do not fit a terminal.

    A paragraph that starts with a backspace keeps its lines, as is usual in click.
    """
    for command in program.registered_commands:
        if command.callback is not None and command.callback.__doc__:
            paragraphs = inspect.cleandoc(command.callback.__doc__).split("\n\n")
            command.help = "\n\n".join(one if one.startswith("\b") else " ".join(one.split()) for one in paragraphs)
    for group in program.registered_groups:
        if group.typer_instance is not None:
            _unwrap_help(group.typer_instance)


def _user_error(error: BaseException) -> AgentFlyError | None:
    """Return the failure to show the user; None for one that AgentFly did not raise on purpose."""
    if isinstance(error, AgentFlyError):
        return error
    if isinstance(error, BaseExceptionGroup):
        causes = [_user_error(cause) for cause in error.exceptions]
        return None if None in causes else causes[0]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(error)
    if isinstance(error, PermissionError) and error.filename:
        return PrerequisiteError(
            f"This user may not do what was asked with {os.fsdecode(error.filename)} ({error.strerror}). Change its "
            "permissions, or have the files elsewhere: run_dir=... for a run's files, AGENTFLY_CACHE_DIR=... for "
            "models and images, AGENTFLY_STATE_DIR=... for what is written down of a run's resources."
        )
    if isinstance(error, ModuleNotFoundError) and error.name in _TRAINING_PACKAGES:
        return PrerequisiteError(
            f"This needs {error.name}, which is not installed: models that run on this machine, and training, come "
            f"with {install_command('train')}."
        )
    return None


def _disk_full(error: OSError) -> AgentFlyError:
    where = f"the file system that holds {os.fsdecode(error.filename)}" if error.filename else "the file system"
    return PrerequisiteError(
        f"There is no space left on {where}. Free some, or have the files elsewhere: run_dir=... for a run's files, "
        "AGENTFLY_CACHE_DIR=... for models, TMPDIR=... for what is written while a command runs."
    )


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


if __name__ == "__main__":
    main()
