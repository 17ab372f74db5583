"""``agentfly check``: whether everything that a run needs exists and works."""

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

    Each line names a check and, if it fails, the reason and the remedy. Exits with 1 if anything fails. A check that
    works but is probably not intended is in doubt, such as an agent that earns its reward by doing nothing.
    """
    from agentfly.cli.command_run import base_url_override, load_source
    from agentfly.cli.experiment import Experiment

    config, _ = load_source(source, [*base_url_override(base_url), *(overrides or [])], checkpoint)
    experiment = Experiment.load(config)
    failed = signals.run_until_signal(_run_checks(experiment))
    if failed:
        typer.echo(f"{failed} of the above will not work in a run", err=True)
        raise typer.Exit(1)


async def _run_checks(experiment: Experiment) -> int:
    """Print each result as it arrives, and return the number of failures."""
    from agentfly.evaluation.preflight import preflight

    findings = preflight(
        experiment.agent,
        experiment.tasks or experiment.eval_tasks or experiment.required_tasks(),
        eval_tasks=experiment.eval_tasks if experiment.tasks else None,
        reward=experiment.reward,
        oracle=experiment.oracle,
        policy=experiment.policy,
    )
    failed = 0
    async with aclosing(findings):
        async for finding in findings:
            failed += not finding.ok
            _print(finding)
    return failed


def _print(finding: CheckResult) -> None:
    from rich.console import Console
    from rich.text import Text

    took = f"  {finding.seconds:.1f} s" if finding.seconds >= 0.1 else ""
    word = Text("FAILED", "bold red")
    if finding.ok:
        word = Text("doubt ", "yellow") if finding.suspicious else Text("ok    ", "green")
    line = Text.assemble(
        word, f"  {finding.subject}{took}  ", (finding.detail, "dim" if finding.ok and not finding.suspicious else "")
    )
    Console().print(line, soft_wrap=True)
