"""``agentfly check``: checks that everything a run needs exists and works."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core import signals

if TYPE_CHECKING:
    from agentfly.cli.experiment import Experiment
    from agentfly.evaluation.preflight import CheckResult


def check(
    source: Annotated[Path, typer.Argument(metavar="CONFIG.yaml|RUN_DIR", help="A configuration, or a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Fields to override.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of a run: the step to check, or 'none' for the model before training.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask the model at this OpenAI-compatible endpoint.")
    ] = None,
) -> None:
    """Check everything a configuration needs before a long run: tools, resources, reward, model and chat format.

    Each line names a check and, if it fails, the reason and the remedy. Exits with 1 if anything fails. "doubt"
    marks a result that is probably not intended, such as a reward for an agent that does nothing.
    """
    from agentfly.cli.command_run import base_url_override, load_source
    from agentfly.cli.experiment import Experiment

    config, _ = load_source(source, [*base_url_override(base_url), *(overrides or [])], checkpoint)
    experiment = Experiment.load(config)
    failed = signals.run_until_signal(_run_checks(experiment))
    if failed:
        typer.echo(f"{failed} of these checks failed", err=True)
        raise typer.Exit(1)


async def _run_checks(experiment: Experiment) -> int:
    """Print each result as it arrives, and return the number of failures."""
    from agentfly.evaluation.preflight import preflight

    results = preflight(
        experiment.agent,
        experiment.tasks or experiment.eval_tasks or experiment.required_tasks(),
        eval_tasks=experiment.eval_tasks if experiment.tasks else None,
        reward=experiment.reward,
        oracle=experiment.oracle,
        policy=experiment.policy,
    )
    failed = 0
    async with aclosing(results):
        async for result in results:
            failed += not result.ok
            _print(result)
    return failed


def _print(result: CheckResult) -> None:
    from rich.console import Console
    from rich.text import Text

    took = f"  {result.seconds:.1f} s" if result.seconds >= 0.1 else ""
    word = Text("FAILED", "bold red")
    if result.ok:
        word = Text("doubt ", "yellow") if result.suspicious else Text("ok    ", "green")
    line = Text.assemble(
        word, f"  {result.subject}{took}  ", (result.detail, "dim" if result.ok and not result.suspicious else "")
    )
    Console().print(line, soft_wrap=True)
