"""begun_run: the run that ``agentfly train`` and ``agentfly sft`` begin or go on with, known once it is under way."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from agentfly.cli.config_file import RunConfig
    from agentfly.events import EventStream
    from agentfly.run_directory import RunDirectory


@contextmanager
def begun_run(
    config: RunConfig, resumed: RunDirectory | None, events: EventStream, *, command: str, sources: str = ""
) -> Iterator[None]:
    """Keep a run's configuration once it is known that it can be begun, or gone on with, as that says.

    Whoever stops the run is told how to go on with it.

    Args:
        config: the configuration.
        resumed: the run that is gone on with; a new one begins if it is None.
        events: what the run tells within the block.
        command: the command that goes on with it.
        sources: further words of that command.
    """
    from agentfly.cli.config_file import save_config
    from agentfly.events import Event, TrainingStarted
    from agentfly.run_directory import RunDirectory

    run = resumed

    def keep_configuration(event: Event) -> None:
        nonlocal run
        if isinstance(event, TrainingStarted):
            run = RunDirectory(event.run_dir)
            save_config(config, run.config_file)

    try:
        with events.subscribed(keep_configuration, required=True):  # without it the run could not be resumed
            yield
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, and SIGTERM
        if run is not None:
            words = ["agentfly", command, "--resume", shlex.quote(str(run.path)), *([sources] if sources else [])]
            typer.echo(f"stopped; to go on: {' '.join(words)}", err=True)
        raise
