"""``agentfly tokens``: whether a run's tokens are those sampled, and what re-tokenizing would have changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core.errors import AgentFlyError, ConfigError, TokenInvariantError

if TYPE_CHECKING:
    from rich.table import Table

    from agentfly.evaluation.token_audit import TokenAudit

app = typer.Typer(help="Inspect the tokens of a run.", no_args_is_help=True)


@app.command("audit")
def audit(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|FILE.jsonl", help="A run's directory, or a file of trajectories.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The model that sampled the tokens; by default the model of the run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Re-tokenize a run's text, as systems that exchange text do, and count the tokens that would have changed.

    The stored ids are checked too. The exit code is 1 if they differ from the sampled ids.
    """
    from rich.console import Console

    from agentfly.cli.rescore import trajectory_files
    from agentfly.core.trajectory import load_trajectories
    from agentfly.evaluation.token_audit import audit_tokens
    from agentfly.policies.catalog import resolve_model
    from agentfly.policies.hf_tokenizer import HFTokenizer

    files = trajectory_files(source)
    model = model or _model(source, files)
    tokenizer = HFTokenizer.load(resolve_model(model))
    found = audit_tokens((one for path in files for one in load_trajectories(path)), tokenizer)
    if not found.trajectories:
        raise ConfigError(f"No trajectory of {source} has token ids, so there is nothing to audit.")
    if found.is_wrong_tokenizer:
        raise ConfigError(
            f"The ids of {found.mismatched_turns} of {found.turns} turns do not decode to their text, so the tokenizer "
            f"of {model} did not make them. Name the model that sampled them: --model NAME. A ScriptedPolicy has its "
            "own ByteTokenizer; audit it in Python: agentfly.evaluation.token_audit.audit_tokens."
        )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
    else:
        console = Console()
        console.print(_table(found))
        for example in found.examples:
            sampled, encoded = (" ".join(map(repr, part)) for part in (example.sampled, example.encoded))
            console.print(
                f"{example.rollout_id}, turn {example.turn}: sampled {sampled}, re-tokenized {encoded or 'nothing'}",
                markup=False,
                highlight=False,
            )
    if found.faults:
        raise TokenInvariantError(
            f"{len(found.faults)} faults in the stored ids, which differ from the sampled ids: "
            + "; ".join(found.faults[:5])
        )


def _model(source: Path, files: Sequence[Path]) -> str:
    """Return the model of a run: from its configuration, its last checkpoint, or the settings of its rollouts.

    Raises:
        ConfigError: none of them names one model.
    """
    from agentfly.cli.config_file import load_config
    from agentfly.cli.experiment import Experiment
    from agentfly.core.run_directory import RunDirectory
    from agentfly.rollouts.rollout_record import RolloutRecord
    from agentfly.training.checkpoints import Checkpoints, read_trainer_state

    run = RunDirectory(source if source.is_dir() else source.parent.parent)
    config = run.config_file
    try:
        if config.is_file():
            return str(Experiment.load(load_config(config, [])).agent.model)
        if run.checkpoints.is_dir() and (checkpoint := Checkpoints(run.checkpoints, keep=1).latest_valid()):
            return read_trainer_state(checkpoint).model
        models = {str(RolloutRecord(path, resume=True).settings["the model"]) for path in files}
    except (AgentFlyError, KeyError) as error:
        home = config if config.is_file() else source
        raise ConfigError(f"{home} does not tell which model this is ({error}). Say it: --model NAME.") from error
    if len(models) > 1:
        raise ConfigError(f"{source} has rollouts of {', '.join(sorted(models))}. Name a file of one of them.")
    return models.pop()


def _table(found: TokenAudit) -> Table:
    from rich.table import Table

    table = Table(title="tokens", title_justify="left")
    table.add_column("")
    for heading in ("in all", "would have drifted", "share"):
        table.add_column(heading, justify="right")
    for name, total, drifted, share in (
        ("trajectories", found.trajectories, found.drifted_trajectories, found.drifted_trajectory_share),
        ("sampled tokens", found.sampled_tokens, found.drifted_tokens, found.drifted_token_share),
    ):
        table.add_row(name, f"{total:,}", f"{drifted:,}", f"{share:.2%}")
    table.add_row("stored ids", f"{found.sampled_tokens:,}", *(("faulty", "") if found.faults else ("0", "0 %")))
    return table
