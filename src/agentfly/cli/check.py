"""``agentfly check``: whether everything that a run needs is there and works."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly import interruption

if TYPE_CHECKING:
    from agentfly.cli.experiment import Experiment
    from agentfly.rollouts.preflight import Finding


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
    """Try all that a configuration needs, before any long work: tools, resources, reward, model and its chat format.

    Each line says what was tried, and where it does not work, why and what to do. Exits with 1 if anything does not.
    What works and is probably not meant is in doubt, such as an agent that earns its reward by doing nothing.
    """
    from agentfly.cli.experiment import Experiment
    from agentfly.cli.source import endpoint_asked, load_source

    config, _ = load_source(source, [*endpoint_asked(base_url), *(overrides or [])], checkpoint)
    experiment = Experiment.of(config)
    failed = interruption.run(_checked(experiment))
    if failed:
        typer.echo(f"{failed} of the above will not work in a run", err=True)
        raise typer.Exit(1)


async def _checked(experiment: Experiment) -> int:
    """Print what is found as it is found; answers how much does not work."""
    from agentfly.rollouts.preflight import preflight

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


def _print(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    took = f"  {finding.seconds:.1f} s" if finding.seconds >= 0.1 else ""
    word = Text("FAILED", "bold red")
    if finding.ok:
        word = Text("doubt ", "yellow") if finding.doubtful else Text("ok    ", "green")
    line = Text.assemble(
        word, f"  {finding.what}{took}  ", (finding.said, "dim" if finding.ok and not finding.doubtful else "")
    )
    Console().print(line, soft_wrap=True)
